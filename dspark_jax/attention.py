"""Attention over cached keys: the XLA reference. Visibility is given by limits, never by a stored [.., S, S] mask."""

import jax
import jax.numpy as jnp

# Finite, so that a row that sees nothing stays a number: its weights are uniform and nobody reads its output.
_HIDDEN = -1e30


def _grouped(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """[..., N, H] -> [..., K, N/K, H]: query head n reads key/value head n // (N/K)."""
    *lead, num_heads, head_dim = q.shape
    return q.reshape(*lead, num_kv_heads, num_heads // num_kv_heads, head_dim)


def causal_attention(q_BSNH: jax.Array, k_BKHT: jax.Array, v_BKTH: jax.Array, position_BS: jax.Array) -> jax.Array:
    """Softmax attention of S new rows over T keys, key t being visible to a row at position p when t <= p.

    The result is [B, S, N, H], float32. Keys beyond a row's position may hold anything finite.
    """
    _, num_kv_heads, head_dim, num_keys = k_BKHT.shape
    q_BSKJH = _grouped(q_BSNH, num_kv_heads).astype(k_BKHT.dtype)
    scores = jnp.einsum("BSKJH,BKHT->BKJST", q_BSKJH, k_BKHT, preferred_element_type=jnp.float32)
    visible_BST = jnp.arange(num_keys)[None, None, :] <= position_BS[:, :, None]
    scores = jnp.where(visible_BST[:, None, None], scores * head_dim**-0.5, _HIDDEN)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BKTH.dtype)
    out = jnp.einsum("BKJST,BKTH->BSKJH", weights, v_BKTH, preferred_element_type=jnp.float32)
    return out.reshape(q_BSNH.shape)


def block_attention(
    q_BAGNH: jax.Array,
    context_k_BKHT: jax.Array,
    context_v_BKTH: jax.Array,
    block_k_BAGKH: jax.Array,
    block_v_BAGKH: jax.Array,
    limit_BA: jax.Array,
) -> jax.Array:
    """Draft attention (DSpark, backbone): the rows of a block see context keys t < limit and all of their own block.

    A blocks share one context. `limit` is the anchor's position: the target's feature of the anchor itself does
    not exist yet when the block is drafted, so it stays invisible in training too. Result [B, A, G, N, H], float32.
    """
    _, num_kv_heads, head_dim, num_keys = context_k_BKHT.shape
    q_BAGKJH = _grouped(q_BAGNH, num_kv_heads).astype(context_k_BKHT.dtype)
    block_k_BAGKH, block_v_BAGKH = (x.astype(context_k_BKHT.dtype) for x in (block_k_BAGKH, block_v_BAGKH))
    context = jnp.einsum("BAGKJH,BKHT->BKJAGT", q_BAGKJH, context_k_BKHT, preferred_element_type=jnp.float32)
    own = jnp.einsum("BAGKJH,BAUKH->BKJAGU", q_BAGKJH, block_k_BAGKH, preferred_element_type=jnp.float32)
    visible_BAT = jnp.arange(num_keys)[None, None, :] < limit_BA[:, :, None]
    context = jnp.where(visible_BAT[:, None, None, :, None], context, _HIDDEN)
    weights = jax.nn.softmax(jnp.concatenate([context, own], axis=-1) * head_dim**-0.5, axis=-1)
    weights = weights.astype(context_v_BKTH.dtype)
    out = jnp.einsum("BKJAGT,BKTH->BAGKJH", weights[..., :num_keys], context_v_BKTH, preferred_element_type=jnp.float32)
    out += jnp.einsum(
        "BKJAGU,BAUKH->BAGKJH", weights[..., num_keys:], block_v_BAGKH, preferred_element_type=jnp.float32
    )
    return out.reshape(q_BAGNH.shape)
