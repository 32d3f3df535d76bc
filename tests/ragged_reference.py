"""What the TPU kernel computes, in plain jax that can be traced on a CPU, rows without a request left as NaN."""

from typing import Any

import jax
import jax.numpy as jnp


def attention(
    q_TNH: jax.Array, kv_PpCH: jax.Array, kv_lens_R: jax.Array, table_RN: jax.Array, first_Q: jax.Array,
    num_seqs_1: jax.Array, *, sm_scale: float, sliding_window: int | None, soft_cap: float | None, **_: Any,
) -> jax.Array:  # fmt: skip
    """Takes the arguments of `ragged_paged_attention`; its block sizes mean nothing here."""
    num_tokens, num_heads, _ = q_TNH.shape
    token_T = jnp.arange(num_tokens)
    row_T = jnp.sum(token_T[:, None] >= first_Q[None, 1:], axis=1)
    known_T = row_T < num_seqs_1[0]
    row_T = jnp.where(known_T, row_T, 0)
    position_T = kv_lens_R[row_T] - first_Q[row_T + 1] + token_T
    kv_TCxH = kv_PpCH[table_RN[row_T]].reshape(num_tokens, -1, *kv_PpCH.shape[2:])
    k_TxNH, v_TxNH = (jnp.repeat(kv_TCxH[:, :, i::2], num_heads * 2 // kv_PpCH.shape[2], axis=2) for i in (0, 1))
    scores_TNx = jnp.einsum("TNH,TxNH->TNx", q_TNH, k_TxNH) * sm_scale
    if soft_cap:
        scores_TNx = soft_cap * jnp.tanh(scores_TNx / soft_cap)
    key_1x = jnp.arange(k_TxNH.shape[1])[None, :]
    visible_Tx = key_1x <= position_T[:, None]
    if sliding_window:
        visible_Tx &= key_1x > position_T[:, None] - sliding_window
    weights_TNx = jax.nn.softmax(jnp.where(visible_Tx[:, None], scores_TNx, -1e30), axis=-1)
    out_TNH = jnp.einsum("TNx,TxNH->TNH", weights_TNx, v_TxNH).astype(q_TNH.dtype)
    return jnp.where(known_T[:, None, None], out_TNH, jnp.nan)
