"""What a drafter is: its shape, as a frozen dataclass that checks itself when it is made."""

import dataclasses
from typing import Literal, get_args

from dspark_jax.shapes import RopeScaling, require

AlgorithmName = Literal["dspark", "dflash2"]
Layout = Literal["anchor_first", "fill_in"]
MarkovHeadType = Literal["vanilla", "gated", "rnn"]


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Shape of a drafter: `algorithm` says which module runs it (drafters/registry.py). What follows is about the
    block-parallel ones (DFlash backbone, DSpark heads).

    `block_size` counts the rows of one draft pass (G in DeepSpec's layout, B in z-lab's); `layout` says what a
    row predicts: under 'anchor_first' row i predicts position a+1+i, so all rows are drafts; under 'fill_in'
    row i predicts position a+i, so row 0 is not a draft. `target_layer_ids` are 0-based decoder layers, -1 is
    the embedding output. `draft_vocab_size` = 0 means the whole target vocabulary.

    `layer_windows` gives each draft layer its sliding window W, 0 for none: a row at position p sees keys at positions
    above p - W, itself counted. `layer_causal` says which layers keep a block's rows from seeing the rows behind
    them. Both are empty where all layers see everything. `embed_scale` multiplies the borrowed embedding;
    `logit_softcap` c > 0 turns the head's logits x into c tanh(x / c) before a Markov head adds its bias. `family`
    picks the layers; those of Gemma 4 may take their keys, before norm and rotation, for values (`value_is_key`).

    DFlash 2 has a convolution in every draft layer, whose coefficients are shared by `conv_group_size` channels, and a
    selector of rank `selector_rank` that chooses among the `selector_top_k` tokens that the backbone ranks highest.
    `selector_tied`: its two codebooks are projections of the target's embedding rather than tables of their own.
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
    markov_rank: int = 0
    markov_head_type: MarkovHeadType = "vanilla"
    confidence_head: bool = False
    confidence_with_markov: bool = False
    draft_vocab_size: int = 0
    layer_windows: tuple[int, ...] = ()
    layer_causal: tuple[bool, ...] = ()
    rope_scaling: RopeScaling | None = None
    embed_scale: float = 1.0
    logit_softcap: float = 0.0
    family: Literal["qwen3", "gemma4"] = "qwen3"
    value_is_key: bool = False
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    selector_tied: bool = False

    def __post_init__(self) -> None:
        names = get_args(AlgorithmName)
        require(self.algorithm in names, f"drafter algorithm {self.algorithm!r}: expected one of {', '.join(names)}")
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
            0 <= self.mask_token_id < self.vocab_size,
            f"drafter mask_token_id = {self.mask_token_id} is outside the embedding of {self.vocab_size} rows",
        )
        require(len(self.target_layer_ids) > 0, "drafter target_layer_ids is empty: name the layers to tap")
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
        require(self.markov_rank >= 0, f"drafter markov_rank = {self.markov_rank}: expected 0 (no head) or more")
        require(
            self.markov_head_type in ("vanilla", "gated", "rnn"),
            f"drafter markov_head_type = {self.markov_head_type!r}: expected 'vanilla', 'gated' or 'rnn'",
        )
        require(
            self.markov_rank > 0 or self.markov_head_type == "vanilla",
            f"drafter markov_head_type = {self.markov_head_type!r} needs markov_rank > 0",
        )
        for field in ("layer_windows", "layer_causal"):
            require(
                len(getattr(self, field)) in (0, self.num_layers),
                f"drafter {field} = {getattr(self, field)}: expected one entry for each of {self.num_layers} layers",
            )
        require(min(self.layer_windows, default=0) >= 0, f"drafter layer_windows = {self.layer_windows}: below 0")
        require(self.embed_scale > 0, f"drafter embed_scale = {self.embed_scale}: expected a positive number")
        require(
            not self.confidence_with_markov or (self.confidence_head and self.markov_rank > 0),
            "drafter confidence_with_markov needs confidence_head and markov_rank > 0",
        )
        require(
            0 <= self.draft_vocab_size <= self.vocab_size,
            f"drafter draft_vocab_size = {self.draft_vocab_size}: expected 0 (all) to {self.vocab_size}",
        )
        _check_dflash2(self)

    @property
    def num_drafts(self) -> int:
        """Drafted tokens a block: G."""
        return self.block_size if self.layout == "anchor_first" else self.block_size - 1

    @property
    def head_rows(self) -> int:
        """Rows of the draft head: the reduced vocabulary, or all of it."""
        return self.draft_vocab_size or self.vocab_size


def _check_dflash2(config: DrafterConfig) -> None:
    """Raises ConfigError where a DFlash 2 drafter lacks a part, and where another one has parts of it."""
    if config.algorithm != "dflash2":
        for field in ("conv_group_size", "selector_rank", "selector_top_k", "selector_tied"):
            value = getattr(config, field)
            require(not value, f"drafter {field} = {value}: a drafter of algorithm {config.algorithm!r} has none")
        return
    size, candidates = config.conv_group_size, config.selector_top_k
    require(config.family == "qwen3", f"drafter family {config.family!r}: layers of DFlash 2 are Qwen3's")
    require(
        config.markov_rank == 0,
        f"drafter markov_rank = {config.markov_rank}: DFlash 2 has its selector in place of a Markov head",
    )
    require(
        size > 0 and config.d_model % size == 0,
        f"drafter conv_group_size = {size}: expected a divisor of d_model = {config.d_model}",
    )
    require(config.selector_rank > 0, f"drafter selector_rank = {config.selector_rank}: expected a positive number")
    require(
        0 < candidates <= config.head_rows,
        f"drafter selector_top_k = {candidates}: expected 1 to {config.head_rows}, the size of the draft vocabulary",
    )
