"""The protocol of drafters: what each gives to training and to decoding, which do not know which one they run.

A drafter is a module with the functions of `Algorithm`, found by its config (`registry.algorithm`). All are pure; the
context of committed tokens lies in caches whose kind (dense, paged, packed rows) the caller chooses.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from dspark_jax.config import DrafterConfig
from dspark_jax.kv_cache import Cache
from dspark_jax.layers import linear, soft_cap
from dspark_jax.sampling import BlockSample, SamplingRows

Params = dict[str, Any]
# The logit of what a law cannot draw, where it lives on a few candidates of each slot.
NEVER = -1e30


class DraftOutput(NamedTuple):
    """Teacher-forced drafts of A blocks: slot i of a block predicts position anchor + 1 + i.

    `logits_BAGV` is float32 over the draft vocabulary, sequential head included (`NEVER` where a draft is impossible);
    `confidence_BAG` holds logits of
    "this draft survives verification, given that the ones before it did", None without a confidence head.
    """

    logits_BAGV: jax.Array
    confidence_BAG: jax.Array | None


class Frozen(NamedTuple):
    """The target's parts that a drafter uses and never trains.

    `embed_VD` is the whole embedding. `head_VD` holds one row a draft-vocabulary id: all of the target's head, or
    the rows of the ids in `draft_to_target_V` (None: draft ids are target ids). `transition_VW` may hold a vanilla
    Markov head multiplied out (see `dspark.transition_table`): a lookup then replaces its product in each step.
    """

    embed_VD: jax.Array
    head_VD: jax.Array
    draft_to_target_V: jax.Array | None = None
    transition_VW: jax.Array | None = None


class Committed(NamedTuple):
    """Tokens that have been through the target: ids [B, S], raw outputs of the tapped layers [B, S, M, D], and the
    hidden states after the final norm [B, S, D]."""

    tokens_BS: jax.Array
    taps_BSMD: jax.Array
    hidden_BSD: jax.Array


class BlockFeatures(NamedTuple):
    """A teacher-forced pass before the vocabulary work: per slot a hidden state, what the sequential head adds to it
    (None without one), and a confidence logit (None without that head)."""

    hidden_BAGD: jax.Array
    latent_BAGR: jax.Array | None
    confidence_BAG: jax.Array | None


class Proposal(NamedTuple):
    """A drafted block and, with a confidence head, a logit a slot. Slot k's logit was computed before draft k was
    drawn, so it may gate its verification."""

    sample: BlockSample
    confidence_RG: jax.Array | None


class Algorithm(Protocol):
    """The functions of a drafter's module."""

    def init_params(self, config: DrafterConfig, rng: jax.Array) -> Params:
        """Fresh float32 weights."""
        ...

    def cache_layers(self, config: DrafterConfig) -> Sequence[tuple[int, int]]:
        """Key/value heads and head size of every cache that `commit` fills, in order."""
        ...

    def commit(
        self, config: DrafterConfig, params: Params, frozen: Frozen, caches: Sequence[Cache], committed: Committed,
        position_BS: jax.Array,
    ) -> list[Any]:  # fmt: skip
        """Adds tokens at their positions to the caches, whose kind is kept.

        Rows of tokens that turn out rejected may be among them: a draft at anchor a reads nothing that the token at
        or behind a brought, and those rows are overwritten when their position is committed.
        """
        ...

    def propose(
        self, config: DrafterConfig, params: Params, frozen: Frozen, caches: Sequence[Cache], first_R: jax.Array,
        anchor_R: jax.Array, keys_RG: jax.Array, rows: SamplingRows, greedy: bool = False, shortlist: int = 0,
    ) -> Proposal:  # fmt: skip
        """Drafts G tokens a request after token `first` at position `anchor`; caches are read, not written.

        `greedy` (static) says that every row has temperature 0, which needs no law at all. `shortlist` K > 0: each
        position drafts among K candidates, and its law lives on those.
        """
        ...

    def context_rows(
        self, config: DrafterConfig, params: Params, frozen: Frozen, committed: Committed, start_BS: jax.Array,
        scan_layers: bool = False,
    ) -> Any:  # fmt: skip
        """The context of packed rows, for `teacher_forced_blocks`: token s of a row belongs to the document that begins
        at start[s]. `scan_layers`: as one loop over the layers, where they are alike."""
        ...

    def teacher_forced_blocks(
        self, config: DrafterConfig, params: Params, frozen: Frozen, tokens_BS: jax.Array, rows: Any,
        anchors_BA: jax.Array, detach_confidence: bool = False,
    ) -> BlockFeatures:  # fmt: skip
        """Blocks at some of the anchors, every slot fed the true token before it. `detach_confidence`: the confidence
        head learns without teaching the rest."""
        ...

    def draft_logits(
        self, config: DrafterConfig, params: Params, frozen: Frozen, hidden: jax.Array, latent: Any
    ) -> jax.Array:
        """Float32 logits [..., V] over the draft vocabulary, sequential head included."""
        ...


class LabelScores(Protocol):
    """For a law that may give the label no chance at all: its logits [..., V], as `draft_logits`, and a cross-entropy
    [...] of the labels (draft ids) that can be learnt from. Elsewhere it is that of the logits."""

    def __call__(
        self, config: DrafterConfig, params: Params, frozen: Frozen, hidden: jax.Array, latent: Any, labels: jax.Array
    ) -> tuple[jax.Array, jax.Array]: ...


class Fold(Protocol):
    """For a drafter with weights that can be multiplied out once and for all: the same drafter with those products.
    Elsewhere a drafter is served as it was trained."""

    def __call__(self, config: DrafterConfig, params: Params, frozen: Frozen) -> tuple[DrafterConfig, Params]: ...


def parallel_logits(config: DrafterConfig, frozen: Frozen, hidden: jax.Array) -> jax.Array:
    """Float32 logits [..., V] of hidden states through the target's head, before any sequential part."""
    return soft_cap(config.logit_scale * linear(hidden, frozen.head_VD), config.logit_softcap)


def previous_tokens(tokens_BS: jax.Array, anchors_BA: jax.Array, num_drafts: int) -> jax.Array:
    """The true token before each slot, [B, A, G]: slot 0 follows the anchor itself. Past the row's end: its last id."""
    index_BAG = anchors_BA[:, :, None] + jnp.arange(num_drafts)[None, None, :]
    return gather_positions(tokens_BS, index_BAG)


def gather_positions(x_BS: jax.Array, index_BAG: jax.Array) -> jax.Array:
    """x[b, index[b, ...]] for x [B, S] or [B, S, ...]; indices are clipped to the row."""
    return jax.vmap(lambda x, index: x[jnp.clip(index, 0, x.shape[0] - 1)])(x_BS, index_BAG)
