"""Ahead-of-time compilation for TPU slices that are not here: the step of the paper's recipe, and reading HLO."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from dspark_jax import hlo
from dspark_jax.config import ConfigError
from dspark_jax.config_files import load_config, load_target_shape
from dspark_jax.slices import CHIPS, bytes_needed, flops

REPOSITORY = Path(__file__).resolve().parents[1]


def run(config: str, topology: str, *more: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "train.compile", "--config", f"configs/{config}.py", "--topology", topology, *more]
    known = {name: value for name, value in os.environ.items() if not name.startswith("JAX_DISABLE")}
    return subprocess.run(command, cwd=REPOSITORY, env=known, capture_output=True, text=True, check=False)


@pytest.mark.tpu_compile
def test_the_step_for_qwen3_4b_fits_a_v5p_slice() -> None:
    done = run("qwen3_4b", "v5p:2x2x4")
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("frozen target", "drafter", "optimiser state", "activations", "all-gather", "a step at the roofline"):
        assert line in done.stdout
    used, free = map(float, re.search(r"all +│ +([\d.]+) of ([\d.]+) GiB", done.stdout).groups())
    evaluating = float(re.search(r"held-out loss is taken +│ +([\d.]+) of", done.stdout).group(1))
    assert 1 < evaluating < used < free


@pytest.mark.tpu_compile
def test_what_no_topology_is_called_is_refused() -> None:
    done = run("qwen3_4b", "v99:2x2")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --topology v99:2x2: cannot be described")
    done = run("qwen3_4b", "v5p:2x2x4", "--mesh.fsdp", "3")
    assert done.returncode == 2
    assert "there are 16 devices" in done.stderr


@pytest.mark.parametrize("name", ["qwen3_4b", "qwen3_8b", "qwen3_14b"])
def test_the_recipes_are_the_papers(name: str) -> None:
    path = REPOSITORY / "configs" / f"{name}.py"
    config, target = load_config(path), load_target_shape(path)
    assert (config.draft.block_size, config.draft.num_layers, config.draft.markov_rank) == (7, 5, 256)
    assert (config.data.num_anchors, config.data.max_length, config.train.batch_size) == (512, 4096, 512)
    assert config.optimizer.learning_rate == 6e-4
    assert target.vocab_size == 151936 and target.max_length >= config.data.max_length


def test_a_config_without_a_target_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tiny\.py: defines no get_target\(\)"):
        load_target_shape(REPOSITORY / "configs" / "tiny.py")


def test_work_counts_loops_as_often_as_they_run() -> None:
    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        x = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
        return jax.checkpoint(lambda x: x @ x.T)(x)

    shapes = jax.ShapeDtypeStruct((8, 16), "float32"), jax.ShapeDtypeStruct((5, 16, 16), "float32")
    traced = jax.jit(program).trace(*shapes)
    assert flops(traced.jaxpr.jaxpr) == 5 * 2 * 8 * 16 * 16 + 2 * 8 * 16 * 8


def test_work_on_a_mesh_is_that_of_all_devices() -> None:
    mesh = jax.sharding.AbstractMesh((4, 2), ("rows", "tensor"))
    rows, whole = PartitionSpec("rows"), PartitionSpec()

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(rows, whole), out_specs=rows, axis_names={"rows"})(x, w)

    traced = jax.jit(program).trace(jax.ShapeDtypeStruct((8, 16), "float32"), jax.ShapeDtypeStruct((16, 3), "float32"))
    assert flops(traced.jaxpr.jaxpr) == 2 * 8 * 16 * 3


@pytest.mark.parametrize(
    ("message", "gib"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded by", 20.5),
        ("RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (20.50G) exceeds available HBM (", 22.5),
        ("INTERNAL: Mosaic failed to compile", None),
    ],
)
def test_what_a_refused_program_needs_is_read_off_its_message(message: str, gib: float | None) -> None:
    """The second kind of message leaves out the arguments, 2 GiB here."""
    needed = bytes_needed(RuntimeError(message), 2.0 * 2**30)
    assert needed is None if gib is None else needed == gib * 2**30


_MODULE = """HloModule m
%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]{1,0}) parameter(0)
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %g = f32[16,8]{1,0} all-gather(%x), channel_id=1, replica_groups=[4,4]<=[16], dimensions={0}
  %r = f32[4,8]{1,0} all-reduce(%x), channel_id=2, replica_groups={{0,1},{2,3}}, to_apply=%add
  %v = f32[4,8]{1,0:S(1)} copy(%r)
}

%cond (q: (s32[], f32[4,8])) -> pred[] {
  %q = (s32[], f32[4,8]{1,0}) parameter(0)
  %n = s32[] constant(10)
}

ENTRY %main (a: f32[4,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %t = (s32[], f32[4,8]{1,0}) tuple(%a)
  %w = (s32[], f32[4,8]{1,0}) while(%t), condition=%cond, body=%body
  %s = f32[2,8]{1,0} reduce-scatter(%a), channel_id=3, replica_groups=mesh['x'=2,'y'=8] {'x'}, dimensions={0}
}
"""


def test_traffic_is_read_off_a_module() -> None:
    found = hlo.traffic(_MODULE, 16)
    assert found.collectives == {
        "all-gather": 10 * 16 * 8 * 4 * 3 // 4,
        "all-reduce": 10 * 2 * 4 * 8 * 4 // 2,
        "reduce-scatter": 4 * 8 * 4 // 2,
        "all-to-all": 0,
        "collective-permute": 0,
    }
    # Each turn: the gather reads 128 bytes and writes 512, the reduction 128 and 128, the copy into fast memory 128.
    assert found.memory == 10 * (128 + 512 + 256 + 128) + 128 + 64


def test_a_chip_is_named_as_jax_names_it() -> None:
    assert all(name.startswith("TPU v") and chip.memory > 2**33 for name, chip in CHIPS.items())
