"""Rope settings in a transformers config.json: transformers 5 nests them in `rope_parameters`, older files have
`rope_theta` beside `rope_scaling`; both may be there and must agree."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from dspark_jax.config import ConfigError, RopeScaling

Rope = tuple[float, RopeScaling | None]
KEYS = ("rope_parameters", "rope_theta", "rope_scaling")
# What may stand inside a rope's own object: what is read here, and how images turn, which text never sees.
_INSIDE = frozenset({
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "low_freq_factor", "mrope_interleaved",
    "mrope_section", "mscale", "mscale_all_dim", "original_max_position_embeddings", "partial_rotary_factor",
    "rope_theta", "rope_type", "truncate", "type",
})  # fmt: skip


def read_rope(where: object, settings: Mapping[str, Any], usual_theta: float | None = None) -> Rope:
    """Theta, `usual_theta` where none is given, and scaling (None: plain) of a model with one rope. Raises ConfigError
    for what is not supported."""
    thetas, scalings = [settings.get("rope_theta")], []
    for key in ("rope_parameters", "rope_scaling"):
        if rope := settings.get(key):
            thetas.append(rope.get("rope_theta"))
            scalings.append(_scaling(where, key, rope, settings))
    found = {float(theta) for theta in thetas if theta is not None}
    if not found and usual_theta is not None:
        found = {usual_theta}
    if len(found) != 1:
        raise ConfigError(
            f"{where}: rope_theta is {'given as ' + str(sorted(found)) if found else 'missing'}, expected one"
        )
    if len(set(scalings)) > 1:
        raise ConfigError(f"{where}: rope_parameters and rope_scaling disagree: {scalings[0]} and {scalings[1]}")
    return found.pop(), scalings[0] if scalings else None


def read_two_ropes(where: object, settings: Mapping[str, Any], generation: int) -> tuple[Rope, Rope]:
    """Ropes of the full and of the sliding layers of Gemma 3 or 4, with that generation's own defaults."""
    nested = settings.get("rope_parameters") or {}
    _refuse_unknown(where, "rope_parameters", nested, ("full_attention", "sliding_attention"))
    full: dict[str, Any] = {"rope_theta": settings.get("rope_theta", 1_000_000.0)}
    if nested.get("full_attention"):
        full |= nested["full_attention"]
    elif generation == 3:
        full |= settings.get("rope_scaling") or {}
    else:
        full |= {"rope_type": "proportional", "partial_rotary_factor": 0.25}
    sliding = {"rope_theta": settings.get("rope_local_base_freq", 10_000.0)} | (nested.get("sliding_attention") or {})
    one, two = (
        (float(rope["rope_theta"]), _scaling(where, f"rope_parameters.{name}", rope, settings))
        for name, rope in (("full_attention", full), ("sliding_attention", sliding))
    )
    return one, two


def _scaling(where: object, key: str, rope: Mapping[str, Any], settings: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    fraction = rope.get("partial_rotary_factor", 1.0)
    if kind not in ("default", "linear", "llama3", "yarn", "proportional") or (
        kind != "proportional" and fraction != 1
    ):
        raise ConfigError(
            f"{where}: {key} = {dict(rope)!r} is not supported; readable: rope_type default, linear, llama3, yarn or"
            " proportional, and partial_rotary_factor with the last only"
        )
    _refuse_unknown(where, key, rope, _INSIDE)
    original = rope.get("original_max_position_embeddings") or settings.get("max_position_embeddings", 0)
    needed = {"linear": ("factor",), "llama3": ("factor", "high_freq_factor", "low_freq_factor")}
    for name in needed.get(kind, ()):
        if rope.get(name) is None:
            raise ConfigError(f"{where}: {key} of type {kind} lacks '{name}'")
    match kind:
        case "linear":
            return RopeScaling("linear", factor=float(rope["factor"]))
        case "proportional":
            return RopeScaling("proportional", factor=float(rope.get("factor", 1.0)), fraction=float(fraction))
        case "llama3":
            return RopeScaling(
                "llama3",
                factor=float(rope["factor"]),
                original_length=original,
                low_factor=float(rope["low_freq_factor"]),
                high_factor=float(rope["high_freq_factor"]),
            )
        case "yarn":
            factor = float(rope.get("factor") or settings.get("max_position_embeddings", 0) / original)
            attention = rope.get("attention_factor")
            if attention is None:
                attention = _mscale(factor, 1.0)
                if rope.get("mscale") and rope.get("mscale_all_dim"):
                    attention = _mscale(factor, rope["mscale"]) / _mscale(factor, rope["mscale_all_dim"])
            return RopeScaling(
                "yarn",
                factor=factor,
                original_length=original,
                fast=float(rope.get("beta_fast") or 32),
                slow=float(rope.get("beta_slow") or 1),
                attention_factor=float(attention),
                whole_pairs=rope.get("truncate") is not False,
            )
    return None


def _refuse_unknown(where: object, key: str, rope: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises ConfigError naming a key that might turn positions in another way; null says nothing."""
    for name in sorted(set(rope) - set(known)):
        if rope[name] is not None:
            raise ConfigError(f"{where}: unknown key '{key}.{name}' = {rope[name]!r}: it might change the rope")


def _mscale(factor: float, weight: float) -> float:
    """YaRN's growth of attention with the stretch (Peng et al. 2023, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The keys of `rope_parameters` that `read_rope` reads."""
    raw: dict[str, Any] = {"rope_theta": theta, "rope_type": scaling.kind if scaling else "default"}
    if scaling is None:
        return raw
    raw["factor"] = scaling.factor
    if scaling.kind == "proportional":
        raw["partial_rotary_factor"] = scaling.fraction
    if scaling.kind in ("llama3", "yarn"):
        raw["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        raw |= {"low_freq_factor": scaling.low_factor, "high_freq_factor": scaling.high_factor}
    if scaling.kind == "yarn":
        raw |= {"beta_fast": scaling.fast, "beta_slow": scaling.slow, "attention_factor": scaling.attention_factor}
        raw |= {} if scaling.whole_pairs else {"truncate": False}
    return raw
