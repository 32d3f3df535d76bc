"""What a drafter is: its shape, as a frozen dataclass that checks itself when it is made."""

import dataclasses
from typing import Literal, get_args

from dspark_jax.shapes import RopeScaling, TargetConfig, require

AlgorithmName = Literal["dspark", "dflash2", "eagle3", "mtp", "lm"]
Layout = Literal["anchor_first", "fill_in"]
MarkovHeadType = Literal["vanilla", "gated", "rnn", "ngram", "hashed_ngram", "gdn", "kda", "mamba2", "domino"]

# The sizes that a head's type reads, each with a usual one; all other sizes are 0.
HEAD_SIZES: dict[str, dict[str, int]] = {
    "vanilla": {},
    "gated": {},
    "rnn": {},
    "ngram": {"ngram_tokens": 2},
    "hashed_ngram": {"ngram_tokens": 2, "hash_tables": 4, "hash_rows": 2**16},
    "gdn": {"cell_heads": 4, "cell_size": 64},
    "kda": {"cell_heads": 4, "cell_size": 64},
    "mamba2": {"cell_heads": 4, "cell_size": 64},
    "domino": {"cell_size": 1024},
}
SIZE_FIELDS = tuple(dict.fromkeys(field for sizes in HEAD_SIZES.values() for field in sizes))


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
    them. Both are empty where all layers see everything. `embed_scale` multiplies the borrowed embedding, `logit_scale`
    the head's logits; `logit_softcap` c > 0 then turns these x into c tanh(x / c), before a Markov head adds its bias
    or a selector its scores. `family`
    picks the layers; those of Gemma 4 may take their keys, before norm and rotation, for values (`value_is_key`).

    `markov_head_type` is the sequential head (drafters/cells); `markov_rank` 0 is none. With `markov_tied` its table
    W1 is a projection of the target's embedding. `HEAD_SIZES` says which of the sizes behind it a type reads: heads of
    a recurrent cell and the width of each (of a GRU's state), the previous tokens that an n-gram head looks at, hash
    tables an order of n-gram and rows of each. The first `pure_draft_prefix_len` slots of a domino head get no bias.
    DFlash 2 has a convolution in every draft layer, whose coefficients are shared by `conv_group_size` channels, and a
    selector of rank `selector_rank` that chooses among the `selector_top_k` tokens that the backbone ranks highest.
    `selector_tied`: its two codebooks are projections of the target's embedding rather than tables of their own.

    A plain draft model ("lm") is a whole decoder, `language_model`, whose sizes are repeated here (`plain_drafter`).
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
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    family: Literal["qwen3", "gemma4"] = "qwen3"
    value_is_key: bool = False
    markov_tied: bool = False
    cell_heads: int = 0
    cell_size: int = 0
    ngram_tokens: int = 0
    hash_tables: int = 0
    hash_rows: int = 0
    pure_draft_prefix_len: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    selector_tied: bool = False
    qk_norm: bool = True
    norm_before_residual: bool = False
    own_head: bool = False
    language_model: TargetConfig | None = None

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
            len(self.target_layer_ids) > 0 or self.algorithm in ("mtp", "lm"),
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
        _check_head(self)
        for field in ("layer_windows", "layer_causal"):
            require(
                len(getattr(self, field)) in (0, self.num_layers),
                f"drafter {field} = {getattr(self, field)}: expected one entry for each of {self.num_layers} layers",
            )
        require(min(self.layer_windows, default=0) >= 0, f"drafter layer_windows = {self.layer_windows}: below 0")
        for field in ("embed_scale", "logit_scale"):
            require(getattr(self, field) > 0, f"drafter {field} = {getattr(self, field)}: expected a positive number")
        require(
            not self.confidence_with_markov or (self.confidence_head and self.markov_rank > 0),
            "drafter confidence_with_markov needs confidence_head and markov_rank > 0",
        )
        require(
            not self.confidence_with_markov or self.markov_head_type != "domino",
            "drafter confidence_with_markov: a domino head has no W1 for the confidence head to read",
        )
        require(
            0 <= self.draft_vocab_size <= self.vocab_size,
            f"drafter draft_vocab_size = {self.draft_vocab_size}: expected 0 (all) to {self.vocab_size}",
        )
        _check_dflash2(self)
        _check_chain(self)
        _check_language_model(self)

    @property
    def chain(self) -> bool:
        """Whether each draft is fed the one before it, through layers of the drafter's own."""
        return self.algorithm in ("eagle3", "mtp", "lm")

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


def _check_head(c: DrafterConfig) -> None:
    """The sequential head's type and sizes."""
    kind = c.markov_head_type
    require(c.markov_rank >= 0, f"drafter markov_rank = {c.markov_rank}: expected 0 (no head) or more")
    require(kind in HEAD_SIZES, f"drafter markov_head_type = {kind!r}: expected one of {', '.join(HEAD_SIZES)}")
    require(c.markov_rank > 0 or kind == "vanilla", f"drafter markov_head_type = {kind!r} needs markov_rank > 0")
    require(
        not c.markov_tied or (c.markov_rank > 0 and kind != "domino"),
        f"drafter markov_tied: a {kind} head of rank {c.markov_rank} has no W1 to tie to the embedding",
    )
    for field in SIZE_FIELDS:
        size, usual = getattr(c, field), HEAD_SIZES[kind].get(field)
        require(usual is not None or size == 0, f"drafter {field} = {size}: a {kind} head does not read it")
        require(usual is None or size > 0, f"drafter {field} = {size}: a {kind} head needs it, usually {usual}")
    if c.ngram_tokens:
        most = min(3, c.num_drafts)
        require(
            2 <= c.ngram_tokens <= most,
            f"drafter ngram_tokens = {c.ngram_tokens}: expected 2 or 3, at most the {c.num_drafts} drafts of a block",
        )
    if c.hash_tables:
        require(
            c.hash_tables <= 8 and c.markov_rank % c.hash_tables == 0,
            f"drafter hash_tables = {c.hash_tables}: expected at most 8, a divisor of markov_rank = {c.markov_rank}",
        )
        require(c.hash_rows >= 64, f"drafter hash_rows = {c.hash_rows}: expected at least 64")
    biased = c.num_drafts - 1 if kind == "domino" else 0
    require(
        0 <= c.pure_draft_prefix_len <= biased,
        f"drafter pure_draft_prefix_len = {c.pure_draft_prefix_len}: expected 0 to {biased} for a {kind} head with"
        f" {c.num_drafts} drafts a block",
    )


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


def _check_chain(config: DrafterConfig) -> None:
    """Refuses what EAGLE-3 and MTP have no use for, and their own settings elsewhere."""
    name = config.algorithm
    if name not in ("eagle3", "mtp"):
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
        ("logit_scale", 1.0),
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


_SHARED = (
    "vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rope_theta", "norm_eps",
    "max_length",
)  # fmt: skip


def plain_drafter(language_model: TargetConfig, block_size: int, confidence_head: bool = False) -> DrafterConfig:
    """The drafter that a whole decoder is: it taps nothing of its target, and so fits any target of its tokens."""
    language_model = dataclasses.replace(language_model, name="")
    return DrafterConfig(
        **{field: getattr(language_model, field) for field in _SHARED},
        target_layer_ids=(),
        num_target_layers=0,
        block_size=block_size,
        mask_token_id=-1,
        algorithm="lm",
        confidence_head=confidence_head,
        language_model=language_model,
    )


def _check_language_model(config: DrafterConfig) -> None:
    """Refuses what a plain draft model has no use for, and a language model elsewhere."""
    whole, name = config.language_model, config.algorithm
    if name != "lm":
        require(whole is None, f"drafter language_model: a drafter of algorithm {name!r} has none")
        return
    if whole is None:
        require(False, "drafter language_model = None: a drafter of algorithm 'lm' is one")
        return
    own = {field: getattr(whole, field) for field in _SHARED} | {
        "layout": "anchor_first", "mask_token_id": -1, "target_layer_ids": (), "num_target_layers": 0,
        "markov_rank": 0, "draft_vocab_size": 0, "layer_windows": (), "layer_causal": (), "rope_scaling": None,
        "embed_scale": 1.0, "logit_scale": 1.0, "logit_softcap": 0.0, "family": "qwen3",
    }  # fmt: skip
    for field, value in own.items():
        found = getattr(config, field)
        require(found == value, f"drafter {field} = {found!r}: this plain draft model has {value!r} and nothing else")
