"""What a drafter is: its shape, as a frozen dataclass that checks itself when it is made."""

import dataclasses
from typing import Literal, get_args

from dspark_jax.shapes import RopeScaling, require

AlgorithmName = Literal["dspark", "eagle3", "mtp"]
Layout = Literal["anchor_first", "fill_in"]
MarkovHeadType = Literal["vanilla", "gated", "rnn"]


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Shape of a drafter: `algorithm` says which module runs it (drafters/registry.py). What follows is about the
    block-parallel ones (DFlash backbone, DSpark heads).

    Chain drafters (EAGLE-3, MTP) draft one token after the other with one layer of their own: `block_size` tokens, no
    mask (`mask_token_id` -1), no Markov head. EAGLE-3 fuses `target_layer_ids`; MTP taps nothing, it reads the
    target's last hidden state. Public EAGLE-3 drafters may have a layer without norms of queries and keys (`qk_norm`
    False), a residual stream that starts after the norm (`norm_before_residual`), and a trained head of their own
    instead of the target's (`own_head`).

    `block_size` counts the rows of one draft pass (G in DeepSpec's layout, B in z-lab's); `layout` says what a
    row predicts: under 'anchor_first' row i predicts position a+1+i, so all rows are drafts; under 'fill_in'
    row i predicts position a+i, so row 0 is not a draft. `target_layer_ids` are 0-based decoder layers, -1 is
    the embedding output. `draft_vocab_size` = 0 means the whole target vocabulary.

    `layer_windows` gives each draft layer its sliding window W, 0 for none: a row at position p sees keys at positions
    above p - W, itself counted. `layer_causal` says which layers keep a block's rows from seeing the rows behind
    them. Both are empty where all layers see everything. `embed_scale` multiplies the borrowed embedding;
    `logit_softcap` c > 0 turns the head's logits x into c tanh(x / c) before a Markov head adds its bias. `family`
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
    qk_norm: bool = True
    norm_before_residual: bool = False
    own_head: bool = False

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
            self.chain or 0 <= self.mask_token_id < self.vocab_size,
            f"drafter mask_token_id = {self.mask_token_id} is outside the embedding of {self.vocab_size} rows",
        )
        require(
            len(self.target_layer_ids) > 0 or self.algorithm == "mtp",
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
        _check_chain(self)

    @property
    def chain(self) -> bool:
        """Whether each draft is fed the one before it, through a layer of the drafter's own."""
        return self.algorithm in ("eagle3", "mtp")

    @property
    def num_drafts(self) -> int:
        """Drafted tokens a block: G."""
        return self.block_size if self.layout == "anchor_first" else self.block_size - 1

    @property
    def head_rows(self) -> int:
        """Rows of the draft head: the reduced vocabulary, or all of it."""
        return self.draft_vocab_size or self.vocab_size


def _check_chain(config: DrafterConfig) -> None:
    """Refuses what chain drafters have no use for, and their own settings elsewhere."""
    name = config.algorithm
    if not config.chain:
        plain = config.qk_norm and not config.norm_before_residual and not config.own_head
        require(plain, f"drafter qk_norm, norm_before_residual, own_head: not settings of {name}")
        return
    for field, value in (
        ("num_layers", 1),
        ("layout", "anchor_first"),
        ("mask_token_id", -1),
        ("markov_rank", 0),
        ("layer_windows", ()),
        ("layer_causal", ()),
        ("family", "qwen3"),
    ):
        found = getattr(config, field)
        require(found == value, f"drafter {field} = {found!r}: {name} has {value!r} and nothing else")
    if name == "mtp":
        plain = not config.norm_before_residual and not config.own_head
        require(plain, "drafter norm_before_residual, own_head: not settings of mtp")
        require(
            not config.target_layer_ids,
            f"drafter target_layer_ids = {config.target_layer_ids}: mtp taps no layer, it reads the last hidden state",
        )
