"""What a target is: its shape, as a frozen dataclass that checks itself when it is made. See drafter_shape.py too."""

import dataclasses
from typing import Literal, NamedTuple, get_args


class ConfigError(ValueError):
    """A setting that cannot be used. The message names it, its value and what would do."""


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with `message` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies depart from theta ** (-2 i / head size): see rotary.py, which has the formulas.

    `factor` stretches wavelengths; `original_length` is the context before the stretch. llama3 blends between
    `low_factor` and `high_factor` turns over that length, yarn between `slow` and `fast` turns, and yarn scales the
    table by `attention_factor`; with `whole_pairs` its ramp begins and ends at one of the pairs, as most models have it
    (transformers: `truncate`). proportional turns only the first `fraction` of the pairs.
    """

    kind: Literal["linear", "llama3", "yarn", "proportional"]
    factor: float = 1.0
    original_length: int = 0
    low_factor: float = 1.0
    high_factor: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    attention_factor: float = 1.0
    fraction: float = 1.0
    whole_pairs: bool = True

    def __post_init__(self) -> None:
        require(self.factor > 0, f"rope factor = {self.factor}: expected a positive number")
        require(0 < self.fraction <= 1, f"rope fraction = {self.fraction}: expected a number in (0, 1]")
        if self.kind in ("llama3", "yarn"):
            require(self.original_length > 0, f"rope {self.kind}: needs the original context length")
        if self.kind == "llama3":
            require(self.high_factor > self.low_factor, "rope llama3: high_factor must exceed low_factor")


class LayerShape(NamedTuple):
    """What one target layer attends with: its key/value heads and head size, its sliding window (0: none), its rope,
    and whether its values are its keys before norm and rotation."""

    num_kv_heads: int
    head_dim: int
    window: int
    rope_theta: float
    rope_scaling: RopeScaling | None
    value_is_key: bool


Family = Literal["llama", "mistral", "qwen2", "qwen3", "gemma3", "gemma4"]


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """Shape of a decoder-only target. `family` picks the block and its norms, the rest says how it is used.

    `layer_windows` gives each layer its sliding window, 0 for none; empty: no layer has one. Where layers with a
    window have another rope, its theta is `local_rope_theta`, unscaled. Layers without a window may have their own
    head size and key/value heads (`full_head_dim`, `full_kv_heads`; 0: the same as the others) and no value
    projection (`full_value_is_key`). `attention_scale` 0 is head size ** -0.5. `embed_scale` multiplies the
    embedding; `logit_softcap` c > 0 turns logits x into c tanh(x / c).
    """

    family: Family
    vocab_size: int
    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float
    max_length: int
    tied_head: bool
    eos_token_ids: tuple[int, ...] = ()
    name: str = ""
    qkv_bias: bool = False
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float = 0.0
    layer_windows: tuple[int, ...] = ()
    full_head_dim: int = 0
    full_kv_heads: int = 0
    full_value_is_key: bool = False
    attention_scale: float = 0.0
    embed_scale: float = 1.0
    logit_softcap: float = 0.0

    def __post_init__(self) -> None:
        families = get_args(Family)
        require(self.family in families, f"target family {self.family!r}: expected one of {', '.join(families)}")
        for field in ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            require(getattr(self, field) > 0, f"target {field} = {getattr(self, field)}: expected a positive number")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"target num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}",
        )
        require(self.head_dim % 2 == 0, f"target head_dim = {self.head_dim}: rotary embedding needs an even size")
        require(
            len(self.layer_windows) in (0, self.num_layers) and min(self.layer_windows, default=0) >= 0,
            f"target layer_windows = {self.layer_windows}: expected 0 or a window for each of {self.num_layers} layers",
        )
        require(
            self.num_heads % (self.full_kv_heads or 1) == 0 and self.full_head_dim % 2 == 0,
            f"target full_kv_heads = {self.full_kv_heads}, full_head_dim = {self.full_head_dim}: expected a divisor of"
            f" num_heads = {self.num_heads} and an even size",
        )
        for field in ("attention_scale", "logit_softcap", "local_rope_theta"):
            require(getattr(self, field) >= 0, f"target {field} = {getattr(self, field)}: expected 0 or more")

    @property
    def qk_norm(self) -> bool:
        return self.family in ("qwen3", "gemma3", "gemma4")

    @property
    def gemma(self) -> bool:
        """Norms on both sides of attention and MLP, GELU."""
        return self.family in ("gemma3", "gemma4")

    def layer(self, index: int) -> LayerShape:
        """What layer `index` attends with."""
        window = self.layer_windows[index] if self.layer_windows else 0
        if window:
            own = self.local_rope_theta > 0
            theta, scaling = (self.local_rope_theta, None) if own else (self.rope_theta, self.rope_scaling)
            return LayerShape(self.num_kv_heads, self.head_dim, window, theta, scaling, False)
        kv_heads, head_dim = self.full_kv_heads or self.num_kv_heads, self.full_head_dim or self.head_dim
        return LayerShape(kv_heads, head_dim, 0, self.rope_theta, self.rope_scaling, self.full_value_is_key)
