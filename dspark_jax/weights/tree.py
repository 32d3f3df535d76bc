"""The parameter tree of a target, put together from the separate matrices that files hold.

    {"embed": [V, D], "final_norm": [D], "head": [V, D] unless tied,
     "layers_0": {"attn_norm": [D], "qkv": [K, N // K + 2, H, D], "o": [D, N, H], "mlp_norm": [D],
                  "gate": [F, D], "up": [F, D], "down": [D, F], and for qwen3 "q_norm": [H], "k_norm": [H]}, ...}

Row k of `qkv` holds the query heads of key/value head k, then its key head, then its value head. Fused and stored
[out, in], because that is what the matrix units of a CPU, GPU or TPU read fastest.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from dspark_jax.config import ConfigError, TargetConfig

Shape = tuple[int, ...]


def part_shapes(config: TargetConfig) -> dict[str, Shape]:
    """Every matrix a file must hold, as `embed` or `layers_3/q`, with its [out, in] shape."""
    D, F, H = config.d_model, config.d_ff, config.head_dim
    queries, keys = config.num_heads * H, config.num_kv_heads * H
    layer: dict[str, Shape] = {
        "attn_norm": (D,),
        "q": (queries, D),
        "k": (keys, D),
        "v": (keys, D),
        "o": (D, queries),
        "mlp_norm": (D,),
        "gate": (F, D),
        "up": (F, D),
        "down": (D, F),
    }
    if config.qk_norm:
        layer |= {"q_norm": (H,), "k_norm": (H,)}
    shapes: dict[str, Shape] = {"embed": (config.vocab_size, D), "final_norm": (D,)}
    if not config.tied_head:
        shapes["head"] = (config.vocab_size, D)
    for index in range(config.num_layers):
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


def build_params(config: TargetConfig, read: Callable[[str], np.ndarray]) -> dict[str, Any]:
    """The tree above. `read(part)` returns one matrix of `part_shapes`: float32, rotary rows in "rotate half" order."""
    D, N, K, H = config.d_model, config.num_heads, config.num_kv_heads, config.head_dim
    params: dict[str, Any] = {"embed": read("embed"), "final_norm": read("final_norm")}
    if not config.tied_head:
        params["head"] = read("head")
    for index in range(config.num_layers):
        place = f"layers_{index}"
        q_KNHD = read(f"{place}/q").reshape(K, N // K, H, D)
        k_K1HD, v_K1HD = (read(f"{place}/{name}").reshape(K, 1, H, D) for name in "kv")
        layer = {
            "attn_norm": read(f"{place}/attn_norm"),
            "qkv": np.concatenate([q_KNHD, k_K1HD, v_K1HD], axis=1),
            "o": read(f"{place}/o").reshape(D, N, H),
            "mlp_norm": read(f"{place}/mlp_norm"),
            "gate": read(f"{place}/gate"),
            "up": read(f"{place}/up"),
            "down": read(f"{place}/down"),
        }
        if config.qk_norm:
            layer |= {"q_norm": read(f"{place}/q_norm"), "k_norm": read(f"{place}/k_norm")}
        params[place] = layer
    return params
