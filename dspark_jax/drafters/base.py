"""What every drafter gives to training and to decoding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class DraftOutput(NamedTuple):
    """Teacher-forced drafts of A blocks: slot i of a block predicts position anchor + 1 + i.

    `logits_BAGV` is float32 over the draft vocabulary, sequential head included; `confidence_BAG` holds logits of
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


def previous_tokens(tokens_BS: jax.Array, anchors_BA: jax.Array, num_drafts: int) -> jax.Array:
    """The true token before each slot, [B, A, G]: slot 0 follows the anchor itself. Past the row's end: its last id."""
    index_BAG = anchors_BA[:, :, None] + jnp.arange(num_drafts)[None, None, :]
    return gather_positions(tokens_BS, index_BAG)


def gather_positions(x_BS: jax.Array, index_BAG: jax.Array) -> jax.Array:
    """x[b, index[b, ...]] for x [B, S] or [B, S, ...]; indices are clipped to the row."""
    return jax.vmap(lambda x, index: x[jnp.clip(index, 0, x.shape[0] - 1)])(x_BS, index_BAG)
