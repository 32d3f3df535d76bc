"""The parameter tree of a target, put together from the separate matrices that files hold, whole or a shard at a time.

    {"embed": [V, D], "final_norm": [D], "head": [V, D] unless tied,
     "layers_0": {"attn_norm": [D], "qkv": [K, N // K + 2, H, D], "o": [D, N, H], "mlp_norm": [D],
                  "gate": [F, D], "up": [F, D], "down": [D, F]}, ...}

and where the family has them "q_norm": [H], "k_norm": [H], "qkv_bias": [K, N // K + 2, H], "post_attn_norm": [D],
"post_mlp_norm": [D], "layer_scalar": [1]. Row k of `qkv` holds the query heads of key/value head k, then its key head,
then, unless its values are its keys, its value head. Fused and stored [out, in], because that is what the matrix
units of a CPU, GPU or TPU read fastest.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from dspark_jax import sharding
from dspark_jax.config import ConfigError, TargetConfig

Shape = tuple[int, ...]
Index = tuple[slice, ...]
_ALL = slice(None)


class Reader(Protocol):
    """Reads a part of `part_shapes`, or the rows and columns of it that `index` cuts out. Rotary rows are in "rotate
    half" order, norm scales are what multiplies."""

    def __call__(self, part: str, index: Index = ()) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where weights go: matrices in `dtype`, vectors in float32; with a mesh, split as sharding.py says, each process
    reading only what its own devices hold."""

    dtype: str = "float32"
    mesh: Mesh | None = None

    def put(self, path: str, shape: Shape, part: Callable[[Index], np.ndarray]) -> jax.Array:
        """The leaf at `path`; `part` gives any block of it."""
        dtype = jnp.dtype(self.dtype if len(shape) > 1 else "float32")

        def block(index: Index) -> np.ndarray:
            bounds = (one.indices(size) for one, size in zip(index, shape, strict=True))
            return part(tuple(slice(start, stop) for start, stop, _ in bounds)).astype(dtype, copy=False)

        if self.mesh is None:
            return jnp.asarray(block((_ALL,) * len(shape)))
        place = NamedSharding(self.mesh, sharding.spec(path, len(shape)))
        return jax.make_array_from_callback(shape, place, block)  # type: ignore[arg-type]  (asked with an index always)


HERE = Placement()


def part_shapes(config: TargetConfig) -> dict[str, Shape]:
    """Every matrix a file must hold, as `embed` or `layers_3/q`, with its [out, in] shape."""
    D, F = config.d_model, config.d_ff
    shapes: dict[str, Shape] = {"embed": (config.vocab_size, D), "final_norm": (D,)}
    if not config.tied_head:
        shapes["head"] = (config.vocab_size, D)
    for index in range(config.num_layers):
        spec = config.layer(index)
        queries, keys = config.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        layer: dict[str, Shape] = {"attn_norm": (D,), "q": (queries, D), "k": (keys, D), "o": (D, queries)}
        layer |= {"mlp_norm": (D,), "gate": (F, D), "up": (F, D), "down": (D, F)}
        if not spec.value_is_key:
            layer["v"] = (keys, D)
        if config.qkv_bias:
            layer |= {"q_bias": (queries,), "k_bias": (keys,), "v_bias": (keys,)}
        if config.qk_norm:
            layer |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
        if config.gemma:
            layer |= {"post_attn_norm": (D,), "post_mlp_norm": (D,)}
        if config.family == "gemma4":
            layer["layer_scalar"] = (1,)
        shapes |= {f"layers_{index}/{name}": shape for name, shape in layer.items()}
    return shapes


def file_name(part: str, outer: Mapping[str, str], layer: Mapping[str, str]) -> str:
    """The name a format gives to a part; names of layer matrices hold `{}` where the layer number goes."""
    if part in outer:
        return outer[part]
    place, name = part.split("/")
    return layer[name].format(place.removeprefix("layers_"))


def check_tensors(where: object, expected: Mapping[str, Shape], found: Mapping[str, Iterable[int]]) -> None:
    """Raises ConfigError unless a file holds exactly the expected tensor names with the expected shapes."""
    for name, shape in expected.items():
        if name not in found:
            raise ConfigError(f"{where}: tensor {name!r} is missing (expected shape {list(shape)})")
        got = [int(size) for size in found[name]]
        if got != list(shape):
            raise ConfigError(f"{where}: tensor {name!r} has shape {got}, expected {list(shape)}")
    for name in found:
        if name not in expected:
            raise ConfigError(f"{where}: tensor {name!r} is not used by this architecture, so the model is another one")


def build_params(
    config: TargetConfig, read: Reader, placement: Placement, only: Collection[str] | None = None
) -> dict[str, Any]:
    """The tree above, or those of its top-level entries that `only` names. One leaf is in the making at a time."""
    shapes = part_shapes(config)

    def leaf(path: str) -> jax.Array:
        return placement.put(path, shapes[path], lambda index: read(path, index))

    def layer(place: str, spec: Any) -> dict[str, Any]:
        names = [path.split("/")[1] for path in shapes if path.startswith(f"{place}/")]
        fused = ("q", "k", "v", "o", "q_bias", "k_bias", "v_bias")
        tree: dict[str, Any] = {name: leaf(f"{place}/{name}") for name in names if name not in fused}
        group, H = config.num_heads // spec.num_kv_heads, spec.head_dim
        parts = ("q", "k") if spec.value_is_key else ("q", "k", "v")
        qkv = (spec.num_kv_heads, group + len(parts) - 1, H)

        def heads(index: Index, suffix: str = "") -> np.ndarray:
            """Key/value heads index[0] of the fused leaf."""
            blocks = []
            for name in parts:
                rows = group if name == "q" else 1
                flat = read(f"{place}/{name}{suffix}", (_scaled(index[0], rows * H), *index[3:]))
                blocks.append(flat.reshape(-1, rows, H, *flat.shape[1:]))
            return np.concatenate(blocks, axis=1)[:, index[1], index[2]]

        def output(index: Index) -> np.ndarray:
            flat = read(f"{place}/o", (index[0], _scaled(index[1], H)))
            return flat.reshape(len(flat), -1, H)[:, :, index[2]]

        tree["qkv"] = placement.put(f"{place}/qkv", (*qkv, config.d_model), heads)
        tree["o"] = placement.put(f"{place}/o", (config.d_model, config.num_heads, H), output)
        if config.qkv_bias:
            tree["qkv_bias"] = placement.put(f"{place}/qkv_bias", qkv, lambda index: heads(index, "_bias"))
        return tree

    top: dict[str, Callable[[], Any]] = {path: functools.partial(leaf, path) for path in shapes if "/" not in path}
    for index in range(config.num_layers):
        top[f"layers_{index}"] = functools.partial(layer, f"layers_{index}", config.layer(index))
    return {name: make() for name, make in top.items() if only is None or name in only}


def _scaled(index: slice, size: int) -> slice:
    """A range of heads as a range of rows."""
    return slice(index.start * size, index.stop * size)
