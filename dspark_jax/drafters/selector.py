"""DFlash 2's selector: which of a slot's candidates goes best with the token before it.

    S_t(a, b) = u_t(b) + <A[a] * (Hp h_t), B[b]>        a the token before, b one of the candidates

u are the backbone's logits, h its hidden states; A and B, the codebooks, have a row a token: tables of their own, or
projections of the target's embedding ("tied").
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import layers
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters.base import Frozen

_zeros = nn.initializers.zeros


class Selector(nn.Module):
    """Fresh, it adds nothing: the successors' codes are zero."""

    config: DrafterConfig

    def setup(self) -> None:
        c = self.config
        rank, width = c.selector_rank, c.d_model
        self.hidden_projection = self.param("hidden_projection", layers.normal_init, (rank, width))
        if c.selector_tied:
            self.predecessor = self.param("predecessor_projection", layers.normal_init, (rank, width))
            self.successor = self.param("successor_projection", _zeros, (rank, width))
        else:
            self.predecessor = self.param("predecessor", layers.normal_init, (c.vocab_size, rank))
            self.successor = self.param("successor", _zeros, (c.head_rows, rank))

    def project(self, hidden: jax.Array) -> jax.Array:
        """Hp h, [..., r]."""
        return layers.linear(hidden, self.hidden_projection)

    def predecessors(self, frozen: Frozen, ids: jax.Array) -> jax.Array:
        """Codes [..., r] of target ids."""
        if not self.config.selector_tied:
            return layers.rows_of(self.predecessor, ids).astype(jnp.float32)
        return layers.linear(layers.rows_of(frozen.embed_VD, ids), self.predecessor)

    def successors(self, frozen: Frozen, ids: jax.Array) -> jax.Array:
        """Codes [..., r] of draft ids."""
        if not self.config.selector_tied:
            return layers.rows_of(self.successor, ids).astype(jnp.float32)
        target_ids = ids if frozen.draft_to_target_V is None else frozen.draft_to_target_V[ids]
        return layers.linear(layers.rows_of(frozen.embed_VD, target_ids), self.successor)


def pair_scores(query: jax.Array, codes: jax.Array) -> jax.Array:
    """What the selector adds to each candidate's logit, [..., K]: query [..., r] is A[a] * (Hp h), codes [..., K, r]
    are the candidates' rows of B."""
    return jnp.einsum("...r,...Kr->...K", query, codes)
