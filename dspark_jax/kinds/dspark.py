"""DSpark, and DFlash: the same without a sequential head."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

from dspark_jax.kinds.base import Kind
from dspark_jax.shapes import require

if TYPE_CHECKING:
    from dspark_jax.config import DraftSettings
    from dspark_jax.drafter_shape import DrafterConfig

MarkovHeadType = Literal["vanilla", "gated", "rnn", "ngram", "hashed_ngram", "gdn", "kda", "mamba2", "domino"]

# The sizes that a head's type reads, each with a usual one; all other sizes are 0.
HEAD_SIZES: dict[MarkovHeadType, dict[str, int]] = {
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
class _Head:
    """What shape and settings of the sequential head (drafters/cells) have in common."""

    markov_head_type: MarkovHeadType = "vanilla"
    """What the head makes of the tokens before a slot."""
    markov_tied: bool = False
    """Its table W1 is a projection of the target's embedding."""
    cell_heads: int = 0
    """Heads of a recurrent cell."""
    cell_size: int = 0
    """Width of each of them, or of a GRU's state."""
    ngram_tokens: int = 0
    """Previous tokens that an n-gram head looks at."""
    hash_tables: int = 0
    """Hash tables for each order of n-gram."""
    hash_rows: int = 0
    """Rows of each of them."""


@dataclasses.dataclass(frozen=True)
class Shape(_Head):
    """The sequential head of a drafter; which sizes its type reads is said in `HEAD_SIZES`, all others are 0."""

    markov_rank: int = 0
    """0: no head, so the drafter is DFlash."""
    confidence_with_markov: bool = False
    """The confidence head reads the previous token's row of W1."""
    pure_draft_prefix_len: int = 0
    """The first slots of a domino head, which get no bias."""


@dataclasses.dataclass(frozen=True)
class Settings(_Head):
    """Those of a training run: a size of 0 is what is usual for the head's type."""

    markov_rank: int = 256
    """Rank of the sequential head; 0: none, which is DFlash."""
    confidence_with_markov: bool = True
    """The confidence head reads the previous token's row of W1 too, where there is one."""
    pure_draft_prefix_len: int | None = None
    """The first slots of a domino head, which get no bias; None: 1."""


def _fields(settings: DraftSettings) -> dict[str, Any]:
    """Sizes that are not given are the usual ones of the head's type."""
    kind, rank, prefix = settings.markov_head_type, settings.markov_rank, settings.pure_draft_prefix_len
    usual = HEAD_SIZES.get(kind, {})
    sizes = {field: getattr(settings, field) or usual.get(field, 0) for field in SIZE_FIELDS}
    return sizes | {
        "markov_rank": rank,
        "markov_head_type": kind,
        "markov_tied": settings.markov_tied,
        "confidence_with_markov": settings.confidence_with_markov and rank > 0 and kind != "domino",
        "pure_draft_prefix_len": int(kind == "domino") if prefix is None else prefix,
    }


def _check(c: DrafterConfig) -> None:
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
    require(
        not c.confidence_with_markov or (c.confidence_head and c.markov_rank > 0),
        "drafter confidence_with_markov needs confidence_head and markov_rank > 0",
    )
    require(
        not c.confidence_with_markov or kind != "domino",
        "drafter confidence_with_markov: a domino head has no W1 for the confidence head to read",
    )


KIND = Kind(
    shapes=(Shape,),
    check=_check,
    fields=_fields,
    can_grow=True,
)
