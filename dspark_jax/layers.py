"""The four operations every model here is made of. Weights are stored [out, in]; results are float32."""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

_TILE = 64
_THIN = 32  # rows up to which a float32 dot on a CPU is faster turned around


def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [..., in] times w [*out, in]: [..., *out], computed in the dtype of `w`, accumulated and returned in float32.

    Both sides are flattened to two axes first: CPU dots with more axes miss the fast kernels (3-6x slower, measured).
    Its gradients are computed in the dtype of `w` too, and no gradient is computed that nobody asks for.
    """
    d_in = x.shape[-1]
    flat_MO = _flat_linear(x.reshape(-1, d_in), w.reshape(-1, d_in))
    return flat_MO.reshape(*x.shape[:-1], *w.shape[:-1])


@jax.custom_vjp
def _flat_linear(x_MI: jax.Array, w_OI: jax.Array) -> jax.Array:
    x_MI = x_MI.astype(w_OI.dtype)
    if x_MI.shape[0] <= _THIN and (w_OI.dtype, x_MI.shape[0]) != (jnp.float32, 1):
        return jax.lax.platform_dependent(x_MI, w_OI, cpu=_thin_dot, default=_dot)
    return _dot(x_MI, w_OI)


def _keep_for_gradients(x: CustomVJPPrimal, w: CustomVJPPrimal) -> tuple[jax.Array, tuple[Any, Any, Any]]:
    """Only what the gradients that are asked for need: a frozen weight's is the largest product of a training step.
    The array of no elements carries the dtype of x."""
    x_MI, w_OI = x.value, w.value
    kept = x_MI.astype(w_OI.dtype) if w.perturbed else None, w_OI if x.perturbed else None
    return _flat_linear(x_MI, w_OI), (*kept, jnp.zeros((0,), x_MI.dtype))


def _linear_gradients(kept: tuple[Any, Any, Any], of_MO: jax.Array) -> tuple[Any, Any]:
    """A cotangent is rounded to the dtype of the weights before its products: a dot of float32 with bfloat16 runs as
    slowly as one of float32 alone."""
    x_MI, w_OI, like = kept
    of_x, of_w = None, None
    if isinstance(of_MO, SymbolicZero):
        return of_x, of_w
    if w_OI is not None:
        of_x = _product(of_MO.astype(w_OI.dtype), w_OI, (1, 0)).astype(like.dtype)
    if x_MI is not None:
        of_w = jax.lax.platform_dependent(
            of_MO.astype(x_MI.dtype), x_MI, cpu=_weight_gradient_on_cpu, default=_weight_gradient
        ).astype(x_MI.dtype)
    return of_x, of_w


_flat_linear.defvjp(_keep_for_gradients, _linear_gradients, symbolic_zeros=True)


def _weight_gradient(of_MO: jax.Array, x_MI: jax.Array) -> jax.Array:
    return _product(of_MO, x_MI, (0, 0))


def _weight_gradient_on_cpu(of_MO: jax.Array, x_MI: jax.Array) -> jax.Array:
    """XLA folds a plain transpose into the dot and computes that in float32, four times as slowly as a bfloat16 dot of
    untransposed sides (150 against 650 GFLOP/s, measured); a transpose by tiles it leaves alone."""
    num_rows, num_out = of_MO.shape
    tile_m, tile_o = math.gcd(num_rows, _TILE), math.gcd(num_out, _TILE)
    if of_MO.dtype != jnp.bfloat16 or min(tile_m, tile_o) == 1:
        return _weight_gradient(of_MO, x_MI)
    tiles = of_MO.reshape(num_rows // tile_m, tile_m, num_out // tile_o, tile_o).transpose(2, 0, 3, 1)
    of_OM = jax.lax.optimization_barrier(tiles.transpose(0, 2, 1, 3).reshape(num_out, num_rows))
    return _product(of_OM, x_MI, (1, 0))


def _product(left: jax.Array, right: jax.Array, contracted: tuple[int, int]) -> jax.Array:
    """Of two matrices, over one axis of each, in float32."""
    axes = ((contracted[0],), (contracted[1],)), ((), ())
    return jax.lax.dot_general(left, right, axes, preferred_element_type=jnp.float32)


def _dot(x_MI: jax.Array, w_OI: jax.Array) -> jax.Array:
    return _product(x_MI, w_OI, (1, 1))


def _thin_dot(x_MI: jax.Array, w_OI: jax.Array) -> jax.Array:
    """(w x')' for few rows. The CPU kernel streams its left side and packs its right one: a decode step's weights
    are read once this way instead of being repacked (SmolLM2, 2 / 4 / 6 / 16 / 32 rows: 45 / 44 / 60 / 65 / 89 ms
    against 79 / 77 / 81 / 116 / 130, measured). The barriers keep XLA from folding the transposes into the dot."""
    num_rows = x_MI.shape[0]
    if w_OI.dtype != jnp.float32:  # one bfloat16 row alone takes 5 to 10 times as long as four
        return _dot(jnp.pad(x_MI, ((0, max(0, 4 - num_rows)), (0, 0))), w_OI)[:num_rows]
    # In between, the kernel falls back to a slow one: 6 rows take 1.3 times as long as 8, and 12 rows as 16.
    full = -num_rows % (16 if num_rows > 8 else 8 if num_rows > 4 else 1)
    x_MI = jnp.pad(x_MI, ((0, full), (0, 0)))
    x_IM = jax.lax.optimization_barrier(x_MI.T)
    flat_OM = jax.lax.dot_general(w_OI, x_IM, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(flat_OM).T[:num_rows]


def rows_of(table_VD: jax.Array, ids: jax.Array) -> jax.Array:
    """Rows [..., D] of a table [V, D], in its dtype.

    XLA's CPU backend gathers no bfloat16: it widens the table to float32 first. In a loop it did so for the whole
    table before the first step (five lookups of 8 rows in SmolLM2's embedding: 17 ms, measured); behind a barrier
    that the ids pass too, only what is looked up is widened (0.15 ms).
    """
    if table_VD.dtype != jnp.bfloat16:
        return table_VD[ids]
    return jax.lax.platform_dependent(table_VD, ids, cpu=_rows_on_cpu, default=lambda table, ids: table[ids])


def _rows_on_cpu(table_VD: jax.Array, ids: jax.Array) -> jax.Array:
    table_VD, ids = jax.lax.optimization_barrier((table_VD, ids))
    return table_VD[ids]


def scaled_embedding(table_VD: jax.Array, ids: jax.Array, scale: float) -> jax.Array:
    """Rows of the embedding times `scale`, float32. The factor is rounded to the table's dtype, as in training."""
    rows = rows_of(table_VD, ids).astype(jnp.float32)
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
