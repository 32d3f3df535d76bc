"""Targets from GGUF files: llama and qwen3 architectures, dequantised to float32 by the `gguf` package."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Quant

from dspark_jax.config import ConfigError, TargetConfig
from dspark_jax.weights.gguf_tokenizer import tokenizer_from_gguf
from dspark_jax.weights.tokenizer import ChatTokenizer
from dspark_jax.weights.tree import HERE, Index, Placement, build_params, check_tensors, file_name, part_shapes

FAMILIES: dict[str, Literal["llama", "qwen3"]] = {"llama": "llama", "qwen3": "qwen3"}
QUANTISATIONS = (
    *(Quant.F32, Quant.F16, Quant.BF16, Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1, Quant.Q8_0),
    *(Quant.Q4_K, Quant.Q5_K, Quant.Q6_K),
)
_OUTER = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"}
_LAYER = {
    "attn_norm": "blk.{}.attn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "o": "blk.{}.attn_output.weight",
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "mlp_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "down": "blk.{}.ffn_down.weight",
}


class _Reader(gguf.GGUFReader):
    """GGUFReader over a plain view of its memory map: slicing np.memmap made opening a file 2.5 times slower."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)


def read_gguf(
    path: str | Path, placement: Placement = HERE, only: Collection[str] | None = None
) -> tuple[TargetConfig, dict[str, Any], ChatTokenizer | None]:
    """Reads a GGUF file: its config, parameters (the tree of weights/tree.py; `only` some of them) and tokenizer (None
    if absent).

    Raises ConfigError for a file that is not whole, another architecture, a quantisation outside QUANTISATIONS,
    rope scaling, and tensors or keys that are missing, of another shape, or not used.
    """
    path = Path(path)
    reader, metadata = open_gguf(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    shapes = {name: [int(size) for size in reversed(tensor.shape)] for name, tensor in tensors.items()}
    if "rope_freqs.weight" in tensors:
        raise ConfigError(f"{path}: tensor 'rope_freqs.weight' means llama3 rope scaling, which is not supported")
    config = _config(path, metadata, shapes)
    names = {part: file_name(part, _OUTER, _LAYER) for part in part_shapes(config)}
    check_tensors(path, {names[part]: shape for part, shape in part_shapes(config).items()}, shapes)
    for name, tensor in tensors.items():
        if tensor.tensor_type not in QUANTISATIONS:
            known = ", ".join(quant.name for quant in QUANTISATIONS)
            raise ConfigError(f"{path}: tensor {name!r} is quantised as {tensor.tensor_type.name}; readable: {known}")

    def read(part: str, index: Index = ()) -> np.ndarray:
        tensor = tensors[names[part]]
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if config.family == "llama" and part.endswith(("/q", "/k")):
            weight = unpermute(weight, config.num_heads if part.endswith("/q") else config.num_kv_heads)
        return weight[index]

    return config, build_params(config, read, placement, only), tokenizer_from_gguf(path, metadata, config.vocab_size)


def open_gguf(path: Path) -> tuple[gguf.GGUFReader, dict[str, Any]]:
    """The open file and its metadata, tokenizer included, as Python values. Raises ConfigError if it is not whole."""
    try:
        reader = _Reader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise ConfigError(f"{path}: not a readable GGUF file ({error}); download it again") from error
    if reader.byte_order == "S":
        raise ConfigError(f"{path}: was written for machines of the other byte order; convert the model again")
    return reader, metadata


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Query or key rows [heads * H, D] of a Llama GGUF, back from interleaved rotary pairs to "rotate half" order."""
    rows, width = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def _config(path: Path, metadata: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> TargetConfig:
    architecture = metadata.get("general.architecture")
    if architecture not in FAMILIES:
        raise ConfigError(f"{path}: architecture {architecture!r} is not supported; readable: {', '.join(FAMILIES)}")
    if metadata.get("split.count", 1) > 1:
        raise ConfigError(f"{path}: split.count = {metadata['split.count']}; merge the parts with gguf-split first")

    def get(name: str, kind: type, default: Any = None) -> Any:
        key = f"{architecture}.{name}"
        value = metadata.get(key, default)
        if value is None:
            raise ConfigError(f"{path}: metadata key {key!r} is missing")
        if not isinstance(value, kind):
            raise ConfigError(f"{path}: metadata key {key!r} is {value!r}, expected one {kind.__name__}")
        return value

    scaling = [key for key in metadata if key.startswith(f"{architecture}.rope.scal")]
    if scaling and metadata.get(f"{architecture}.rope.scaling.type") != "none":
        raise ConfigError(f"{path}: {scaling[0]} = {metadata[scaling[0]]!r}: rope scaling is not supported")
    for name in ("expert_count", "attention.sliding_window"):
        if get(name, int, 0) > 0:
            raise ConfigError(f"{path}: {architecture}.{name} = {get(name, int)} is not supported, expected 0")
    d_model, num_heads = get("embedding_length", int), get("attention.head_count", int)
    head_dim = get("attention.key_length", int, d_model // max(num_heads, 1))
    for name in ("attention.value_length", "rope.dimension_count"):
        if get(name, int, head_dim) != head_dim:
            raise ConfigError(f"{path}: {architecture}.{name} = {get(name, int)}, expected the head size {head_dim}")
    if "token_embd.weight" not in shapes:
        raise ConfigError(f"{path}: tensor 'token_embd.weight' is missing")
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return TargetConfig(
        family=FAMILIES[architecture],
        vocab_size=get("vocab_size", int, shapes["token_embd.weight"][0]),
        d_model=d_model,
        d_ff=get("feed_forward_length", int),
        num_layers=get("block_count", int),
        num_heads=num_heads,
        num_kv_heads=get("attention.head_count_kv", int, num_heads),
        head_dim=head_dim,
        rope_theta=get("rope.freq_base", float),
        norm_eps=get("attention.layer_norm_rms_epsilon", float),
        max_length=get("context_length", int),
        tied_head="output.weight" not in shapes,
        eos_token_ids=tuple(dict.fromkeys(int(end) for end in ends if end is not None)),
        name=str(metadata.get("general.name") or path.stem),
    )
