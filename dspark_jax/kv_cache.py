"""Key/value caches: one [B, K, T, H] pair a layer, written at positions, rolled back by length alone.

A cache row holds positions 0..T-1 of one sequence. Rolling back needs no write: rows at or beyond a sequence's
length are invisible (`attention` compares indices with lengths) and are overwritten when that position is
computed again. So speculation may write a whole block and commit only a part of it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class LayerCache(NamedTuple):
    k_BKTH: jax.Array
    v_BKTH: jax.Array


def empty(batch: int, num_kv_heads: int, length: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
    """A cache of zeros for `length` positions."""
    shape = (batch, num_kv_heads, length, head_dim)
    return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def append(cache: LayerCache, k_BSKH: jax.Array, v_BSKH: jax.Array, position_BS: jax.Array) -> LayerCache:
    """Writes S new rows a sequence at their positions; a position beyond the cache is dropped."""
    row_B1 = jnp.arange(position_BS.shape[0])[:, None]

    def write(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[row_B1, :, position_BS].set(new.astype(old.dtype), mode="drop")

    return LayerCache(write(cache.k_BKTH, k_BSKH), write(cache.v_BKTH, v_BSKH))
