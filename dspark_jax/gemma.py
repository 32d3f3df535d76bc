"""The decoder layer of Gemma 3 and Gemma 4 text models (dense): norms before and after attention and MLP.

Gemma 4 beside that normalises values without a scale, leaves scores unscaled, multiplies each layer's output by a
scalar, and in its full layers may take the key projection, before norm and rotation, for the values.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import kv_cache, layers, rotary
from dspark_jax.attention import Rule
from dspark_jax.config import LayerShape, TargetConfig
from dspark_jax.kv_cache import Cache

_ones = nn.initializers.ones
gelu = functools.partial(jax.nn.gelu, approximate=True)


class GemmaBlock(nn.Module):
    """Same call as `target.Block`. Norm scales are held as they multiply (Gemma 3 files hold scale - 1)."""

    config: TargetConfig
    shape: LayerShape

    @nn.compact
    def __call__(self, x_BSD: jax.Array, position_BS: jax.Array, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        c, s = self.config, self.shape
        group, eps = c.num_heads // s.num_kv_heads, c.norm_eps
        parts = group + (1 if s.value_is_key else 2)
        qkv = self.param("qkv", layers.normal_init, (s.num_kv_heads, parts, s.head_dim, c.d_model))
        o = self.param("o", layers.normal_init, (c.d_model, c.num_heads, s.head_dim))
        gate = self.param("gate", layers.normal_init, (c.d_ff, c.d_model))
        up = self.param("up", layers.normal_init, (c.d_ff, c.d_model))
        down = self.param("down", layers.normal_init, (c.d_model, c.d_ff))

        def norm(name: str, x: jax.Array) -> jax.Array:
            return layers.rms_norm(x, self.param(name, _ones, (x.shape[-1],)), eps)

        qkv_BSKJH = layers.linear(norm("attn_norm", x_BSD), qkv)
        q_BSNH = qkv_BSKJH[..., :group, :].reshape(*x_BSD.shape[:2], c.num_heads, s.head_dim)
        k_BSKH, v_BSKH = qkv_BSKJH[..., group, :], qkv_BSKJH[..., -1, :]
        if c.family == "gemma4":
            v_BSKH = value_norm(v_BSKH, eps)
        table = rotary.table(position_BS, s.head_dim, s.rope_theta, s.rope_scaling)
        q_BSNH = layers.rotate(norm("q_norm", q_BSNH), table)
        k_BSKH = layers.rotate(norm("k_norm", k_BSKH), table)
        if cache is None:
            context = kv_cache.from_rows(k_BSKH, v_BSKH, kv_cache.compute_dtype(qkv.dtype))
        else:
            context = cache = cache.append(k_BSKH, v_BSKH, position_BS)
        out_BSNH = context.attend(q_BSNH, position_BS, Rule(c.attention_scale or None, window=s.window))
        attended_BSD = layers.linear(out_BSNH.reshape(*x_BSD.shape[:2], -1), o.reshape(c.d_model, -1))
        x_BSD = x_BSD + norm("post_attn_norm", attended_BSD)

        fed_BSD = layers.gated_mlp(norm("mlp_norm", x_BSD), gate, up, down, gelu)
        x_BSD = x_BSD + norm("post_mlp_norm", fed_BSD)
        if c.family == "gemma4":
            x_BSD = x_BSD * self.param("layer_scalar", _ones, (1,)).astype(jnp.float32).reshape(1, 1, 1)
        return x_BSD, cache


def value_norm(v: jax.Array, eps: float) -> jax.Array:
    """Gemma 4's norm of the values, which has no scale."""
    return layers.rms_norm(v, jnp.ones(v.shape[-1]), eps)
