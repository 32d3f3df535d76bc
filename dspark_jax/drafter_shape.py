"""What a drafter is: its shape, as a frozen dataclass that checks itself when it is made. See kinds/ too."""

import dataclasses
from typing import Literal

from dspark_jax.kinds import KINDS, AlgorithmName, Kind, chains, dflash2, dspark, foreign, lm
from dspark_jax.shapes import RopeScaling, TargetConfig, require

Layout = Literal["anchor_first", "fill_in"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig(lm.Shape, chains.Eagle3Shape, chains.LayerShape, dflash2.Shape, dspark.Shape):
    """Shape of a drafter: `algorithm` says which module runs it (drafters/registry.py), and so which of the bases
    counts. What follows is about the block-parallel ones (DFlash backbone, DSpark heads).

    Chain drafters (EAGLE-3, MTP) draft one token after the other with one layer of their own: `block_size` tokens, no
    mask (`mask_token_id` -1). EAGLE-3 fuses `target_layer_ids`; MTP taps nothing, it reads the target's last hidden
    state. A plain draft model ("lm") is a whole decoder.

    `block_size` counts the rows of one draft pass (G in DeepSpec's layout, B in z-lab's); `layout` says what a
    row predicts: under 'anchor_first' row i predicts position a+1+i, so all rows are drafts; under 'fill_in'
    row i predicts position a+i, so row 0 is not a draft. `target_layer_ids` are 0-based decoder layers, -1 is
    the embedding output. `draft_vocab_size` = 0 means the whole target vocabulary.

    `layer_windows` gives each draft layer its sliding window W, 0 for none: a row at position p sees keys at positions
    above p - W, itself counted. `layer_causal` says which layers keep a block's rows from seeing the rows behind
    them. Both are empty where all layers see everything. `embed_scale` multiplies the borrowed embedding, `logit_scale`
    the head's logits; `logit_softcap` c > 0 then turns these x into c tanh(x / c), before a Markov head adds its bias
    or a selector its scores. `family`
    picks the layers; those of Gemma 4 may take their keys, before norm and rotation, for values (`value_is_key`).
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
    algorithm: AlgorithmName = "dspark"
    layout: Layout = "anchor_first"
    confidence_head: bool = False
    draft_vocab_size: int = 0
    layer_windows: tuple[int, ...] = ()
    layer_causal: tuple[bool, ...] = ()
    rope_scaling: RopeScaling | None = None
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    family: Literal["qwen3", "gemma4"] = "qwen3"
    value_is_key: bool = False

    def __post_init__(self) -> None:
        require(self.algorithm in KINDS, f"drafter algorithm {self.algorithm!r}: expected one of {', '.join(KINDS)}")
        _check_kind(self)
        require(self.family in ("qwen3", "gemma4"), f"drafter family {self.family!r}: expected 'qwen3' or 'gemma4'")
        require(
            not self.value_is_key or self.family == "gemma4", "drafter value_is_key: only layers of Gemma 4 have that"
        )
        for field in ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            require(getattr(self, field) > 0, f"drafter {field} = {getattr(self, field)}: expected a positive number")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"drafter num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}",
        )
        require(self.layout in ("anchor_first", "fill_in"), f"drafter layout {self.layout!r}: anchor_first or fill_in")
        smallest = 1 if self.layout == "anchor_first" else 2
        require(self.block_size >= smallest, f"drafter block_size = {self.block_size}: expected at least {smallest}")
        require(
            self.chain or 0 <= self.mask_token_id < self.vocab_size,
            f"drafter mask_token_id = {self.mask_token_id} is outside the embedding of {self.vocab_size} rows",
        )
        require(
            len(self.target_layer_ids) > 0 or not self.kind.taps,
            "drafter target_layer_ids is empty: name the layers to tap",
        )
        for layer in self.target_layer_ids:
            require(
                -1 <= layer < self.num_target_layers - 1,
                f"drafter target_layer_ids has {layer}: the target has {self.num_target_layers} layers, so ids run"
                f" from -1 (embedding output) to {self.num_target_layers - 2} (the last layer is not tapped)",
            )
        require(
            len(set(self.target_layer_ids)) == len(self.target_layer_ids),
            f"drafter target_layer_ids {self.target_layer_ids} repeats a layer",
        )
        for field in ("layer_windows", "layer_causal"):
            require(
                len(getattr(self, field)) in (0, self.num_layers),
                f"drafter {field} = {getattr(self, field)}: expected one entry for each of {self.num_layers} layers",
            )
        require(min(self.layer_windows, default=0) >= 0, f"drafter layer_windows = {self.layer_windows}: below 0")
        for field in ("embed_scale", "logit_scale"):
            require(getattr(self, field) > 0, f"drafter {field} = {getattr(self, field)}: expected a positive number")
        require(
            0 <= self.draft_vocab_size <= self.vocab_size,
            f"drafter draft_vocab_size = {self.draft_vocab_size}: expected 0 (all) to {self.vocab_size}",
        )
        self.kind.check(self)

    @property
    def kind(self) -> Kind:
        """What there is to know of its algorithm."""
        return KINDS[self.algorithm]

    @property
    def chain(self) -> bool:
        """Whether each draft is fed the one before it, through layers of the drafter's own."""
        return self.kind.chain

    @property
    def num_drafts(self) -> int:
        """Drafted tokens a block: G."""
        return self.block_size if self.layout == "anchor_first" else self.block_size - 1

    @property
    def head_rows(self) -> int:
        """Rows of the draft head: the reduced vocabulary, or all of it."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def head_reads_embedding(self) -> bool:
        """Whether the sequential head reads the target's embedding of the tokens before a slot."""
        return self.markov_tied or self.markov_head_type == "domino"


def _check_kind(config: DrafterConfig) -> None:
    """Refuses what a drafter of its algorithm has no use for, by name."""
    name, kind = config.algorithm, config.kind
    for field in foreign(name):
        found = getattr(config, field)
        require(found == getattr(DrafterConfig, field), f"drafter {field} = {found!r}: not a setting of {name}")
    for field, value in kind.fixed.items():
        found = getattr(config, field)
        require(found == value, f"drafter {field} = {found!r}: {name} has {value!r} and nothing else")
    require(
        kind.taps or not config.target_layer_ids,
        f"drafter target_layer_ids = {config.target_layer_ids}: {name} taps no layer",
    )


def plain_drafter(language_model: TargetConfig, block_size: int, confidence_head: bool = False) -> DrafterConfig:
    """The drafter that a whole decoder is: it taps nothing of its target, and so fits any target of its tokens."""
    language_model = dataclasses.replace(language_model, name="")
    return DrafterConfig(
        **{field: getattr(language_model, field) for field in lm.SHARED},
        target_layer_ids=(),
        num_target_layers=0,
        block_size=block_size,
        mask_token_id=-1,
        algorithm="lm",
        confidence_head=confidence_head,
        language_model=language_model,
    )
