"""The one layer of a drafter that drafts token by token (EAGLE-3, MTP): attention and a gated MLP around a residual
stream, where what attention reads may be wider than the stream."""

import flax.linen as nn
import jax

from dspark_jax import layers
from dspark_jax.config import DrafterConfig
from dspark_jax.kv_cache import Cache

_ones = nn.initializers.ones
Table = tuple[jax.Array, jax.Array]
KeyValue = tuple[jax.Array, jax.Array]


class ChainLayer(nn.Module):
    """Attends over cached rows and over the rows of its own block so far. `width` is that of attention's input."""

    config: DrafterConfig
    width: int

    def setup(self) -> None:
        c = self.config
        self.q = self.param("q", layers.normal_init, (c.num_heads, c.head_dim, self.width))
        self.kv = self.param("kv", layers.normal_init, (2, c.num_kv_heads, c.head_dim, self.width))
        if c.qk_norm:
            self.q_norm = self.param("q_norm", _ones, (c.head_dim,))
            self.k_norm = self.param("k_norm", _ones, (c.head_dim,))
        self.o = self.param("o", layers.normal_init, (c.d_model, c.num_heads, c.head_dim))
        self.mlp_norm = self.param("mlp_norm", _ones, (c.d_model,))
        self.gate = self.param("gate", layers.normal_init, (c.d_ff, c.d_model))
        self.up = self.param("up", layers.normal_init, (c.d_ff, c.d_model))
        self.down = self.param("down", layers.normal_init, (c.d_model, c.d_ff))

    def key_value(self, seen: jax.Array, table: Table) -> KeyValue:
        """Rotated keys and values [..., K, H] of attention's input [..., E]."""
        both, c = layers.linear(seen, self.kv), self.config
        k = both[..., 0, :, :]
        if c.qk_norm:
            k = layers.rms_norm(k, self.k_norm, c.norm_eps)
        return layers.rotate(k, table), both[..., 1, :, :]

    def __call__(
        self, x_BA1D: jax.Array, seen_BA1E: jax.Array, table: Table, cache: Cache, own: KeyValue, slot: jax.Array,
        limit_BA: jax.Array,
    ) -> tuple[jax.Array, KeyValue]:  # fmt: skip
        """Row `slot` of every block: it sees cached rows before `limit`, and of its block's rows, whose keys and values
        `own` [B, A, G, K, H] has room for, those up to itself. Gives the stream behind the layer, and `own` with this
        row."""
        c = self.config
        q_BA1NH = layers.linear(seen_BA1E, self.q)
        if c.qk_norm:
            q_BA1NH = layers.rms_norm(q_BA1NH, self.q_norm, c.norm_eps)
        k_BA1KH, v_BA1KH = self.key_value(seen_BA1E, table)
        own = own[0].at[:, :, slot].set(k_BA1KH[:, :, 0]), own[1].at[:, :, slot].set(v_BA1KH[:, :, 0])
        out_BA1NH = cache.attend_block(layers.rotate(q_BA1NH, table), *own, limit_BA, own_limit=slot + 1)
        x_BA1D = x_BA1D + layers.linear(out_BA1NH.reshape(*x_BA1D.shape[:-1], -1), self.o.reshape(c.d_model, -1))
        normed_BA1D = layers.rms_norm(x_BA1D, self.mlp_norm, c.norm_eps)
        return x_BA1D + layers.gated_mlp(normed_BA1D, self.gate, self.up, self.down), own
