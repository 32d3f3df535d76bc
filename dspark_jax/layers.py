"""The four operations every model here is made of. Weights are stored [out, in]; results are float32."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

_THIN = 32  # rows up to which a float32 dot on a CPU is faster turned around


def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [..., in] times w [*out, in]: [..., *out], computed in the dtype of `w`, accumulated and returned in float32.

    Both sides are flattened to two axes first: CPU dots with more axes miss the fast kernels (3-6x slower, measured).
    """
    d_in = x.shape[-1]
    x_MI, w_OI = x.reshape(-1, d_in).astype(w.dtype), w.reshape(-1, d_in)
    if x_MI.shape[0] <= _THIN and (w.dtype, x_MI.shape[0]) != (jnp.float32, 1):
        flat_MO = jax.lax.platform_dependent(x_MI, w_OI, cpu=_thin_dot, default=_dot)
    else:
        flat_MO = _dot(x_MI, w_OI)
    return flat_MO.reshape(*x.shape[:-1], *w.shape[:-1])


def _dot(x_MI: jax.Array, w_OI: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x_MI, w_OI, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _thin_dot(x_MI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """(w x')' for few rows. The CPU kernel streams its left side and packs its right one: a decode step's weights
    are read once this way instead of being repacked (SmolLM2, 2 / 4 / 6 / 16 / 32 rows: 45 / 44 / 60 / 65 / 89 ms
    against 79 / 77 / 81 / 116 / 130, measured). The barriers keep XLA from folding the transposes into the dot."""
    num_rows = x_MI.shape[0]
    if w_OI.dtype != jnp.float32:  # one bfloat16 row alone takes 5 to 10 times as long as four
        return _dot(jnp.pad(x_MI, ((0, max(0, 4 - num_rows)), (0, 0))), w_OI)[:num_rows]
    if num_rows > 8:  # in between, the kernel falls back to a slow one
        x_MI = jnp.pad(x_MI, ((0, -num_rows % 16), (0, 0)))
    x_IM = jax.lax.optimization_barrier(x_MI.T)
    flat_OM = jax.lax.dot_general(w_OI, x_IM, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(flat_OM).T[:num_rows]


def scaled_embedding(table_VD: jax.Array, ids: jax.Array, scale: float) -> jax.Array:
    """Rows of the embedding times `scale`, float32. The factor is rounded to the table's dtype, as in training."""
    rows = table_VD[ids].astype(jnp.float32)
    return rows if scale == 1 else rows * jnp.asarray(scale, table_VD.dtype).astype(jnp.float32)


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    """cap tanh(x / cap); x itself where the cap is 0."""
    return jnp.tanh(x / cap) * cap if cap else x


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, float32. `scale` has the shape of that axis."""
    x = x.astype(jnp.float32)
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + scale.shape)


def rotary_table(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [..., H/2], float32, of integer `positions` [...]."""
    frequency_h = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions[..., None].astype(jnp.float32) * frequency_h.reshape((1,) * positions.ndim + frequency_h.shape)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotary embedding of x [..., N, H] in the half-split form; `table` is [..., H/2] without the head axis."""
    cos, sin = (part[..., None, :] for part in table)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def gated_mlp(
    x: jax.Array,
    gate_FD: jax.Array,
    up_FD: jax.Array,
    down_DF: jax.Array,
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
) -> jax.Array:
    """SwiGLU over the last axis: down(silu(gate x) * up x), or with another activation."""
    return linear(activation(linear(x, gate_FD)) * linear(x, up_FD), down_DF)


normal_init = nn.initializers.normal(0.02)
