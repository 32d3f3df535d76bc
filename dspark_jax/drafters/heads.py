"""The sequential head and the confidence head (DSpark): small things that see the token just drafted."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import layers


class MarkovHead(nn.Module):
    """A low-rank transition table: bias over the draft vocabulary = W2 W1[previous token]."""

    vocab_size: int
    head_rows: int
    rank: int

    def setup(self) -> None:
        self.w1 = self.param("w1", layers.normal_init, (self.vocab_size, self.rank))
        self.w2 = self.param("w2", layers.normal_init, (self.head_rows, self.rank))

    def embed(self, previous: jax.Array) -> jax.Array:
        """[...] target ids to [..., r]."""
        return self.w1[previous]

    def bias(self, embedded: jax.Array, ids: jax.Array | None = None) -> jax.Array:
        """[..., r] to float32 logits [..., V] that are added to the backbone's; with `ids`, only theirs [..., K]."""
        if ids is None:
            return layers.linear(embedded, self.w2)
        return jnp.einsum("...r,...Kr->...K", embedded.astype(jnp.float32), self.w2[ids].astype(jnp.float32))


class ConfidenceHead(nn.Module):
    """One logit a draft from the backbone's hidden state and, with a Markov head, the previous token's row of W1."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.param("weight", layers.normal_init, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, ())
        # A vector weight stays float32 (see cast_params): this logit is a probability, not a hidden state.
        return jnp.einsum("...D,D->...", x.astype(jnp.float32), weight) + bias
