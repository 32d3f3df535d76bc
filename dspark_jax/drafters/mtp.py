"""Multi-token prediction (DeepSeek-V3, section 2.2), used again for every further token: what its rows read and what
they feed back.

A row joins the target's last hidden state with the token after it: both normed, embedding first, projected to the
model's width, then one full decoder layer. What is fed back is the output after the final norm, which is also what
the head reads.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import layers
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters.base import Committed
from dspark_jax.drafters.chain_layer import ChainLayer

_ones = nn.initializers.ones


class MTPCell(nn.Module):
    """See chain_model.Cell."""

    config: DrafterConfig

    def setup(self) -> None:
        c = self.config
        self.fc = self.param("fc", layers.normal_init, (c.d_model, 2, c.d_model))
        for name in ("embed_norm", "hidden_norm", "attn_norm", "norm"):
            setattr(self, name, self.param(name, _ones, (c.d_model,)))
        self.layers = [ChainLayer(c, c.d_model)]

    def feature(self, committed: Committed) -> jax.Array:
        """The target's hidden state after its final norm."""
        return committed.hidden_BSD

    def enter(self, embedded: jax.Array, feature: jax.Array) -> tuple[jax.Array, jax.Array]:
        eps = self.config.norm_eps
        both = (layers.rms_norm(embedded, self.embed_norm, eps), layers.rms_norm(feature, self.hidden_norm, eps))
        x = layers.linear(jnp.concatenate(both, axis=-1), self.fc.reshape(self.config.d_model, -1))
        return x, layers.rms_norm(x, self.attn_norm, eps)

    def leave(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = layers.rms_norm(x, self.norm, self.config.norm_eps)
        return hidden, hidden
