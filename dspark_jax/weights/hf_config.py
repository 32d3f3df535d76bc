"""The target that a Hugging Face config.json describes, family by family."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dspark_jax.config import ConfigError, Family, TargetConfig
from dspark_jax.weights.rope_keys import read_rope, read_two_ropes
from dspark_jax.weights.safetensor_files import read_json

FAMILIES: dict[str, Family] = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "gemma4_unified": "gemma4",
    "gemma4_unified_text": "gemma4",
}
# Settings that change the forward pass in ways not built here, and the value without effect.
_PLAIN: dict[str, Any] = {
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 0,
    "mlp_bias": False,
    "num_kv_shared_layers": 0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
_ABSENT_IN_GEMMA4 = {"hidden_size_per_layer_input": 256}


def read_config(directory: Path) -> TargetConfig:
    """The target that config.json describes, with the end-of-sequence ids of generation_config.json as well.

    Raises ConfigError for another model type, and for settings that would change the forward pass, by name.
    """
    path = directory / "config.json"
    whole = read_json(path)
    family = whole.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"{path}: model_type {family!r} is not supported; readable: {', '.join(FAMILIES)}")
    family = FAMILIES[family]
    settings = whole | (whole.get("text_config") or {})

    def get(key: str, kind: type | tuple[type, ...] = int, default: Any = None) -> Any:
        value = settings.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"{path}: key {key!r} is missing")
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise ConfigError(f"{path}: {key} = {value!r} has the wrong type")
        return value

    gemma = family in ("gemma3", "gemma4")
    _refuse_variants(path, family, settings)
    num_layers, d_model, heads = get("num_hidden_layers"), get("hidden_size"), get("num_attention_heads")
    fields: dict[str, Any] = {"layer_windows": _windows(path, family, settings, num_layers)}
    if gemma:
        (theta, scaling), (local, local_scaling) = read_two_ropes(path, settings, 3 if family == "gemma3" else 4)
        if local_scaling is not None:
            raise ConfigError(f"{path}: rope of the sliding layers is scaled ({local_scaling.kind}), expected default")
        fields |= {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local}
        fields |= {"embed_scale": d_model**0.5, "logit_softcap": float(settings.get("final_logit_softcapping") or 0)}
    else:
        fields["rope_theta"], fields["rope_scaling"] = read_rope(path, settings)
    if family == "gemma3":
        fields["attention_scale"] = float(get("query_pre_attn_scalar", (int, float), 256)) ** -0.5
    if family == "gemma4":
        fields |= {"attention_scale": 1.0} | full_layers(path, settings)
    generation = directory / "generation_config.json"
    sources = [whole, settings] + ([read_json(generation)] if generation.exists() else [])
    ends = [end for source in sources for end in _as_list(source.get("eos_token_id"))]
    return TargetConfig(
        **fields,
        family=family,
        vocab_size=get("vocab_size"),
        d_model=d_model,
        d_ff=get("intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=get("num_key_value_heads", default=4 if gemma else heads),
        head_dim=get("head_dim", default=256 if gemma else d_model // max(heads, 1)),
        norm_eps=float(get("rms_norm_eps", (int, float))),
        max_length=get("max_position_embeddings"),
        tied_head=get("tie_word_embeddings", bool, default=gemma),
        qkv_bias=family == "qwen2",
        eos_token_ids=tuple(dict.fromkeys(ends)),
        name=directory.resolve().name,
    )


def _refuse_variants(path: Path, family: Family, settings: Mapping[str, Any]) -> None:
    for key, plain in _PLAIN.items():
        value = settings.get(key)
        if value is None:
            value = _ABSENT_IN_GEMMA4.get(key, plain) if family == "gemma4" else plain
        if value != plain:
            raise ConfigError(f"{path}: {key} = {value!r} is not supported, expected {plain!r}")
    key, plain = (
        ("hidden_activation", "gelu_pytorch_tanh") if family in ("gemma3", "gemma4") else ("hidden_act", "silu")
    )
    if settings.get(key, plain) != plain:
        raise ConfigError(f"{path}: {key} = {settings[key]!r} is not supported, expected {plain!r}")
    both = settings.get("use_bidirectional_attention")
    if both not in (None, False, "vision"):
        raise ConfigError(f"{path}: use_bidirectional_attention = {both!r} is not supported, expected none")


def _windows(path: Path, family: Family, settings: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Each layer's sliding window, 0 for none; empty where no layer has one."""
    window, types = settings.get("sliding_window") or 0, settings.get("layer_types")
    if family in ("qwen2", "qwen3") and not settings.get("use_sliding_window"):
        if "sliding_attention" in (types or ()):
            raise ConfigError(f"{path}: layer_types has 'sliding_attention', but use_sliding_window is off")
        return ()
    if types is None:
        if family == "mistral":
            types = ["sliding_attention" if window else "full_attention"] * num_layers
        elif family in ("gemma3", "gemma4"):
            every = settings.get("sliding_window_pattern") or settings.get("_sliding_window_pattern") or 6
            types = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(num_layers)]
        elif family == "llama":
            if window:
                raise ConfigError(f"{path}: sliding_window = {window} is not supported for llama, expected none")
            types = ["full_attention"] * num_layers
        else:
            first = settings.get("max_window_layers", 0)
            types = ["sliding_attention" if window and i >= first else "full_attention" for i in range(num_layers)]
    if len(types) != num_layers or set(types) - {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"{path}: layer_types = {types}: expected 'full_attention' or 'sliding_attention' for each of"
            f" {num_layers} layers"
        )
    if "sliding_attention" in types and window <= 0:
        raise ConfigError(f"{path}: layer_types has 'sliding_attention', but sliding_window = {window or None}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in types) if window else ()


def full_layers(path: object, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What Gemma 4's layers without a window have of their own: once beside the others, later layer by layer."""
    is_key = bool(settings.get("attention_k_eq_v", False))
    by_layer = settings.get("per_layer_config")
    if by_layer is None:
        kv_heads = settings.get("num_global_key_value_heads") if is_key else None
        own = {"head_dim": settings.get("global_head_dim", 512), "num_key_value_heads": kv_heads}
    else:
        types = settings.get("layer_types") or []
        full = {str(i) for i, kind in enumerate(types) if kind == "full_attention"}
        shapes = [dict(shape) for shape in by_layer.values()]
        if set(by_layer) != full or any(shape != shapes[0] for shape in shapes):
            raise ConfigError(f"{path}: per_layer_config = {by_layer!r}: expected the same for every full layer")
        own = shapes[0] if shapes else {}
    unknown = sorted(set(own) - {"head_dim", "num_key_value_heads"})
    if unknown:
        raise ConfigError(f"{path}: per_layer_config has {unknown[0]!r}, which is not supported")
    return {
        "full_head_dim": own.get("head_dim") or 0,
        "full_kv_heads": own.get("num_key_value_heads") or 0,
        "full_value_is_key": is_key,
    }


def _as_list(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]
