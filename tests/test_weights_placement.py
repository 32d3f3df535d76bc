"""Weights go where they belong: in the dtype asked for, a shard at a time, and no process reads another's part."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_weights_hf import tiny_tensors, write_hf

from dspark_jax import load_target, sharding
from dspark_jax.weights.hf_config import read_config
from dspark_jax.weights.hf_files import read_hf
from dspark_jax.weights.tree import Index, Placement, build_params, part_shapes

QWEN2 = {"model_type": "qwen2"}


def qwen2(directory: Path) -> Path:
    """A tiny checkpoint with every kind of leaf: biases, fused heads, an untied head."""
    tensors = tiny_tensors("llama")
    for i in range(2):
        for name, rows in (("q", 24), ("k", 12), ("v", 12)):
            bias = np.arange(rows, dtype=np.float32) + 100 * i
            tensors[f"model.layers.{i}.self_attn.{name}_proj.bias"] = bias
    return write_hf(directory, tensors, QWEN2)


def split_axis(path: str, ndim: int, last: bool) -> int:
    """Of a fused leaf the heads or the width may be split, never a head."""
    return 0 if not last or path.endswith("bias") else 1 if path.endswith("/o") else ndim - 1


@dataclasses.dataclass(frozen=True)
class Part(Placement):
    """The second half of every leaf, by its first axis or its last."""

    last: bool = False

    def put(self, path: str, shape: tuple[int, ...], part: Any) -> Any:
        index, axis = [slice(0, size) for size in shape], split_axis(path, len(shape), self.last)
        half = shape[axis] // 2
        index[axis] = slice(half, 2 * half)
        return part(tuple(index))


@pytest.mark.parametrize("last", [False, True])
def test_a_shard_is_that_part_of_the_leaf_and_reads_nothing_else(tmp_path: Path, last: bool) -> None:
    whole = read_hf(qwen2(tmp_path))[1]
    config = read_config(tmp_path)
    stored = {
        part: np.random.default_rng(i).normal(size=shape) for i, (part, shape) in enumerate(part_shapes(config).items())
    }
    taken: list[int] = []

    def read(part: str, index: Index = ()) -> np.ndarray:
        taken.append(stored[part][index].size)
        return stored[part][index]

    full = build_params(config, read, Placement())
    taken.clear()
    shards = build_params(config, read, Part(last=last))
    assert sum(taken) == sum(leaf.size for leaf in jax.tree.leaves(shards))

    def compare(path: Any, shard: np.ndarray, leaf: jax.Array) -> None:
        at = split_axis(sharding.path_string(path), leaf.ndim, last)
        size = leaf.shape[at] // 2
        np.testing.assert_allclose(shard, np.take(leaf, range(size, 2 * size), axis=at), rtol=1e-6, err_msg=str(path))

    jax.tree_util.tree_map_with_path(compare, shards, full)
    assert jax.tree.structure(full) == jax.tree.structure(whole)


def test_bfloat16_files_load_as_bfloat16(tmp_path: Path) -> None:
    narrow = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tiny_tensors().items()}
    params = load_target(write_hf(tmp_path, narrow), "bfloat16").params
    layer = params["layers_1"]
    assert params["embed"].dtype == layer["qkv"].dtype == layer["down"].dtype == jnp.bfloat16
    assert layer["attn_norm"].dtype == params["final_norm"].dtype == jnp.float32
    np.testing.assert_array_equal(layer["down"], narrow["model.layers.1.mlp.down_proj.weight"])
    np.testing.assert_array_equal(params["embed"], narrow["model.embed_tokens.weight"])


def test_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    params = read_hf(write_hf(tmp_path, tiny_tensors()), only=("embed", "head"))[1]
    assert params.keys() == {"embed", "head"}


WORKER = """
import json, sys
import jax
from dspark_jax import load_target, sharding
from dspark_jax.config import MeshSettings
from dspark_jax.weights.safetensor_files import TensorFiles

read, sizes = TensorFiles.read, {}
def counted(self, name, index=()):
    out = read(self, name, index)
    sizes.setdefault(name, []).append(out.nbytes)
    return out
TensorFiles.read = counted

mesh = sharding.make_mesh(MeshSettings(fsdp=2, tensor=2))
target = load_target(sys.argv[1], "bfloat16", mesh)
largest = {name: max(each) for name, each in sizes.items()}
specs = {}
for path, leaf in jax.tree_util.tree_leaves_with_path(target.params):
    name = sharding.path_string(path)
    assert leaf.sharding.spec == sharding.spec(name, leaf.ndim), name
    specs[name] = [shard.data.size / leaf.size for shard in leaf.addressable_shards]
plain = load_target(sys.argv[1], "bfloat16")
pairs = zip(jax.tree.leaves(target.params), jax.tree.leaves(plain.params), strict=True)
assert all((jax.device_get(a) == jax.device_get(b)).all() for a, b in pairs)
print(json.dumps({"largest": largest, "specs": specs}))
"""


@pytest.mark.slow
def test_four_devices_hold_and_read_their_parts(tmp_path: Path) -> None:
    directory = write_hf(tmp_path / "m", tiny_tensors())
    stored = {name: tensor.nbytes for name, tensor in load_file(directory / "model.safetensors").items()}
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", WORKER, str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("layers_0/qkv", "layers_1/o", "layers_1/gate", "layers_0/down", "embed", "head"):
        assert found["specs"][name] == [0.25] * 4, name
    for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"):
        tensor = f"model.layers.1.{name}.weight"
        assert found["largest"][tensor] == stored[tensor] / 4, name


def test_scratch_names_do_not_matter(tmp_path: Path) -> None:
    """Norms and biases of an extra file are found by the index alone."""
    directory = qwen2(tmp_path / "m")
    single = read_hf(directory)[1]
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    groups = {"weights.safetensors": [n for n in tensors if n.endswith("weight")]}
    groups["rest.safetensors"] = [n for n in tensors if not n.endswith("weight")]
    for file, names in groups.items():
        save_file({name: tensors[name] for name in names}, directory / file)
    weight_map = {name: file for file, names in groups.items() for name in names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    jax.tree.map(np.testing.assert_array_equal, read_hf(directory)[1], single)
