"""The mesh, and one table from parameter paths to its axes.

`data` and `fsdp` split the rows of a batch; `fsdp` also splits weights and optimiser state, which are gathered where
they are used; `tensor` splits the work inside a layer. Any of them may be 1. A weight is found by the end of its path,
so the same rule holds for a parameter, its gradient and its optimiser state, of target and drafter.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dspark_jax.config import ConfigError, MeshSettings

AXES = ("data", "fsdp", "tensor")
ROWS = ("data", "fsdp")

_Spec = tuple[str | None, ...]
# Path ends, first match wins. Matrices are stored [out, in]: `tensor` splits what a layer computes apart, heads and
# feed-forward units, and the sum over them is the only thing it has to exchange.
_RULES: tuple[tuple[str, _Spec], ...] = (
    (r"step|count", ()),
    (r"(\w+_)?norm|layer_scalar", (None,)),
    (r"embed|embed_VD|head|head_VD", ("tensor", "fsdp")),
    (r"draft_to_target_V|target_to_draft_V", (None,)),
    (r"transition_VW", ("tensor", "fsdp")),
    (r"layers(_\d+)?/qkv", ("tensor", None, None, "fsdp")),
    (r"layers(_\d+)?/qkv_bias", ("tensor", None, None)),
    (r"layers(_\d+)?/q", ("tensor", None, "fsdp")),
    (r"layers(_\d+)?/kv", (None, "tensor", None, "fsdp")),
    (r"layers(_\d+)?/o", ("fsdp", "tensor", None)),
    (r"layers(_\d+)?/(gate|up)", ("tensor", "fsdp")),
    (r"layers(_\d+)?/down", ("fsdp", "tensor")),
    (r"layers(_\d+)?/\w+_conv/base_kernel", (None, None, None)),
    (r"layers(_\d+)?/\w+_conv/kernel_projection", (None, None, None, "fsdp")),
    (r"backbone/fc", ("tensor", None, "fsdp")),
    (r"markov/(w1|w2)", ("tensor", "fsdp")),
    (r"markov/(gate|joint|tied|hidden_in|merge)", (None, "fsdp")),
    (r"markov/(gate|joint)_bias", (None,)),
    (r"markov/ngram", (None, "tensor", "fsdp")),
    (r"markov/hash_table", ("fsdp", None)),
    (r"markov/hash_(key|out)", (None, "fsdp")),
    (r"markov/gru_(in|state)", (None, None, "fsdp")),
    # The rest of a recurrent cell is small.
    (r"markov/cell_qkv", (None, None, None, None)),
    (r"markov/(cell_gates|out_gate|decay_out|out_gate_out)", (None, None, None)),
    (r"markov/(cell_out|cell_in|cell_beta|decay_in|out_gate_in)", (None, None)),
    (r"markov/(a_log|dt_bias|skip|out_gate_bias)", (None,)),
    (r"selector/(predecessor|successor)", ("tensor", "fsdp")),
    (r"selector/\w+_projection", (None, "fsdp")),
    (r"confidence_head/weight", (None,)),
    (r"confidence_head/bias", ()),
)


def make_mesh(settings: MeshSettings, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh over `devices` (None: all there are). Raises ConfigError where the axes do not multiply to their number.

    Devices of one process lie together, so that `tensor`, the chattiest axis, stays inside it.
    """
    devices = jax.devices() if devices is None else devices
    inner = settings.fsdp * settings.tensor
    data = settings.data or len(devices) // inner
    if data * inner != len(devices):
        raise ConfigError(
            f"mesh data = {settings.data}, fsdp = {settings.fsdp}, tensor = {settings.tensor}: there are"
            f" {len(devices)} devices, and the three must multiply to that"
        )
    axis_types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh((data, settings.fsdp, settings.tensor), AXES, axis_types=axis_types, devices=list(devices))


def mesh_of(params: Any) -> Mesh | None:
    """The mesh that weights lie on; None: on one device, or nowhere yet."""
    place = getattr(jax.tree.leaves(params)[0], "sharding", None)
    return place.mesh if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh) else None


def path_string(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def spec(path: str, rank: int) -> PartitionSpec:
    """Mesh axes of the array at `path`. Under `layers/` a leading axis may stack the layers; it is never split.

    Raises ConfigError for a path that no rule knows.
    """
    for pattern, axes in _RULES:
        if re.search(rf"(?:^|/)(?:{pattern})$", path):
            stacked = rank == len(axes) + 1 and "layers/" in path
            if rank == len(axes) or stacked:
                return PartitionSpec(*(((None,) if stacked else ()) + axes))
    raise ConfigError(f"parameter {path!r} of {rank} axes: no rule in dspark_jax/sharding.py says how to split it")


def shardings(tree: Any, mesh: Mesh) -> Any:
    """The sharding of every array (or shape) of a parameter tree.

    Raises ConfigError for an unknown path, and for a size that its mesh axis does not divide.
    """

    def one(path: Any, leaf: Any) -> NamedSharding:
        name = path_string(path)
        axes = spec(name, len(leaf.shape))
        for size, axis in zip(leaf.shape, axes, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                raise ConfigError(f"mesh {axis} = {mesh.shape[axis]} does not divide {name} of shape {leaf.shape}")
        return NamedSharding(mesh, axes)

    return jax.tree_util.tree_map_with_path(one, tree)


def row_sharding(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """How the arrays of a batch lie: rows over `data` and `fsdp`, behind `leading` axes that are not split."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * leading, ROWS))


def place(tree: Any, target: Any) -> Any:
    """Puts host arrays, the same in every process, onto devices as `target` (a tree of shardings) says."""
    if jax.process_count() == 1:
        return jax.device_put(tree, target)

    def one(x: Any, sharding: NamedSharding) -> jax.Array:
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, tree, target)


def check_batch(mesh: Mesh, batch_size: int, accumulation_steps: int) -> None:
    """Raises ConfigError unless every device gets the same number of rows in each part of a batch."""
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch_size % (shards * accumulation_steps):
        raise ConfigError(
            f"train batch_size = {batch_size}: expected a multiple of {shards * accumulation_steps}, which is mesh data"
            f" ({mesh.shape['data']}) x fsdp ({mesh.shape['fsdp']}) x accumulation_steps ({accumulation_steps})"
        )


def row_shards() -> int:
    """Into how many parts the mesh of the function being traced splits the rows of a batch; 1 without a mesh."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(axis, 1) for axis in ROWS)


def constrain(x: jax.Array, *axes: Any) -> jax.Array:
    """Says how an array inside a traced function lies on the mesh; nothing without a mesh, nor of the axes that
    `sum_over_rows` has cut the array along already."""
    mesh = jax.sharding.get_abstract_mesh()
    cut = {*mesh.manual_axes}
    parts = [tuple(a for a in ((axis,) if isinstance(axis, str) else axis or ()) if a not in cut) for axis in axes]
    if mesh.empty or (cut and not any(parts)):
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*(part or None for part in parts)))


def sum_over_rows(function: Callable[[Any, Any], tuple[Any, Any]], whole: Any, rows: Any, like: Any) -> tuple[Any, Any]:
    """Runs function(whole, rows) -> (sums, gradients) on each device's own rows, and adds the results up.

    Every array of `rows` leads with the rows of the batch; `whole` lies whole over `data` and `fsdp`. The gradients
    come out split by the table, as `like`, a tree of their shapes, has paths for it. Left to the compiler, partial sums
    in a loop would be exchanged in each turn of it.
    """
    if row_shards() == 1:
        return function(whole, rows)
    splits = jax.tree_util.tree_map_with_path(lambda path, x: _fsdp_axis(path_string(path), x.ndim), like)

    def own(whole: Any, rows: Any) -> tuple[Any, Any]:
        sums, gradients = function(whole, rows)
        return jax.lax.psum(sums, ROWS), jax.tree.map(_scatter, gradients, splits)

    out = PartitionSpec(), jax.tree.map(lambda axis: PartitionSpec(*(None,) * axis, *("fsdp",) * (axis >= 0)), splits)
    places = PartitionSpec(), PartitionSpec(ROWS)
    # Nothing here is differentiated from outside, which is what the check would make safe.
    return jax.shard_map(own, in_specs=places, out_specs=out, axis_names={*ROWS}, check_vma=False)(whole, rows)


def _fsdp_axis(path: str, rank: int) -> int:
    """The axis of an array that `fsdp` splits, -1 for none."""
    axes = spec(path, rank)
    return axes.index("fsdp") if "fsdp" in axes else -1


def _scatter(x: jax.Array, axis: int) -> jax.Array:
    """The sum over the devices, of which each keeps its part along `axis`; -1: all of it."""
    if axis < 0:
        return jax.lax.psum(x, ROWS)
    return jax.lax.psum(jax.lax.psum_scatter(x, "fsdp", scatter_dimension=axis, tiled=True), "data")


def gather_tree(tree: Any) -> Any:
    """Every array of a parameter tree whole over `fsdp`, for use. Said outright: where rows and weights are split over
    the same axis, the compiler is else free to move the rows instead, or to unroll the product over the devices."""

    def one(path: Any, x: jax.Array) -> jax.Array:
        return constrain(x, *(None if axis == "fsdp" else axis for axis in spec(path_string(path), x.ndim)))

    return jax.tree_util.tree_map_with_path(one, tree)


def constrain_tree(tree: Any) -> Any:
    """`constrain` for every array of a parameter tree, by the table."""
    return jax.tree_util.tree_map_with_path(lambda path, x: constrain(x, *spec(path_string(path), x.ndim)), tree)
