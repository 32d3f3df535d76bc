"""The draft layer of Gemma 4 drafters (DeepSpec): Gemma's norms and MLP around the attention of every draft layer."""

import flax.linen as nn
import jax

from dspark_jax import attention, layers
from dspark_jax.config import DrafterConfig
from dspark_jax.gemma import gelu, value_norm
from dspark_jax.kv_cache import Cache

_ones = nn.initializers.ones
Table = tuple[jax.Array, jax.Array]


class GemmaDraftLayer(nn.Module):
    """Same calls as `backbone.DraftLayer`; see gemma.py for what is Gemma's own."""

    config: DrafterConfig
    rule: attention.Rule

    def setup(self) -> None:
        c = self.config
        for name in ("attn_norm", "post_attn_norm", "mlp_norm", "post_mlp_norm"):
            setattr(self, name, self.param(name, _ones, (c.d_model,)))
        self.q = self.param("q", layers.normal_init, (c.num_heads, c.head_dim, c.d_model))
        self.kv = self.param(
            "kv", layers.normal_init, (1 if c.value_is_key else 2, c.num_kv_heads, c.head_dim, c.d_model)
        )
        self.q_norm = self.param("q_norm", _ones, (c.head_dim,))
        self.k_norm = self.param("k_norm", _ones, (c.head_dim,))
        self.o = self.param("o", layers.normal_init, (c.d_model, c.num_heads, c.head_dim))
        self.gate = self.param("gate", layers.normal_init, (c.d_ff, c.d_model))
        self.up = self.param("up", layers.normal_init, (c.d_ff, c.d_model))
        self.down = self.param("down", layers.normal_init, (c.d_model, c.d_ff))
        self.layer_scalar = self.param("layer_scalar", _ones, (1,))

    def key_value(self, x: jax.Array, table: Table) -> tuple[jax.Array, jax.Array]:
        """Rotated keys and normed values of rows x [..., D]."""
        both, eps = layers.linear(x, self.kv), self.config.norm_eps
        k = layers.rms_norm(both[..., 0, :, :], self.k_norm, eps)
        return layers.rotate(k, table), value_norm(both[..., -1, :, :], eps)

    def __call__(self, x_BAGD: jax.Array, table: Table, cache: Cache, limit_BA: jax.Array) -> jax.Array:
        c = self.config
        u_BAGD = layers.rms_norm(x_BAGD, self.attn_norm, c.norm_eps)
        q_BAGNH = layers.rms_norm(layers.linear(u_BAGD, self.q), self.q_norm, c.norm_eps)
        k_BAGKH, v_BAGKH = self.key_value(u_BAGD, table)
        out_BAGNH = cache.attend_block(layers.rotate(q_BAGNH, table), k_BAGKH, v_BAGKH, limit_BA, self.rule)
        attended_BAGD = layers.linear(out_BAGNH.reshape(*x_BAGD.shape[:-1], -1), self.o.reshape(c.d_model, -1))
        x_BAGD = x_BAGD + layers.rms_norm(attended_BAGD, self.post_attn_norm, c.norm_eps)
        normed_BAGD = layers.rms_norm(x_BAGD, self.mlp_norm, c.norm_eps)
        fed_BAGD = layers.gated_mlp(normed_BAGD, self.gate, self.up, self.down, gelu)
        x_BAGD = x_BAGD + layers.rms_norm(fed_BAGD, self.post_mlp_norm, c.norm_eps)
        # A constant of the checkpoint, never trained.
        return x_BAGD * jax.lax.stop_gradient(self.layer_scalar).reshape(1, 1, 1, 1)
