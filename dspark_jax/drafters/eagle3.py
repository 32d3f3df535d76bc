"""EAGLE-3 (Li et al. 2025), as DeepSpec trains it: what its rows read and what they feed back.

A row joins a feature of the target with the token after it. Attention reads both, each after its norm, embedding
first; the residual stream is the feature alone. Behind the first step the feature is the drafter's own stream before
the final norm.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import layers
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters.base import Committed
from dspark_jax.drafters.chain_layer import ChainLayer

_ones = nn.initializers.ones


class Eagle3Cell(nn.Module):
    """See chain_model.Cell."""

    config: DrafterConfig

    def setup(self) -> None:
        c = self.config
        self.fc = self.param("fc", layers.normal_init, (c.d_model, len(c.target_layer_ids), c.d_model))
        self.embed_norm = self.param("embed_norm", _ones, (c.d_model,))
        self.hidden_norm = self.param("hidden_norm", _ones, (c.d_model,))
        self.layers = [ChainLayer(c, 2 * c.d_model)]
        self.norm = self.param("norm", _ones, (c.d_model,))

    def feature(self, committed: Committed) -> jax.Array:
        """The tapped layers fused."""
        taps_BSE = committed.taps_BSMD.reshape(*committed.taps_BSMD.shape[:2], -1)
        return layers.linear(taps_BSE, self.fc.reshape(self.config.d_model, -1))

    def enter(self, embedded: jax.Array, feature: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = self.config
        normed = layers.rms_norm(feature, self.hidden_norm, c.norm_eps)
        seen = jnp.concatenate([layers.rms_norm(embedded, self.embed_norm, c.norm_eps), normed], axis=-1)
        return normed if c.norm_before_residual else feature.astype(jnp.float32), seen

    def leave(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x, layers.rms_norm(x, self.norm, self.config.norm_eps)
