"""Proposing one token after the other: the loop that chain drafters and plain draft models share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.config import DrafterConfig
from dspark_jax.drafters.base import Frozen, Proposal
from dspark_jax.sampling import BlockSample, SamplingRows, draw

# What is carried from step to step, the token before the slot and the slot's number, to what is carried on and the
# slot's hidden state [R, D].
Step = Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array]]


def propose(
    config: DrafterConfig,
    frozen: Frozen,
    step: Step,
    start: Any,
    logits: Callable[[jax.Array], jax.Array],
    confidence: Callable[[jax.Array], jax.Array],
    first_R: jax.Array,
    keys_RG: jax.Array,
    rows: SamplingRows,
    greedy: bool,
    shortlist: int,
) -> Proposal:
    """See `Algorithm`: G steps from `start`, each fed what the one before it drew. `logits` and, with that head,
    `confidence` score a hidden state. A shortlist holds a step's own best."""
    d2t_V = frozen.draft_to_target_V

    def one(carry: tuple[Any, jax.Array], xs: tuple[jax.Array, jax.Array]) -> tuple[Any, Any]:
        (state, token_R), (slot, keys_R) = carry, xs
        state, hidden_RD = step(state, token_R, slot)
        logits_RV, support_RK = logits(hidden_RD), None
        if 0 < shortlist < config.head_rows:
            logits_RV, ids_RK = jax.lax.top_k(logits_RV, shortlist)
            support_RK = ids_RK if d2t_V is None else d2t_V[ids_RK]
        drawn = draw(logits_RV, keys_R, rows, d2t_V, greedy, support_RK)
        # The hidden state has seen the token before this slot and not its own, so it may gate its verification.
        confidence_R = confidence(hidden_RD) if config.confidence_head else None
        return (state, drawn.token_R), (*drawn, support_RK, confidence_R)

    slots = jnp.arange(config.num_drafts), keys_RG.swapaxes(0, 1)
    _, drawn = jax.lax.scan(one, (start, jnp.asarray(first_R, jnp.int32)), slots)
    *sample, confidence_RG = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), drawn)
    return Proposal(BlockSample(*sample), confidence_RG)
