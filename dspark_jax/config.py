"""Every setting, as frozen dataclasses that check themselves once, when they are made.

Shape letters, used by the whole project as suffixes of array names:
B batch, S sequence, A anchors, G block (the paper's gamma), R requests, T packed verify tokens, M tapped
layers, D model width, F feed-forward width, N query heads, K key/value heads, H head size, V vocabulary,
L layers, P pages.
"""

import dataclasses
import math
from typing import Literal

from dspark_jax.drafter_shape import DrafterConfig as DrafterConfig
from dspark_jax.drafter_shape import Layout as Layout
from dspark_jax.drafter_shape import plain_drafter as plain_drafter
from dspark_jax.kinds import KINDS, dflash2, dspark, foreign
from dspark_jax.kinds import AlgorithmName as AlgorithmName
from dspark_jax.kinds.dspark import SIZE_FIELDS as SIZE_FIELDS
from dspark_jax.kinds.dspark import MarkovHeadType as MarkovHeadType
from dspark_jax.shapes import ConfigError as ConfigError
from dspark_jax.shapes import Family as Family
from dspark_jax.shapes import LayerShape as LayerShape
from dspark_jax.shapes import RopeScaling as RopeScaling
from dspark_jax.shapes import TargetConfig as TargetConfig
from dspark_jax.shapes import require


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """What a request wants: temperature 0 is greedy; top_k 0 and top_p 1 switch the truncation off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            f"temperature = {self.temperature}: expected 0 or a positive number",
        )
        require(self.top_k >= 0, f"top_k = {self.top_k}: expected 0 (off) or a positive count")
        require(0 < self.top_p <= 1, f"top_p = {self.top_p}: expected a number in (0, 1]")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Weights of the training terms (DSpark paper, section on training; DeepSpec's defaults).

    Slot i of a block weighs exp(-i / decay); `decay` 0 is the block size, as the paper writes it, where the reference
    has 4. With `dpace` = a > 0 the weights come from the drafter itself instead (D-PACE): slot k weighs the expected
    number of slots from k on that survive, each surviving with (1 - a) q(label) + a, and blocks are what the sum is
    divided by. `tv` multiplies the L1 distance sum_v |q - p| (twice the total
    variation), as in the reference; `ce` the cross-entropy to the label; `soft` that to the target's law, which is
    EAGLE-3's own objective (ce 0, tv 0, soft 1, decay 4.48: a weight of 0.8 a step); `confidence` the binary
    cross-entropy of the confidence logit to the analytic acceptance 1 - TV(p, q). `soft_until` > 0 opens a run with
    the soft cross-entropy to the target's law, which gives way linearly to the other terms over that fraction of the
    steps. `base_until` > 0 opens it with these terms of the parallel logits, before the sequential head, which give way
    to the final ones in the same manner (Domino). `base_ce` adds the cross-entropy of the parallel logits for the whole
    run, as DFlash 2 needs, whose candidates they rank: its public trainers use ce 1, tv 0, base_ce 1.
    `detach_confidence`: the confidence term trains its head only.
    """

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0
    soft_until: float = 0.0
    dpace: float = 0.0
    base_until: float = 0.0
    detach_confidence: bool = False
    base_ce: float = 0.0
    soft: float = 0.0

    def __post_init__(self) -> None:
        for field in ("soft_until", "base_until"):
            value = getattr(self, field)
            require(0 <= value <= 1, f"loss {field} = {value}: expected a fraction of the run")
        for field in ("ce", "tv", "soft", "confidence", "base_ce"):
            require(getattr(self, field) >= 0, f"loss {field} = {getattr(self, field)}: expected 0 or more")
        require(self.decay >= 0, f"loss decay = {self.decay}: expected a number of slots, or 0 for the block size")
        require(0 <= self.dpace < 1, f"loss dpace = {self.dpace}: expected 0 (off) or a number below 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftSettings(dflash2.Settings, dspark.Settings):
    """The drafter of a training run; what is not named here is the target's own (see `drafter_config`).

    `algorithm` "eagle3" and "mtp" draft token by token: `block_size` of them with one layer, no mask token, no Markov
    head. mtp taps no layer. `mask_token_id` is for the others: an id that no text contains. "lm" is a decoder of
    its own, fed nothing of the target but tokens: `num_layers` of the target's kind, or the language model that
    `train.start_from` names.

    `target_layer_ids` empty picks `num_taps` layers by the paper's even spacing. `d_ff` 0 is the target's.
    `draft_vocab_size` > 0 drafts over that many ids, the most frequent of the training answers. `layer_windows` and
    `layer_causal` are those of DrafterConfig: a sliding window for each draft layer, which inside a block reaches both
    ways, and the layers whose rows see none behind them. The bases are what some algorithms have for
    themselves and the others refuse: DSpark its sequential head, DFlash 2 its convolution and selector.
    """

    mask_token_id: int = -1
    num_layers: int = 5
    d_ff: int = 0
    block_size: int = 7
    layout: Layout = "anchor_first"
    num_taps: int = 5
    target_layer_ids: tuple[int, ...] = ()
    confidence_head: bool = True
    draft_vocab_size: int = 0
    algorithm: AlgorithmName = "dspark"
    layer_windows: tuple[int, ...] = ()
    layer_causal: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        require(self.algorithm in KINDS, f"draft algorithm {self.algorithm!r}: expected one of {', '.join(KINDS)}")


@dataclasses.dataclass(frozen=True)
class TargetSettings:
    """Which target, and the dtype it computes in while it makes features."""

    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclasses.dataclass(frozen=True)
class DataSettings:
    """Conversations in JSONL or ArrayRecord files (one JSON object a line or entry); an anchor and at least one label
    of each must be the assistant's own tokens."""

    paths: tuple[str, ...]
    weights: tuple[float, ...] = ()
    """The share of the steps that each path gets; empty: as many as its rows."""
    max_length: int = 4096
    num_anchors: int = 512
    min_supervised: int = 14
    validation_fraction: float = 0.05
    features: str = ""
    """Folder of cached target features (`python -m train.features`); empty: the target runs inside the step."""
    packing: bool = False
    """Rows of max_length hold as many conversations as fit; num_anchors are then drawn over all of a row."""
    buckets: tuple[int, ...] = ()
    """Row lengths, ascending: a batch has the smallest that holds its rows; empty: one that holds the longest."""
    workers: int = 0
    """Processes that make batches; 0: threads of this one."""

    def __post_init__(self) -> None:
        require(
            len(self.weights) in (0, len(self.paths)) and all(weight > 0 for weight in self.weights),
            f"data weights = {self.weights}: expected a positive number for each of {len(self.paths)} paths",
        )
        require(
            list(self.buckets) == sorted(set(self.buckets)) and all(length >= 16 for length in self.buckets),
            f"data buckets = {self.buckets}: expected ascending lengths of at least 16",
        )
        require(
            not self.buckets or self.buckets[-1] >= self.max_length,
            f"data buckets = {self.buckets}: the last must hold max_length = {self.max_length}",
        )
        require(
            not (self.buckets and self.packing),
            f"data buckets = {self.buckets}: packed rows all have max_length tokens; leave out buckets or packing",
        )
        require(self.workers >= 0, f"data workers = {self.workers}: expected 0 or more")
        require(self.max_length >= 16, f"data max_length = {self.max_length}: expected at least 16 tokens")
        require(self.num_anchors >= 1, f"data num_anchors = {self.num_anchors}: expected at least 1")
        require(
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
        require(self.learning_rate > 0, f"optimizer learning_rate = {self.learning_rate}: expected a positive number")
        require(self.clip_norm > 0, f"optimizer clip_norm = {self.clip_norm}: expected a positive number")
        require(self.weight_decay >= 0, f"optimizer weight_decay = {self.weight_decay}: expected 0 or more")
        for field in ("warmup_fraction", "final_fraction"):
            value = getattr(self, field)
            require(0 <= value <= 1, f"optimizer {field} = {value}: expected a number from 0 to 1")
        for field in ("b1", "b2"):
            value = getattr(self, field)
            require(0 <= value < 1, f"optimizer {field} = {value}: expected 0 or a number below 1")


@dataclasses.dataclass(frozen=True)
class TrainSettings:
    """Length and rhythm of a run. A step sees `batch_size` rows: conversations, or packs of them."""

    max_steps: int
    batch_size: int = 512
    accumulation_steps: int = 1
    """Parts that a step's batch is worked off in, one after the other, so that its memory is that of one part."""
    seed: int = 42
    start_from: str = ""
    """Folder of a drafter whose weights and draft vocabulary a new run starts with, further layers as nothing yet;
    its blocks may have had another size."""
    recount_vocabulary: bool = False
    """With start_from: draft over the drafter's ids and the commonest of this run's; new ones start unbiased."""
    markov_init: Literal["random", "corpus"] = "random"
    """What W1 and W2 of the sequential head begin as: random, or the bigrams of the training answers."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Compute dtype of the drafter; master weights, losses and optimiser state are float32."""
    blocks_per_chunk: int = 128
    """Blocks are drafted and scored so many at a time on each device: memory does not grow with the anchors."""
    log_every: int = 10
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    eval_every: int = 500
    """Every so many steps the real accepted length is measured on held-out prompts; 0: never."""
    eval_prompts: int = 16
    eval_tokens: int = 64

    def __post_init__(self) -> None:
        require(not self.recount_vocabulary or bool(self.start_from), "train recount_vocabulary needs start_from")
        positive = (
            "max_steps", "batch_size", "accumulation_steps", "blocks_per_chunk", "log_every", "checkpoint_every",
            "keep_checkpoints", "eval_prompts", "eval_tokens",
        )  # fmt: skip
        for field in positive:
            require(getattr(self, field) > 0, f"train {field} = {getattr(self, field)}: expected a positive number")
        require(self.seed >= 0, f"train seed = {self.seed}: expected 0 or more")
        require(self.eval_every >= 0, f"train eval_every = {self.eval_every}: expected 0 (never) or more")
        require(
            self.batch_size % self.accumulation_steps == 0,
            f"train batch_size = {self.batch_size} is not a multiple of accumulation_steps = {self.accumulation_steps}",
        )


@dataclasses.dataclass(frozen=True)
class MeshSettings:
    """How a run spreads over devices: rows of a batch over `data` times `fsdp`, weights and optimiser state over
    `fsdp`, and the work of each layer over `tensor`."""

    data: int = 0
    """0: whatever the other two leave."""
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        require(self.data >= 0, f"mesh data = {self.data}: expected 0 (all that is left) or more")
        for field in ("fsdp", "tensor"):
            require(getattr(self, field) > 0, f"mesh {field} = {getattr(self, field)}: expected a positive number")


@dataclasses.dataclass(frozen=True)
class Config:
    """One training run: what a file in configs/ returns from `get_config()`."""

    target: TargetSettings
    draft: DraftSettings
    data: DataSettings
    train: TrainSettings
    optimizer: OptimizerSettings = OptimizerSettings()
    loss: LossConfig = LossConfig()
    mesh: MeshSettings = MeshSettings()

    def __post_init__(self) -> None:
        draft = self.draft
        require(
            not KINDS[draft.algorithm].whole_model or not (self.loss.base_until or self.loss.base_ce),
            f"loss base_until, base_ce: an {draft.algorithm} drafter has no logits before a sequential head",
        )
        if self.train.markov_init == "corpus":
            require(
                draft.markov_rank > 0 and not draft.markov_tied and draft.markov_head_type != "domino",
                f"train markov_init = 'corpus' fills W1 and W2: a {'tied ' * draft.markov_tied}{draft.markov_head_type}"
                f" head of rank {draft.markov_rank} does not have both",
            )
            require(
                not self.train.start_from,
                f"train markov_init = 'corpus' and start_from = {self.train.start_from!r} both say what W1 and W2 begin"
                " as: choose one",
            )


def evenly_spaced_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """The published choice of `count` target layers: evenly from layer 1 to the third from the end (DFlash)."""
    if count == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count))


def drafter_config(settings: DraftSettings, target: TargetConfig) -> DrafterConfig:
    """The drafter that `settings` describe for `target`: its width, heads, rope and norms are the target's."""
    require(
        settings.mask_token_id not in target.eos_token_ids,
        f"draft mask_token_id = {settings.mask_token_id} ends a text: choose an id that no text contains",
    )
    kind, settings = KINDS[settings.algorithm], _only_own(settings)
    ids = settings.target_layer_ids
    if kind.taps and not ids:
        ids = evenly_spaced_layers(target.num_layers, settings.num_taps)
    if kind.whole_model:
        sizes = {"num_layers": settings.num_layers, "d_ff": settings.d_ff or target.d_ff, "layer_windows": ()}
        whole = dataclasses.replace(target, **sizes)
        return plain_drafter(whole, settings.block_size, settings.confidence_head)
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
        algorithm=settings.algorithm,
        layout=settings.layout,
        confidence_head=settings.confidence_head,
        draft_vocab_size=settings.draft_vocab_size,
        layer_windows=settings.layer_windows,
        layer_causal=settings.layer_causal,
        embed_scale=target.embed_scale,
        logit_softcap=target.logit_softcap,
        **kind.own_fields(settings),
    )


def _only_own(settings: DraftSettings) -> DraftSettings:
    """The settings with what the algorithm does not use as it has it. It may stand so already, or as it is by default;
    raises ConfigError for anything else, by name."""
    name, kind = settings.algorithm, KINDS[settings.algorithm]
    unused = {field: getattr(DrafterConfig, field) for field in foreign(name)} | dict(kind.fixed)
    if not kind.taps:
        unused |= {"num_taps": 0, "target_layer_ids": ()}
    unused = {field: value for field, value in unused.items() if hasattr(DraftSettings, field)}
    for field, value in unused.items():
        found = getattr(settings, field)
        require(
            found in (value, getattr(DraftSettings, field)),
            f"draft {field} = {found!r}: {name} drafters have {value!r}; leave it out",
        )
    return dataclasses.replace(settings, **unused)
