"""Attention over cached keys, in XLA. Visibility is given by limits, never by a stored [.., S, S] mask (the kernel of
tpu_attention.py makes one of booleans from the same limits).

Two forms of the same arithmetic: `causal_attention` and `block_attention` read a dense cache at once; `paged_attention`
walks over pages with a running softmax, so its memory follows one page and its time the longest context in the batch.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Finite, so that a row that sees nothing stays a number: its weights are uniform and nobody reads its output.
_HIDDEN = -1e30


class Rule(NamedTuple):
    """How a layer attends, static. Scores are q k * `scale` (None: head size ** -0.5), then, with `softcap` c > 0,
    c tanh(scores / c). With `window` w > 0 a row at position p sees keys at positions above p - w only.
    `causal_block`: the rows of a draft block see each other causally; otherwise all see all."""

    scale: float | None = None
    softcap: float = 0.0
    window: int = 0
    causal_block: bool = False

    def scale_of(self, head_dim: int) -> float:
        """What products of queries and keys are multiplied by."""
        return head_dim**-0.5 if self.scale is None else self.scale


DEFAULT = Rule()


def grouped(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """[..., N, H] -> [..., K, N/K, H]: query head n reads key/value head n // (N/K)."""
    *lead, num_heads, head_dim = q.shape
    return q.reshape(*lead, num_kv_heads, num_heads // num_kv_heads, head_dim)


def _rows_times(rows_BKXI: jax.Array, table_BKIO: jax.Array) -> jax.Array:
    """Rows [B, K, ..., I] times one table [B, K, I, O] for each key/value head, float32. Rows stay rows: an einsum may
    turn the product around, and then every array of scores is transposed twice (measured on a CPU)."""
    shape = rows_BKXI.shape
    flat_BKRI = rows_BKXI.reshape(*shape[:2], -1, shape[-1])
    flat_BKRO = jnp.matmul(flat_BKRI, table_BKIO, preferred_element_type=jnp.float32)
    return flat_BKRO.reshape(*shape[:-1], table_BKIO.shape[-1])


def _score(raw: jax.Array, rule: Rule, head_dim: int) -> jax.Array:
    scores = raw * rule.scale_of(head_dim)
    return jnp.tanh(scores / rule.softcap) * rule.softcap if rule.softcap else scores


def causal_attention(
    q_BSNH: jax.Array,
    k_BKHT: jax.Array,
    v_BKTH: jax.Array,
    position_BS: jax.Array,
    rule: Rule = DEFAULT,
    start_BS: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention of S new rows over T keys, key t being visible to a row at position p when t <= p.

    The result is [B, S, N, H], float32. Keys beyond a row's position may hold anything finite. Where a row's document
    begins at key `start`, its keys are t >= start and positions count from there.
    """
    _, num_kv_heads, head_dim, num_keys = k_BKHT.shape
    q_BKJSH = grouped(q_BSNH, num_kv_heads).astype(k_BKHT.dtype).transpose(0, 2, 3, 1, 4)
    scores = _rows_times(q_BKJSH, k_BKHT)
    key_T, row_BS1 = jnp.arange(num_keys)[None, None, :], position_BS[:, :, None]
    if start_BS is not None:
        key_T = key_T - start_BS[:, :, None]
    visible_BST = key_T <= row_BS1 if start_BS is None else (key_T <= row_BS1) & (key_T >= 0)
    if rule.window:
        visible_BST &= key_T > row_BS1 - rule.window
    scores = jnp.where(visible_BST[:, None, None], _score(scores, rule, head_dim), _HIDDEN)
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    out = _rows_times(weights.astype(v_BKTH.dtype), v_BKTH)
    # Divided here and not where there are T weights a row.
    return (out / jnp.sum(weights, axis=-1, keepdims=True)).transpose(0, 3, 1, 2, 4).reshape(q_BSNH.shape)


def own_visible(num_rows: int, num_own: int, rule: Rule, own_limit: jax.Array | None) -> jax.Array | None:
    """Which rows u of its own block a row g of a draft block sees, [G, U] or [1, U]; None: all of them."""
    if own_limit is not None:
        return jnp.arange(num_own)[None, :] < own_limit
    row_G1, row_1U = jnp.arange(num_rows)[:, None], jnp.arange(num_rows)[None, :]
    if rule.causal_block:
        visible_GU = row_1U <= row_G1
        return visible_GU & (row_1U > row_G1 - rule.window) if rule.window else visible_GU
    return jnp.abs(row_G1 - row_1U) < rule.window if 0 < rule.window < num_rows else None


def context_visible(
    num_rows: int, num_keys: int, limit_BA: jax.Array, start_BA: jax.Array | None, rule: Rule
) -> jax.Array:
    """Which context keys t a row g of a draft block sees, [B, A, G, T] or [B, A, 1, T]; see `block_attention`."""
    key_T = jnp.arange(num_keys)[None, None, None, :]
    if start_BA is not None:
        key_T = key_T - start_BA[:, :, None, None]
    visible_BAGT = key_T < limit_BA[:, :, None, None]
    if start_BA is not None:
        visible_BAGT = visible_BAGT & (key_T >= 0)
    if rule.window:
        row_BAG1 = (limit_BA[:, :, None] + jnp.arange(num_rows)[None, None, :])[..., None]
        visible_BAGT = visible_BAGT & (key_T > row_BAG1 - rule.window)
    return visible_BAGT


def block_attention(
    q_BAGNH: jax.Array,
    context_k_BKHT: jax.Array,
    context_v_BKTH: jax.Array,
    block_k_BAGKH: jax.Array,
    block_v_BAGKH: jax.Array,
    limit_BA: jax.Array,
    rule: Rule = DEFAULT,
    start_BA: jax.Array | None = None,
    own_limit: jax.Array | None = None,
) -> jax.Array:
    """Draft attention (DSpark, backbone): the rows of a block see context keys t < limit and all of their own block.

    A blocks share one context. `limit` is the anchor's position: the target's feature of the anchor itself does
    not exist yet when the block is drafted, so it stays invisible in training too. Result [B, A, G, N, H], float32.
    Where a block's document begins at key `start`, its keys are t >= start and `limit` counts from there.
    A block that grows row by row asks with its newest row alone, over room for U keys of its own; `own_limit` then says
    how many of them are there.
    """
    _, num_kv_heads, head_dim, num_keys = context_k_BKHT.shape
    num_rows = q_BAGNH.shape[2]
    q_BAGKJH = grouped(q_BAGNH, num_kv_heads).astype(context_k_BKHT.dtype)
    block_k_BAGKH, block_v_BAGKH = (x.astype(context_k_BKHT.dtype) for x in (block_k_BAGKH, block_v_BAGKH))
    context = _rows_times(q_BAGKJH.transpose(0, 3, 4, 1, 2, 5), context_k_BKHT)
    own = jnp.einsum("BAGKJH,BAUKH->BKJAGU", q_BAGKJH, block_k_BAGKH, preferred_element_type=jnp.float32)
    visible_BAGT = context_visible(num_rows, num_keys, limit_BA, start_BA, rule)
    context = jnp.where(visible_BAGT[:, None, None], _score(context, rule, head_dim), _HIDDEN)
    own, visible_GU = _score(own, rule, head_dim), own_visible(num_rows, own.shape[-1], rule, own_limit)
    if visible_GU is not None:
        own = jnp.where(visible_GU[None, None, None, None], own, _HIDDEN)
    # One softmax over both parts without joining them: a copy of all scores, and an odd number of keys, cost more.
    largest = jnp.maximum(jnp.max(context, axis=-1), jnp.max(own, axis=-1))
    largest = jax.lax.stop_gradient(largest)[..., None]
    context, own = jnp.exp(context - largest), jnp.exp(own - largest)
    dtype, total = context_v_BKTH.dtype, jnp.sum(context, axis=-1) + jnp.sum(own, axis=-1)
    out = _rows_times(context.astype(dtype), context_v_BKTH)
    out += jnp.einsum("BKJAGU,BAUKH->BKJAGH", own.astype(dtype), block_v_BAGKH, preferred_element_type=jnp.float32)
    return (out / total[..., None]).transpose(0, 3, 4, 1, 2, 5).reshape(q_BAGNH.shape)


class _Running(NamedTuple):
    """A softmax under way: largest score, sum of weights, weighted values."""

    largest_RKJS: jax.Array
    sum_RKJS: jax.Array
    out_RKJSH: jax.Array


def _advance(running: _Running, scores_RKJSp: jax.Array, v_RKpH: jax.Array) -> _Running:
    """Takes in one more stretch of keys (the online softmax of FlashAttention, Dao et al. 2022)."""
    largest = jnp.maximum(running.largest_RKJS, jnp.max(scores_RKJSp, axis=-1))
    old, new = jnp.exp(running.largest_RKJS - largest), jnp.exp(scores_RKJSp - largest[..., None])
    out = jnp.einsum("RKJSp,RKpH->RKJSH", new.astype(v_RKpH.dtype), v_RKpH, preferred_element_type=jnp.float32)
    return _Running(largest, running.sum_RKJS * old + jnp.sum(new, axis=-1), running.out_RKJSH * old[..., None] + out)


PageReader = Callable[
    [jax.Array], tuple[jax.Array, jax.Array]
]  # pages of R requests: keys [R, K, H, p], values [R, K, p, H]


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
    """`walk_pages` over a pool of keys and one of values."""
    return walk_pages(
        q_RSNH, lambda page_R: (k_PKHp[page_R], v_PKpH[page_R]), page_table_RN, limit_RS, own, rule, own_limit
    )


def walk_pages(
    q_RSNH: jax.Array,
    read: PageReader,
    page_table_RN: jax.Array,
    limit_RS: jax.Array,
    own: tuple[jax.Array, jax.Array] | None = None,
    rule: Rule = DEFAULT,
    own_limit: jax.Array | None = None,
) -> jax.Array:
    """Attention of S rows a request over the pages of that request: keys t < limit are visible. [R, S, N, H], float32.

    `page_table[r, n]` is the page that holds positions n * p .. n * p + p - 1 of request r; `read` fetches one page of
    each request. `own` gives keys and values [R, U, K, H] of a draft block's own rows, which all of them see (with
    `own_limit`: see `block_attention`); a row's position for `rule.window` is then limit + its index, else limit - 1. A
    row that sees nothing at all returns zeros.
    """
    keys = jax.eval_shape(read, page_table_RN[:, 0])[0]
    num_rows, (_, num_kv_heads, head_dim, page), dtype = q_RSNH.shape[1], keys.shape, keys.dtype
    q_RKJSH = grouped(q_RSNH, num_kv_heads).astype(dtype).transpose(0, 2, 3, 1, 4)
    shape = q_RKJSH.shape[:-1]
    start = _Running(
        jnp.full(shape, _HIDDEN), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, head_dim), jnp.float32)
    )
    row_RS = limit_RS - 1
    if own is not None:
        k_RKSH, v_RKSH = (x.astype(dtype).swapaxes(1, 2) for x in own)
        scores = jnp.einsum("RKJSH,RKUH->RKJSU", q_RKJSH, k_RKSH, preferred_element_type=jnp.float32)
        scores = _score(scores, rule, head_dim)
        visible_GU = own_visible(num_rows, scores.shape[-1], rule, own_limit)
        if visible_GU is not None:
            scores = jnp.where(visible_GU[None, None, None], scores, _HIDDEN)
        start = _advance(start, scores, v_RKSH)
        row_RS = limit_RS + jnp.arange(num_rows)[None, :]

    def step(n: jax.Array, running: _Running) -> _Running:
        k_RKHp, v_RKpH = read(lax.dynamic_index_in_dim(page_table_RN, n, axis=1, keepdims=False))
        scores = jnp.einsum("RKJSH,RKHp->RKJSp", q_RKJSH, k_RKHp, preferred_element_type=jnp.float32)
        key_p = n * page + jnp.arange(page)[None, None, :]
        visible_RSp = key_p < limit_RS[:, :, None]
        if rule.window:
            visible_RSp &= key_p > row_RS[:, :, None] - rule.window
        scores = jnp.where(visible_RSp[:, None, None], _score(scores, rule, head_dim), _HIDDEN)
        return _advance(running, scores, v_RKpH)

    end = lax.fori_loop(0, (jnp.max(limit_RS) + page - 1) // page, step, start)
    seen = end.largest_RKJS > _HIDDEN
    out = end.out_RKJSH / jnp.where(seen, end.sum_RKJS, jnp.inf)[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(q_RSNH.shape)
