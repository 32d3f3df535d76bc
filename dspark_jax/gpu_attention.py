"""Attention over pages on NVIDIA GPUs: the fused attention of cuDNN, through `jax.nn.dot_product_attention`.

JAX offers no paged form of it publicly, so each request's pages are first gathered side by side, in the width of the
page table: one copy of a layer's share of the cache, then one kernel, where the walk over pages of `attention.py`
launches several for each page. Contexts, windows and the rows of a draft block are told by a mask, since cuDNN's own
causal mask begins at the first key and its window needs that mask; lengths let it leave out what lies behind a
request's last key.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dspark_jax.attention import DEFAULT, Rule, own_visible


def takes(dtype: jnp.dtype, head_dim: int, rule: Rule) -> bool:
    """Whether cuDNN can do this attention; the walk over pages does the rest.

    Its dtypes are float16 and bfloat16, so float32 caches stay in XLA. Heads are a multiple of 8, up to 128 (256 from
    Hopper on, which is not known before there is a GPU). It knows no soft cap of scores.
    """
    return dtype in (jnp.bfloat16, jnp.float16) and head_dim % 8 == 0 and head_dim <= 128 and not rule.softcap


def arguments(
    q_RSNH: jax.Array,
    k_PKHp: jax.Array,
    v_PKpH: jax.Array,
    page_table_RN: jax.Array,
    limit_RS: jax.Array,
    own: tuple[jax.Array, jax.Array] | None,
    rule: Rule,
    own_limit: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """What `attention.paged_attention` is given, as `jax.nn.dot_product_attention` takes it.

    A draft block's own rows come before the context: behind the longest context nothing then is visible.
    """
    (num_requests, num_rows, _, head_dim), dtype = q_RSNH.shape, k_PKHp.dtype
    k_RNKHp, v_RNKpH = k_PKHp[page_table_RN], v_PKpH[page_table_RN]  # where a request has no page: some page, unseen
    k_RTKH = k_RNKHp.transpose(0, 1, 4, 2, 3).reshape(num_requests, -1, k_PKHp.shape[1], head_dim)
    v_RTKH = v_RNKpH.transpose(0, 1, 3, 2, 4).reshape(k_RTKH.shape)
    key_T, row_RS = jnp.arange(k_RTKH.shape[1])[None, None, :], limit_RS - 1
    if own is not None:
        row_RS = limit_RS + jnp.arange(num_rows)[None, :]
    visible_RST = key_T < limit_RS[:, :, None]
    if rule.window:
        visible_RST &= key_T > row_RS[:, :, None] - rule.window
    length_R = jnp.max(limit_RS, axis=1)
    if own is not None:
        k_RTKH, v_RTKH = (
            jnp.concatenate([mine.astype(dtype), context], axis=1)
            for mine, context in zip(own, (k_RTKH, v_RTKH), strict=True)
        )
        num_own = own[0].shape[1]
        mine_GU = own_visible(num_rows, num_own, rule, own_limit)
        mine_GU = jnp.ones((num_rows, num_own), bool) if mine_GU is None else mine_GU
        mine_RGU = jnp.broadcast_to(mine_GU[None], (num_requests, num_rows, num_own))
        visible_RST, length_R = jnp.concatenate([mine_RGU, visible_RST], axis=-1), length_R + num_own
    return {
        "query": q_RSNH.astype(dtype),
        "key": k_RTKH,
        "value": v_RTKH,
        "mask": visible_RST[:, None],
        "key_value_seq_lengths": jnp.maximum(length_R, 1).astype(jnp.int32),
    }


def paged_attention(
    q_RSNH: jax.Array,
    k_PKHp: jax.Array,
    v_PKpH: jax.Array,
    page_table_RN: jax.Array,
    limit_RS: jax.Array,
    own: tuple[jax.Array, jax.Array] | None = None,
    rule: Rule = DEFAULT,
    own_limit: jax.Array | None = None,
) -> jax.Array:
    """As `attention.paged_attention`; every device of a mesh attends with its own heads."""
    given = arguments(q_RSNH, k_PKHp, v_PKpH, page_table_RN, limit_RS, own, rule, own_limit)
    attend: Any = functools.partial(jax.nn.dot_product_attention, scale=rule.scale, implementation="cudnn")

    def kernel(given: dict[str, jax.Array]) -> jax.Array:
        return attend(**given)

    if not jax.sharding.get_abstract_mesh().empty:
        heads, whole = PartitionSpec(None, None, "tensor", None), PartitionSpec()
        split = {name: heads if name in ("query", "key", "value") else whole for name in given}
        kernel = jax.shard_map(kernel, in_specs=(split,), out_specs=heads, check_vma=False)
    seen_RS11 = jnp.any(given["mask"][:, 0], axis=-1)[..., None, None]
    return jnp.where(seen_RS11, kernel(given).astype(jnp.float32), 0)
