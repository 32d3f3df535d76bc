"""Targets from Hugging Face directories: config.json, safetensors in one file or in shards, tokenizer files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dspark_jax.config import ConfigError, TargetConfig
from dspark_jax.weights.tokenizer import ChatTokenizer
from dspark_jax.weights.tree import build_params, check_tensors, file_name, part_shapes

FAMILIES: dict[str, Literal["llama", "qwen3"]] = {"llama": "llama", "qwen3": "qwen3"}
_DTYPES = ("F32", "F16", "BF16")
_OUTER = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
_LAYER = {
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "o": "model.layers.{}.self_attn.o_proj.weight",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}


def read_hf(directory: str | Path) -> tuple[TargetConfig, dict[str, Any], ChatTokenizer | None]:
    """Reads a checkpoint directory: config, float32 parameters (weights/tree.py), tokenizer (None if absent).

    Raises ConfigError for another model type, settings that change the forward pass in ways not built here (rope
    scaling, biases, sliding windows, quantised weights), and tensors that are missing, of another shape, or not used.
    """
    directory = Path(directory)
    config = read_config(directory)
    files = _tensor_files(directory)
    handles = {path: _open(path) for path in set(files.values())}
    found: dict[str, list[int]] = {}
    for path, handle in handles.items():
        for name in handle.keys():
            if files.setdefault(name, path) != path:
                raise ConfigError(f"{path}: tensor {name!r} is also in {files[name].name}")
            found[name] = handle.get_slice(name).get_shape()
    for name, path in files.items():
        if name not in found:
            raise ConfigError(f"{path}: tensor {name!r} is missing, though the index names it")

    def load(name: str) -> np.ndarray:
        handle = handles[files[name]]
        dtype = handle.get_slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise ConfigError(f"{files[name]}: tensor {name!r} is stored as {dtype}; readable: {', '.join(_DTYPES)}")
        return np.asarray(handle.get_tensor(name)).astype(np.float32)

    # Some writers store the shared matrix twice.
    if config.tied_head and _OUTER["head"] in found and _OUTER["embed"] in found:
        if not np.array_equal(load(_OUTER["head"]), load(_OUTER["embed"])):
            raise ConfigError(f"{directory}: tie_word_embeddings is true, but lm_head differs from the embedding")
        del found[_OUTER["head"]]
    names = {part: file_name(part, _OUTER, _LAYER) for part in part_shapes(config)}
    check_tensors(directory, {names[part]: shape for part, shape in part_shapes(config).items()}, found)
    return config, build_params(config, lambda part: load(names[part])), _tokenizer(directory)


def read_config(directory: Path) -> TargetConfig:
    """The target that config.json describes, with the end-of-sequence ids of generation_config.json as well."""
    path = directory / "config.json"
    settings = _read_json(path)
    family = settings.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{path}: model_type {family!r} is not supported; readable: {', '.join(FAMILIES)}")
    _refuse_variants(path, settings)

    def get(key: str, kind: type | tuple[type, ...] = int, default: Any = None) -> Any:
        value = settings.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{path}: key {key!r} is missing")
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise ConfigError(f"{path}: {key} = {value!r} has the wrong type")
        return value

    generation = directory / "generation_config.json"
    sources = [settings] + ([_read_json(generation)] if generation.exists() else [])
    ends = [end for source in sources for end in _as_list(source.get("eos_token_id"))]
    return TargetConfig(
        family=FAMILIES[family],
        vocab_size=get("vocab_size"),
        d_model=get("hidden_size"),
        d_ff=get("intermediate_size"),
        num_layers=get("num_hidden_layers"),
        num_heads=get("num_attention_heads"),
        num_kv_heads=get("num_key_value_heads", default=get("num_attention_heads")),
        head_dim=get("head_dim", default=get("hidden_size") // max(get("num_attention_heads"), 1)),
        rope_theta=rope_theta(path, settings),
        norm_eps=float(get("rms_norm_eps", (int, float))),
        max_length=get("max_position_embeddings"),
        tied_head=get("tie_word_embeddings", bool, default=False),
        eos_token_ids=tuple(dict.fromkeys(ends)),
        name=directory.resolve().name,
    )


def _refuse_variants(path: Path, settings: Mapping[str, Any]) -> None:
    if "sliding_attention" in (settings.get("layer_types") or ()):
        raise ConfigError(f"{path}: layer_types has 'sliding_attention'; only full attention is supported")
    windowed = settings.get("use_sliding_window", settings.get("sliding_window") is not None)
    plain = {
        "use_sliding_window": (windowed, False),
        "attention_bias": (settings.get("attention_bias", False), False),
        "mlp_bias": (settings.get("mlp_bias", False), False),
        "hidden_act": (settings.get("hidden_act", "silu"), "silu"),
        "partial_rotary_factor": (settings.get("partial_rotary_factor", 1.0), 1.0),
        "quantization_config": (settings.get("quantization_config"), None),
    }
    for key, (value, expected) in plain.items():
        if value != expected:
            raise ConfigError(f"{path}: {key} = {value!r} is not supported, expected {expected!r}")


def rope_theta(path: Path, settings: Mapping[str, Any]) -> float:
    """transformers 5 nests rope settings in `rope_parameters`; older files have `rope_theta` and `rope_scaling`."""
    thetas = [settings.get("rope_theta")]
    for key in ("rope_parameters", "rope_scaling"):
        rope = settings.get(key) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError(f"{path}: {key} = {rope!r} is not supported, expected rope_type 'default'")
        thetas.append(rope.get("rope_theta"))
    found = {float(theta) for theta in thetas if theta is not None}
    if len(found) != 1:
        raise ConfigError(
            f"{path}: rope_theta is {'given as ' + str(sorted(found)) if found else 'missing'}, expected one"
        )
    return found.pop()


def _tensor_files(directory: Path) -> dict[str, Path]:
    """File of each tensor that the index names, or of every tensor of the single file."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.exists():
        return dict.fromkeys(_open(single).keys(), single)
    if not index.exists():
        raise ConfigError(f"{directory}: neither model.safetensors nor model.safetensors.index.json is there")
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: key 'weight_map' is missing or empty")
    return {name: directory / Path(file).name for name, file in weight_map.items()}


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file ({error}); download it again") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return content


def _as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _tokenizer(directory: Path) -> ChatTokenizer | None:
    if not (directory / "tokenizer.json").exists():
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exception for a file that it cannot parse
        raise ConfigError(f"{directory}: its tokenizer cannot be read ({error})") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(f"{directory}: its tokenizer is a {type(tokenizer).__name__}, expected a fast one")
    return ChatTokenizer(tokenizer)
