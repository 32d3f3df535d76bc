"""Every setting, as frozen dataclasses that check themselves once, when they are made.

Shape letters, used by the whole project as suffixes of array names:
B batch, S sequence, A anchors, G block (the paper's gamma), R requests, T packed verify tokens, M tapped
layers, D model width, F feed-forward width, N query heads, K key/value heads, H head size, V vocabulary,
L layers, P pages.
"""

import dataclasses
import math
from typing import Literal

Layout = Literal["anchor_first", "fill_in"]


class ConfigError(ValueError):
    """A setting that cannot be used. The message names it, its value and what would do."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """Shape of a decoder-only target. `family` picks the block: llama, or qwen3 with q/k norms."""

    family: Literal["llama", "qwen3"]
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

    def __post_init__(self) -> None:
        _require(self.family in ("llama", "qwen3"), f"target family {self.family!r}: expected 'llama' or 'qwen3'")
        for field in ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            _require(getattr(self, field) > 0, f"target {field} = {getattr(self, field)}: expected a positive number")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"target num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}",
        )
        _require(self.head_dim % 2 == 0, f"target head_dim = {self.head_dim}: rotary embedding needs an even size")

    @property
    def qk_norm(self) -> bool:
        return self.family == "qwen3"


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Shape of a block-parallel drafter (DFlash backbone, DSpark heads).

    `block_size` counts the rows of one draft pass (G in DeepSpec's layout, B in z-lab's); `layout` says what a
    row predicts: under 'anchor_first' row i predicts position a+1+i, so all rows are drafts; under 'fill_in'
    row i predicts position a+i, so row 0 is not a draft. `target_layer_ids` are 0-based decoder layers, -1 is
    the embedding output. `draft_vocab_size` = 0 means the whole target vocabulary.
    """

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
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    block_size: int
    mask_token_id: int
    layout: Layout = "anchor_first"
    markov_rank: int = 0
    confidence_head: bool = False
    confidence_with_markov: bool = False
    draft_vocab_size: int = 0

    def __post_init__(self) -> None:
        for field in ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            _require(getattr(self, field) > 0, f"drafter {field} = {getattr(self, field)}: expected a positive number")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"drafter num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}",
        )
        _require(self.layout in ("anchor_first", "fill_in"), f"drafter layout {self.layout!r}: anchor_first or fill_in")
        smallest = 1 if self.layout == "anchor_first" else 2
        _require(self.block_size >= smallest, f"drafter block_size = {self.block_size}: expected at least {smallest}")
        _require(
            0 <= self.mask_token_id < self.vocab_size,
            f"drafter mask_token_id = {self.mask_token_id} is outside the embedding of {self.vocab_size} rows",
        )
        _require(len(self.target_layer_ids) > 0, "drafter target_layer_ids is empty: name the layers to tap")
        for layer in self.target_layer_ids:
            _require(
                -1 <= layer < self.num_target_layers - 1,
                f"drafter target_layer_ids has {layer}: the target has {self.num_target_layers} layers, so ids run"
                f" from -1 (embedding output) to {self.num_target_layers - 2} (the last layer is not tapped)",
            )
        _require(
            len(set(self.target_layer_ids)) == len(self.target_layer_ids),
            f"drafter target_layer_ids {self.target_layer_ids} repeats a layer",
        )
        _require(self.markov_rank >= 0, f"drafter markov_rank = {self.markov_rank}: expected 0 (no head) or more")
        _require(
            not self.confidence_with_markov or (self.confidence_head and self.markov_rank > 0),
            "drafter confidence_with_markov needs confidence_head and markov_rank > 0",
        )
        _require(
            0 <= self.draft_vocab_size <= self.vocab_size,
            f"drafter draft_vocab_size = {self.draft_vocab_size}: expected 0 (all) to {self.vocab_size}",
        )

    @property
    def num_drafts(self) -> int:
        """Drafted tokens a block: G."""
        return self.block_size if self.layout == "anchor_first" else self.block_size - 1

    @property
    def head_rows(self) -> int:
        """Rows of the draft head: the reduced vocabulary, or all of it."""
        return self.draft_vocab_size or self.vocab_size


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """What a request wants: temperature 0 is greedy; top_k 0 and top_p 1 switch the truncation off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            f"temperature = {self.temperature}: expected 0 or a positive number",
        )
        _require(self.top_k >= 0, f"top_k = {self.top_k}: expected 0 (off) or a positive count")
        _require(0 < self.top_p <= 1, f"top_p = {self.top_p}: expected a number in (0, 1]")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Weights of the training terms (DSpark paper, section on training; DeepSpec's defaults).

    Slot i of a block weighs exp(-i / decay). `tv` multiplies the L1 distance sum_v |q - p| (twice the total
    variation), as in the reference; `ce` the cross-entropy to the label; `confidence` the binary cross-entropy
    of the confidence logit to the analytic acceptance 1 - TV(p, q). `soft_until` > 0 opens a run with the soft
    cross-entropy to the target's law, which gives way linearly to ce and tv over that fraction of the steps.
    """

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    soft_until: float = 0.0

    def __post_init__(self) -> None:
        _require(0 <= self.soft_until <= 1, f"loss soft_until = {self.soft_until}: expected a fraction of the run")
        for field in ("ce", "tv", "confidence"):
            _require(getattr(self, field) >= 0, f"loss {field} = {getattr(self, field)}: expected 0 or more")
        _require(self.decay > 0, f"loss decay = {self.decay}: expected a positive number of slots")


@dataclasses.dataclass(frozen=True)
class DraftSettings:
    """The drafter of a training run; what is not named here is the target's own (see `drafter_config`).

    `target_layer_ids` empty picks `num_taps` layers by the paper's even spacing. `d_ff` 0 is the target's.
    `draft_vocab_size` > 0 drafts over that many ids, the most frequent of the training answers.
    """

    mask_token_id: int
    num_layers: int = 5
    d_ff: int = 0
    block_size: int = 7
    layout: Layout = "anchor_first"
    num_taps: int = 5
    target_layer_ids: tuple[int, ...] = ()
    markov_rank: int = 256
    confidence_head: bool = True
    confidence_with_markov: bool = True
    draft_vocab_size: int = 0


@dataclasses.dataclass(frozen=True)
class TargetSettings:
    """Which target, and the dtype it computes in while it makes features."""

    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Conversations in JSONL files; an anchor and at least one label of each must be the assistant's own tokens."""

    paths: tuple[str, ...]
    max_length: int = 4096
    num_anchors: int = 512
    min_supervised: int = 14
    validation_fraction: float = 0.05
    features: str = ""
    """Folder of cached target features (`python -m train.features`); empty: the target runs inside the step."""

    def __post_init__(self) -> None:
        _require(self.max_length >= 16, f"data max_length = {self.max_length}: expected at least 16 tokens")
        _require(self.num_anchors >= 1, f"data num_anchors = {self.num_anchors}: expected at least 1")
        _require(
            0 < self.validation_fraction < 1,
            f"data validation_fraction = {self.validation_fraction}: expected a number between 0 and 1",
        )


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """AdamW with linear warm-up, then cosine to `final_fraction` of the peak (DSpark paper, training details)."""

    learning_rate: float = 6e-4
    warmup_fraction: float = 0.04
    final_fraction: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        _require(self.learning_rate > 0, f"optimizer learning_rate = {self.learning_rate}: expected a positive number")
        _require(self.clip_norm > 0, f"optimizer clip_norm = {self.clip_norm}: expected a positive number")


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """Length and rhythm of a run. A step sees `batch_size` conversations."""

    max_steps: int
    batch_size: int = 512
    seed: int = 42
    start_from: str = ""
    """Folder of a drafter whose weights and draft vocabulary a new run starts with; empty: fresh weights."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype of the drafter; master weights, losses and optimiser state are float32."""
    blocks_per_chunk: int = 128
    """Vocabulary work runs over this many blocks at a time, so its memory does not grow with the anchors."""
    log_every: int = 10
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    eval_every: int = 500
    """Every so many steps the real accepted length is measured on held-out prompts; 0: never."""
    eval_prompts: int = 16
    eval_tokens: int = 64

    def __post_init__(self) -> None:
        for field in ("max_steps", "batch_size", "blocks_per_chunk", "log_every", "checkpoint_every"):
            _require(getattr(self, field) > 0, f"train {field} = {getattr(self, field)}: expected a positive number")


@dataclasses.dataclass(frozen=True)
class Config:
    """One training run: what a file in configs/ returns from `get_config()`."""

    target: TargetSettings
    draft: DraftSettings
    data: DataSettings
    train: TrainSettings
    optimizer: OptimizerSettings = OptimizerSettings()
    loss: LossConfig = LossConfig()


def evenly_spaced_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """The published choice of `count` target layers: evenly from layer 1 to the third from the end (DFlash)."""
    if count == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count))


def drafter_config(settings: DraftSettings, target: TargetConfig) -> DrafterConfig:
    """The drafter that `settings` describe for `target`: its width, heads, rope and norms are the target's."""
    _require(
        settings.mask_token_id not in target.eos_token_ids,
        f"draft mask_token_id = {settings.mask_token_id} ends a text: choose an id that no text contains",
    )
    ids = settings.target_layer_ids or evenly_spaced_layers(target.num_layers, settings.num_taps)
    return DrafterConfig(
        vocab_size=target.vocab_size,
        d_model=target.d_model,
        d_ff=settings.d_ff or target.d_ff,
        num_layers=settings.num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rope_theta=target.rope_theta,
        norm_eps=target.norm_eps,
        max_length=target.max_length,
        target_layer_ids=ids,
        num_target_layers=target.num_layers,
        block_size=settings.block_size,
        mask_token_id=settings.mask_token_id,
        layout=settings.layout,
        markov_rank=settings.markov_rank,
        confidence_head=settings.confidence_head,
        confidence_with_markov=settings.confidence_with_markov and settings.markov_rank > 0,
        draft_vocab_size=settings.draft_vocab_size,
    )
