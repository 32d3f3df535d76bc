"""The sequential head and the confidence head (DSpark): small things that see the tokens just drafted.

A sequential head gives each slot a latent of rank r, from which W2 makes a bias over the draft vocabulary. What the
latent is made of, the head's cell says (drafters/cells); W1, whose rows most cells read, is a table over the target
vocabulary, or `tied`: a projection of the target's frozen embedding.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import layers
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters.cells import Previous, make_cell


class MarkovHead(nn.Module):
    """One cell for training and sampling: `latents` is what `step` gives over blocks of known tokens."""

    config: DrafterConfig

    def setup(self) -> None:
        c = self.config
        self.cell = make_cell(c)
        if c.markov_tied:
            self.tied = self.param("tied", layers.normal_init, (c.markov_rank, c.d_model))
        elif self.cell.has_rows:
            self.w1 = self.param("w1", layers.normal_init, (c.vocab_size, c.markov_rank))
        self.w2 = self.param("w2", self.cell.w2_init, (c.head_rows, c.markov_rank))
        self.cell_weights = {name: self.param(name, one.init, one.shape) for name, one in self.cell.weights().items()}

    def embed(self, tokens: jax.Array, embedded: jax.Array | None) -> Previous:
        """What the head reads of previous tokens: target ids [...] and, for heads that need it
        (`DrafterConfig.head_reads_embedding`), their rows of the target's embedding [..., D]."""
        if self.config.markov_tied:
            assert embedded is not None
            return Previous(tokens, layers.linear(embedded, self.tied), None)
        return Previous(tokens, layers.rows_of(self.w1, tokens) if self.cell.has_rows else None, embedded)

    def bias(self, latent: jax.Array, ids: jax.Array | None = None) -> jax.Array:
        """[..., r] to float32 logits [..., V] that are added to the backbone's; with `ids`, only theirs [..., K]."""
        if ids is None:
            return layers.linear(latent, self.w2)
        rows = layers.rows_of(self.w2, ids).astype(jnp.float32)
        return jnp.einsum("...r,...Kr->...K", latent.astype(jnp.float32), rows)

    def project(self, hidden: jax.Array) -> Any:
        """What hidden states of blocks [..., G, D] give to the cell: one product for all slots, outside the scan."""
        return self.cell.project(self.cell_weights, hidden)

    def step(self, state: Any, previous: Previous, projected: Any) -> tuple[Any, jax.Array]:
        """The next state and this slot's latent [..., r], from `embed` and `project` of the slot."""
        return self.cell.step(self.cell_weights, state, previous, projected)

    def latents(self, hidden: jax.Array, previous: Previous) -> jax.Array:
        """Latents [..., G, r] of blocks whose previous tokens [..., G] are known (teacher forcing)."""
        return self.cell.block(self.cell_weights, previous, self.project(hidden))


def first_state(config: DrafterConfig, leading: tuple[int, ...]) -> Any:
    """The state before a block's first slot; None where the head keeps none."""
    return make_cell(config).first_state(leading) if config.markov_rank else None


class ConfidenceHead(nn.Module):
    """One logit a draft from the backbone's hidden state, and the previous token's row of W1 where the config says
    `confidence_with_markov`."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.param("weight", layers.normal_init, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, ())
        # A vector weight stays float32 (see cast_params): this logit is a probability, not a hidden state.
        return jnp.einsum("...D,D->...", x.astype(jnp.float32), weight) + bias
