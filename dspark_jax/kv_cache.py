"""Key/value caches: a pair of arrays a layer, written at positions, rolled back by length alone.

Keys lie transposed, [B, K, H, T]: both products of attention then read their cache in the order it is stored
(twice as fast on a CPU, measured at 1 and 6 queries).

A cache row holds positions 0..T-1 of one sequence. Rolling back needs no write: rows at or beyond a sequence's
length are invisible (`attention` compares indices with lengths) and are overwritten when that position is
computed again. So speculation may write a whole block and commit only a part of it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class LayerCache(NamedTuple):
    k_BKHT: jax.Array
    v_BKTH: jax.Array


def empty(batch: int, num_kv_heads: int, length: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
    """A cache of zeros for `length` positions."""
    return LayerCache(
        jnp.zeros((batch, num_kv_heads, head_dim, length), dtype),
        jnp.zeros((batch, num_kv_heads, length, head_dim), dtype),
    )


def append(cache: LayerCache, k_BSKH: jax.Array, v_BSKH: jax.Array, position_BS: jax.Array) -> LayerCache:
    """Writes S new rows a sequence at their positions; a position beyond the cache is dropped."""
    row_B1 = jnp.arange(position_BS.shape[0])[:, None]
    k_BKHT, v_BKTH = cache
    return LayerCache(
        k_BKHT.at[row_B1, :, :, position_BS].set(k_BSKH.astype(k_BKHT.dtype), mode="drop"),
        v_BKTH.at[row_B1, :, position_BS].set(v_BSKH.astype(v_BKTH.dtype), mode="drop"),
    )


def from_rows(k_BSKH: jax.Array, v_BSKH: jax.Array, dtype: jnp.dtype) -> LayerCache:
    """The cache of a whole sequence at positions 0..S-1."""
    return LayerCache(k_BSKH.astype(dtype).transpose(0, 2, 3, 1), v_BSKH.astype(dtype).swapaxes(1, 2))


def compute_dtype(weight_dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of keys and values beside weights of a dtype: XLA's CPU backend has no batched bfloat16 dot."""
    return jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" else jnp.dtype(weight_dtype)
