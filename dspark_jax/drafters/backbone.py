"""The block-parallel backbone (DFlash): one pass gives every position of a draft.

Features of the target's committed tokens are fused once into context rows and injected into every layer as extra
keys and values. Context rows have no queries and never change between layers, so their keys and values are computed
when a token is committed and cached for ever; a draft pass costs the rows of its block only.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import attention, layers, rotary
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters.conv import BlockConv
from dspark_jax.drafters.gemma_layer import GemmaDraftLayer
from dspark_jax.kv_cache import Cache

_ones = nn.initializers.ones

# Keys and values of one layer, [..., K, H] each.
KeyValue = tuple[jax.Array, jax.Array]
Table = tuple[jax.Array, jax.Array]


class DraftLayer(nn.Module):
    """Pre-norm block whose queries come from block rows and whose keys come from context and block rows."""

    config: DrafterConfig
    rule: attention.Rule

    def setup(self) -> None:
        c = self.config
        self.attn_norm = self.param("attn_norm", _ones, (c.d_model,))
        self.q = self.param("q", layers.normal_init, (c.num_heads, c.head_dim, c.d_model))
        self.kv = self.param("kv", layers.normal_init, (2, c.num_kv_heads, c.head_dim, c.d_model))
        self.q_norm = self.param("q_norm", _ones, (c.head_dim,))
        self.k_norm = self.param("k_norm", _ones, (c.head_dim,))
        self.o = self.param("o", layers.normal_init, (c.d_model, c.num_heads, c.head_dim))
        self.mlp_norm = self.param("mlp_norm", _ones, (c.d_model,))
        self.gate = self.param("gate", layers.normal_init, (c.d_ff, c.d_model))
        self.up = self.param("up", layers.normal_init, (c.d_ff, c.d_model))
        self.down = self.param("down", layers.normal_init, (c.d_model, c.d_ff))

    def key_value(self, x: jax.Array, table: Table) -> KeyValue:
        """Rotated keys and values of rows x [..., D]. The same weights serve context and block rows."""
        both = layers.linear(x, self.kv)
        k = layers.rms_norm(both[..., 0, :, :], self.k_norm, self.config.norm_eps)
        return layers.rotate(k, table), both[..., 1, :, :]

    def attend(self, u_BAGD: jax.Array, table: Table, cache: Cache, limit_BA: jax.Array) -> jax.Array:
        """What normed block rows take from the context before `limit` and from each other."""
        c = self.config
        q_BAGNH = layers.rms_norm(layers.linear(u_BAGD, self.q), self.q_norm, c.norm_eps)
        k_BAGKH, v_BAGKH = self.key_value(u_BAGD, table)
        out_BAGNH = cache.attend_block(layers.rotate(q_BAGNH, table), k_BAGKH, v_BAGKH, limit_BA, self.rule)
        return layers.linear(out_BAGNH.reshape(*u_BAGD.shape[:-1], -1), self.o.reshape(c.d_model, -1))

    def feed_forward(self, u_BAGD: jax.Array) -> jax.Array:
        return layers.gated_mlp(u_BAGD, self.gate, self.up, self.down)

    def __call__(self, x_BAGD: jax.Array, table: Table, cache: Cache, limit_BA: jax.Array) -> jax.Array:
        eps = self.config.norm_eps
        x_BAGD = x_BAGD + self.attend(layers.rms_norm(x_BAGD, self.attn_norm, eps), table, cache, limit_BA)
        return x_BAGD + self.feed_forward(layers.rms_norm(x_BAGD, self.mlp_norm, eps))


class ConvDraftLayer(DraftLayer):
    """DFlash 2's: a convolution along the block around attention and around the MLP. Context rows have none."""

    def setup(self) -> None:
        super().setup()
        self.attention_conv, self.mlp_conv = BlockConv(self.config), BlockConv(self.config)

    def attend(self, u_BAGD: jax.Array, table: Table, cache: Cache, limit_BA: jax.Array) -> jax.Array:
        plain = super().attend
        return self.attention_conv(u_BAGD, lambda rows_BAGD: plain(rows_BAGD, table, cache, limit_BA))

    def feed_forward(self, u_BAGD: jax.Array) -> jax.Array:
        return self.mlp_conv(u_BAGD, super().feed_forward)


def layer_class(config: DrafterConfig) -> Any:
    """The draft layer of a config: a module of a config and a rule."""
    if config.family == "gemma4":
        return GemmaDraftLayer
    return ConvDraftLayer if config.conv_group_size else DraftLayer


def layer_rules(config: DrafterConfig) -> list[attention.Rule]:
    """How each draft layer attends."""
    windows = config.layer_windows or (0,) * config.num_layers
    causal = config.layer_causal or (False,) * config.num_layers
    scale = 1.0 if config.family == "gemma4" else None
    return [attention.Rule(scale, window=w, causal_block=c) for w, c in zip(windows, causal, strict=True)]


class Backbone(nn.Module):
    """Context rows to per-layer keys and values; block rows to hidden states after the final norm."""

    config: DrafterConfig

    def setup(self) -> None:
        c = self.config
        self.fc = self.param("fc", layers.normal_init, (c.d_model, len(c.target_layer_ids), c.d_model))
        self.hidden_norm = self.param("hidden_norm", _ones, (c.d_model,))
        self.layers = [layer_class(c)(c, rule) for rule in layer_rules(c)]
        self.norm = self.param("norm", _ones, (c.d_model,))

    def fuse(self, taps_BSMD: jax.Array) -> jax.Array:
        """Context rows [B, S, D] of target features [B, S, M, D]."""
        c = self.config
        taps_BSE = taps_BSMD.reshape(*taps_BSMD.shape[:2], -1)
        return layers.rms_norm(layers.linear(taps_BSE, self.fc.reshape(c.d_model, -1)), self.hidden_norm, c.norm_eps)

    def context(self, taps_BSMD: jax.Array, position_BS: jax.Array) -> list[KeyValue]:
        """Per layer the keys and values [B, S, K, H] of target features [B, S, M, D] at their positions."""
        c = self.config
        fused_BSD = self.fuse(taps_BSMD)
        table = rotary.table(position_BS, c.head_dim, c.rope_theta, c.rope_scaling)
        return [layer.key_value(fused_BSD, table) for layer in self.layers]

    def block(self, embedded_BAGD: jax.Array, anchor_BA: jax.Array, caches: Sequence[Cache]) -> jax.Array:
        """Hidden states [B, A, G, D] of blocks that start at `anchor` and see context strictly before it."""
        c = self.config
        position_BAG = anchor_BA[:, :, None] + jnp.arange(embedded_BAGD.shape[2])[None, None, :]
        table = rotary.table(position_BAG, c.head_dim, c.rope_theta, c.rope_scaling)
        x_BAGD = embedded_BAGD.astype(jnp.float32)
        for layer, cache in zip(self.layers, caches, strict=True):
            x_BAGD = layer(x_BAGD, table, cache, anchor_BA)
        return layers.rms_norm(x_BAGD, self.norm, c.norm_eps)
