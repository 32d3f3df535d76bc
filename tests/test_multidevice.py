"""Sharding: the table covers every parameter, a mesh changes no number, and what does not divide is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import PartitionSpec
from tiny import make_drafter, make_target

from dspark_jax import sharding
from dspark_jax.config import ConfigError, LossConfig, MeshSettings, OptimizerSettings, TrainSettings
from train.objective import StepModels
from train.step import state_shardings

REPOSITORY = Path(__file__).resolve().parents[1]


def run_worker(script: str, devices: int, *arguments: str, **environment: str) -> subprocess.Popen:
    """A program of this folder in its own process, with fake CPU devices."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    known = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(REPOSITORY)} | environment
    command = [sys.executable, str(REPOSITORY / "tests" / script), *arguments]
    return subprocess.Popen(command, env=known, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)


@pytest.fixture(scope="module")
def eight() -> dict:
    process = run_worker("multidevice_worker.py", 8)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.multidevice
@pytest.mark.parametrize("name", ["8x1x1 in 1", "1x8x1 in 1", "2x2x2 in 1", "2x2x2 in 2"])
def test_a_mesh_and_accumulation_change_neither_loss_nor_gradients(eight: dict, name: str) -> None:
    measured = eight["meshes"][name]
    assert measured["loss"] < 1e-5
    assert measured["gradients"] < 1e-5
    assert measured["split"] == (0 if name.startswith("8x1x1") else 9)  # every matrix


@pytest.mark.slow
@pytest.mark.multidevice
@pytest.mark.parametrize(("name", "times"), [("8x1x1 in 1", 2), ("1x8x1 in 1", 1)])
def test_gradients_are_exchanged_once_and_not_in_every_chunk_of_blocks(eight: dict, name: str, times: int) -> None:
    """Each device has three chunks. A ring sends 7/8 of the bytes to scatter a sum, and as much to gather it again."""
    assert eight["meshes"][name]["sent"] == pytest.approx(times * 7 / 8, rel=0.05)


@pytest.mark.slow
@pytest.mark.multidevice
def test_the_kernels_attention_is_the_same_on_a_mesh(eight: dict) -> None:
    assert max(eight["kernel"]) < 1e-4  # of a sum of 8192 numbers


@pytest.mark.slow
@pytest.mark.multidevice
def test_the_state_keeps_its_split_and_the_step_is_compiled_once(eight: dict) -> None:
    assert eight["lost"] == [0, 0]
    assert eight["traces"] == 1


def test_every_parameter_of_target_and_drafter_is_in_the_table() -> None:
    mesh = sharding.make_mesh(MeshSettings(), jax.devices()[:1])
    for tied in (True, False):
        target = make_target(tied_head=tied)
        sharding.shardings(target.params, mesh)
    for changes in ({"family": "qwen2", "qkv_bias": True}, {"family": "gemma4"}):
        sharding.shardings(make_target(**changes).params, mesh)
    for head in ("vanilla", "gated", "rnn"):
        drafter = make_drafter(target, markov_head_type=head)
        sharding.shardings(drafter.frozen, mesh)
        settings = LossConfig(), OptimizerSettings(), TrainSettings(max_steps=1)
        models = StepModels(target.config, drafter.config, *settings)
        specs = {s.spec for s in jax.tree.leaves(state_shardings(models, mesh))}
        assert PartitionSpec("tensor", "fsdp") in specs


def test_a_weight_lies_like_its_optimiser_state_and_its_stacked_form() -> None:
    assert sharding.spec("opt_state/1/0/mu/backbone/layers_3/gate", 2) == PartitionSpec("tensor", "fsdp")
    assert sharding.spec("target_params/layers_3/gate", 2) == PartitionSpec("tensor", "fsdp")
    assert sharding.spec("layers/gate", 3) == PartitionSpec(None, "tensor", "fsdp")


@pytest.mark.parametrize(("path", "rank"), [("backbone/layers_0/router", 2), ("backbone/layers_0/gate", 3)])
def test_an_unknown_path_or_rank_is_refused_by_name(path: str, rank: int) -> None:
    with pytest.raises(ConfigError, match=rf"parameter '{path}' of {rank} axes: no rule"):
        sharding.spec(path, rank)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fsdp": 3}, "there are 2 devices"),
        ({"data": 4}, "there are 2 devices"),
        ({"data": -1}, "mesh data = -1"),
        ({"tensor": 0}, "mesh tensor = 0"),
    ],
)
def test_a_mesh_that_the_devices_cannot_form_is_refused(settings: dict, message: str) -> None:
    devices = jax.devices()[:1] * 2
    with pytest.raises(ConfigError, match=message):
        sharding.make_mesh(MeshSettings(**settings), devices)


def fake_mesh(data: int, fsdp: int, tensor: int) -> jax.sharding.AbstractMesh:
    return jax.sharding.AbstractMesh((data, fsdp, tensor), sharding.AXES)


def test_a_mesh_must_divide_the_batch_and_the_weights() -> None:
    sharding.check_batch(fake_mesh(2, 2, 2), 8, 2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"batch_size = 8: expected a multiple of 16"):
        sharding.check_batch(fake_mesh(4, 2, 1), 8, 2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"mesh fsdp = 5 does not divide embed of shape \(40, 32\)"):
        sharding.shardings({"embed": jax.ShapeDtypeStruct((40, 32), "float32")}, fake_mesh(1, 5, 1))  # type: ignore[arg-type]
