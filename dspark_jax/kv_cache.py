"""Key/value caches: written at positions, rolled back by length alone.

A cache holds positions 0, 1, ... of each sequence. Rolling back needs no write: rows at or beyond a sequence's length
are invisible (attention compares indices with limits) and are overwritten when that position is computed again.
So speculation may write a whole block and commit only a part of it.

`LayerCache` is dense, one row a sequence: calibration and `generate`. `PagedLayer` keeps the pages of all requests in
one pool, for rounds that pack the tokens of many requests into one flat row: `serve`. `DocumentRows` are rows packed
with several conversations: training. Models know only the three methods that all have: `append`, `attend`,
`attend_block`. The caches of decoding also give back what was written, `read` and `read_block`. `BlockRows` lets a
whole decoder draft: it reads a cache and keeps the rows of the draft to itself.

Keys lie transposed, [.., H, T]: both products of attention then read their cache in the order it is stored
(twice as fast on a CPU, measured at 1 and 6 queries).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax import gpu_attention, tpu_attention
from dspark_jax.attention import DEFAULT, Rule, block_attention, causal_attention, paged_attention

# A row of documents attends in at most so many parts, of no fewer queries than that.
_PARTS, _QUERIES = 8, 256
# Fetching a request's pages once costs a CPU what attention of so many rows over them does (SmolLM2, float32, traced).
_FETCH = 1.4


class LayerCache(NamedTuple):
    """One layer's keys and values, a row a sequence."""

    k_BKHT: jax.Array
    v_BKTH: jax.Array

    def append(self, k_BSKH: jax.Array, v_BSKH: jax.Array, position_BS: jax.Array) -> "LayerCache":
        """Writes S new rows a sequence at their positions; a position beyond the cache is dropped."""
        row_B1 = jnp.arange(position_BS.shape[0])[:, None]
        k_BKHT, v_BKTH = self
        return LayerCache(
            k_BKHT.at[row_B1, :, :, position_BS].set(k_BSKH.astype(k_BKHT.dtype), mode="drop"),
            v_BKTH.at[row_B1, :, position_BS].set(v_BSKH.astype(v_BKTH.dtype), mode="drop"),
        )

    def read(self, position_BS: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, S, K, H] at positions of the cache."""
        row_B1 = jnp.arange(position_BS.shape[0])[:, None]
        return self.k_BKHT[row_B1, :, :, position_BS], self.v_BKTH[row_B1, :, position_BS]

    def read_block(self, position_BA: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As `read`, a position a block."""
        return self.read(position_BA)

    def attend(self, q_BSNH: jax.Array, position_BS: jax.Array, rule: Rule = DEFAULT) -> jax.Array:
        """Rows at their positions over everything at or before them, [B, S, N, H] float32."""
        return causal_attention(q_BSNH, *self, position_BS, rule)

    def attend_block(
        self, q_BAGNH: jax.Array, k_BAGKH: jax.Array, v_BAGKH: jax.Array, limit_BA: jax.Array, rule: Rule = DEFAULT,
        own_limit: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        """Draft blocks over the context before `limit` and over themselves, [B, A, G, N, H] float32."""
        return block_attention(q_BAGNH, *self, k_BAGKH, v_BAGKH, limit_BA, rule, None, own_limit)


class Packing(NamedTuple):
    """Where the T packed tokens of a round belong: token t is row `place_T` of request `row_T` (R: a filler, which
    is written nowhere). `index_RS` is the way back, the packed index of each request's rows (T where there is none).
    `page_table_RN` names each request's pages in order (P where it has none)."""

    row_T: jax.Array
    place_T: jax.Array
    index_RS: jax.Array
    page_table_RN: jax.Array

    def page_of(self, position_T: jax.Array, page_size: int, num_pages: int) -> jax.Array:
        """The page of each packed token; `num_pages` (nowhere) for fillers and positions without a page."""
        entry_T, (num_rows, num_entries) = position_T // page_size, self.page_table_RN.shape
        known_T = (self.row_T < num_rows) & (entry_T < num_entries)
        return jnp.where(known_T, self.page_table_RN[self.row_T, entry_T], num_pages)  # such gathers are clamped

    def of_layer(self, number: jax.Array, num_layers: int, num_pages: int) -> "Packing":
        """The same packing over a pool of `num_pages` that all layers share: page p of layer l lies at l * P + p."""
        each, table_RN = num_pages // num_layers, self.page_table_RN
        return self._replace(page_table_RN=jnp.where(table_RN < each, table_RN + number * each, num_pages))

    def of_requests(self) -> "Packing":
        """One token a request, in order."""
        return self._replace(row_T=jnp.arange(self.page_table_RN.shape[0], dtype=jnp.int32))

    def pieces(self, num_tokens: int) -> "Pieces":
        """The packed rows in pieces of one request each: few of W rows, however long the longest request may be."""
        num_requests, num_rows = self.index_RS.shape
        width, count = _piece_shape(num_requests, num_rows, num_tokens)
        count_R = jnp.sum(self.index_RS < num_tokens, axis=1, dtype=jnp.int32)
        pieces_R = -(-count_R // width)
        end_R = jnp.cumsum(pieces_R)
        piece_C = jnp.arange(count, dtype=jnp.int32)
        owner_C = jnp.minimum(jnp.sum(piece_C[:, None] >= end_R[None, :], axis=1), num_requests - 1)
        first_C = (piece_C - (end_R - pieces_R)[owner_C]) * width
        place_CW = first_C[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
        # Pieces behind the last one seem to continue the last request, past its end.
        there_CW = place_CW < count_R[owner_C][:, None]
        index_CW = jnp.where(there_CW, self.index_RS[owner_C[:, None], jnp.minimum(place_CW, num_rows - 1)], num_tokens)
        row_T = jnp.minimum(self.row_T, num_requests - 1)
        piece_T = jnp.minimum((end_R - pieces_R)[row_T] + self.place_T // width, count - 1)
        return Pieces(index_CW, self.page_table_RN[owner_C], piece_T, self.place_T % width)


class Pieces(NamedTuple):
    """C pieces of at most W rows: packed index (T where there is none), pages, and the place of each packed token."""

    index_CW: jax.Array
    page_table_CN: jax.Array
    piece_T: jax.Array
    column_T: jax.Array


def _piece_shape(num_requests: int, num_rows: int, num_tokens: int) -> tuple[int, int]:
    """Width and number of the pieces that hold any T rows of R requests with at most S rows each, at the least cost. A
    GPU has rows to spare: one piece a request."""
    if platform() == "gpu":
        return num_rows, num_requests

    def count(width: int) -> int:
        each_padded = (num_tokens + (width - 1) * num_requests) // width
        return min(num_requests * -(-num_rows // width), each_padded)

    width = min(range(1, num_rows + 1), key=lambda width: count(width) * (width + _FETCH))
    return width, count(width)


class PagedLayer(NamedTuple):
    """One layer's pages and the packing of this round. Model inputs are [1, T, ...]; blocks are [R, 1, G, ...].

    The pages may be those of all layers, P of each: `of_layer` is then one of them, which writes in the shared pool,
    and `after_layer` the shared pool with what that layer wrote. A loop over layers so never copies a page.
    """

    k_PKHp: jax.Array
    v_PKpH: jax.Array
    packing: Packing

    def of_layer(self, number: jax.Array, num_layers: int) -> "PagedLayer":
        return self._replace(packing=self.packing.of_layer(number, num_layers, self.k_PKHp.shape[0]))

    def after_layer(self, layer: "PagedLayer") -> "PagedLayer":
        return layer._replace(packing=self.packing)

    def append(self, k_1TKH: jax.Array, v_1TKH: jax.Array, position_1T: jax.Array) -> "PagedLayer":
        """Writes every packed token into its request's page; fillers and positions without a page are dropped.

        What is not finite is stored as 0: a page outlives its request, and 0 times NaN would reach the next one.
        """
        num_pages, page = self.k_PKHp.shape[0], self.k_PKHp.shape[-1]
        page_T, place_T = self.packing.page_of(position_1T[0], page, num_pages), position_1T[0] % page
        k_TKH, v_TKH = (jnp.where(jnp.isfinite(x), x, 0).astype(self.k_PKHp.dtype) for x in (k_1TKH[0], v_1TKH[0]))
        return self._replace(
            k_PKHp=self.k_PKHp.at[page_T, :, :, place_T].set(k_TKH, mode="drop"),
            v_PKpH=self.v_PKpH.at[page_T, :, place_T].set(v_TKH, mode="drop"),
        )

    def read(self, position_1T: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values [1, T, K, H] that each packed token's request has at a position; of fillers, anything."""
        num_pages, page = self.k_PKHp.shape[0], self.k_PKHp.shape[-1]
        page_T, place_T = self.packing.page_of(position_1T[0], page, num_pages), position_1T[0] % page
        return self.k_PKHp[page_T, :, :, place_T][None], self.v_PKpH[page_T, :, place_T][None]

    def read_block(self, position_R1: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values [R, 1, K, H] of every request at a position."""
        k_1RKH, v_1RKH = self._replace(packing=self.packing.of_requests()).read(position_R1.T)
        return k_1RKH.swapaxes(0, 1), v_1RKH.swapaxes(0, 1)

    def attend(self, q_1TNH: jax.Array, position_1T: jax.Array, rule: Rule = DEFAULT) -> jax.Array:
        """Packed rows over their own requests, in pieces, so that attention shrinks with the packed tokens."""
        num_tokens = position_1T.shape[1]
        index_CW, page_table_CN, piece_T, column_T = self.packing.pieces(num_tokens)
        there_CW = index_CW < num_tokens
        index_CW = jnp.where(there_CW, index_CW, 0)
        limit_CW = jnp.where(there_CW, position_1T[0][index_CW] + 1, 0)
        pieces = self._replace(packing=self.packing._replace(page_table_RN=page_table_CN))
        out_CWNH = pieces._attend(q_1TNH[0][index_CW], limit_CW, None, rule)
        return out_CWNH[piece_T, column_T][None]

    def attend_block(
        self, q_R1GNH: jax.Array, k_R1GKH: jax.Array, v_R1GKH: jax.Array, limit_R1: jax.Array, rule: Rule = DEFAULT,
        own_limit: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        """One draft block a request over its context before `limit` and over itself."""
        limit_RG = jnp.broadcast_to(limit_R1, (limit_R1.shape[0], q_R1GNH.shape[2]))
        own = (k_R1GKH[:, 0], v_R1GKH[:, 0])
        return self._attend(q_R1GNH[:, 0], limit_RG, own, rule, own_limit)[:, None]

    def _attend(
        self,
        q_RSNH: jax.Array,
        limit_RS: jax.Array,
        own: tuple[jax.Array, jax.Array] | None,
        rule: Rule,
        own_limit: jax.Array | None = None,
    ) -> jax.Array:
        """In cuDNN on a GPU, where it can; page by page in XLA elsewhere."""
        cudnn = platform() == "gpu" and gpu_attention.takes(self.k_PKHp.dtype, q_RSNH.shape[-1], rule)
        attend = gpu_attention.paged_attention if cudnn else paged_attention
        return attend(q_RSNH, self.k_PKHp, self.v_PKpH, self.packing.page_table_RN, limit_RS, own, rule, own_limit)


class DocumentRows(NamedTuple):
    """One layer's keys and values of rows that hold several documents (training): token s belongs to the document that
    begins at start[s], and sees nothing before it. Positions count from there. `append` takes the whole row at once.
    """

    start_BS: jax.Array
    k_BKHT: jax.Array
    v_BKTH: jax.Array
    block_start_BA: jax.Array | None = None

    def of_layer(self, number: jax.Array, num_layers: int) -> "DocumentRows":
        """Every layer begins with the same empty rows."""
        del number, num_layers
        return self

    def after_layer(self, layer: "DocumentRows") -> "DocumentRows":
        """Nothing is kept of a layer's keys and values: nobody reads them again."""
        del layer
        return self

    def append(self, k_BSKH: jax.Array, v_BSKH: jax.Array, position_BS: jax.Array) -> "DocumentRows":
        """The keys and values of all S tokens."""
        del position_BS
        rows = from_rows(k_BSKH, v_BSKH, self.k_BKHT.dtype)
        return self._replace(k_BKHT=rows.k_BKHT, v_BKTH=rows.v_BKTH)

    def of_blocks(self, start_BA: jax.Array) -> "DocumentRows":
        """The same rows as blocks see them whose documents begin at `start`."""
        return self._replace(block_start_BA=start_BA)

    def attend(self, q_BSNH: jax.Array, position_BS: jax.Array, rule: Rule = DEFAULT) -> jax.Array:
        """Each token over its own document, [B, S, N, H] float32; a part of the row at a time, over the keys up to the
        part's end: no [S, S] array of scores exists, and most of what lies ahead of a token is never computed. In a
        backward pass scores are computed again, as those of `attend_block`. On TPUs one kernel does all of this."""
        if platform() == "tpu":
            k_BSKH, v_BSKH = self.k_BKHT.transpose(0, 3, 1, 2), self.v_BKTH.swapaxes(1, 2)
            return tpu_attention.row_attention(q_BSNH, k_BSKH, v_BSKH, self.start_BS, rule)
        length = q_BSNH.shape[1]
        part = max(_QUERIES, -(-length // _PARTS))
        attend = jax.checkpoint(functools.partial(causal_attention, rule=rule))
        out = []
        for begin in range(0, length, part):
            end = min(begin + part, length)
            own = (x[:, begin:end] for x in (q_BSNH, position_BS, self.start_BS))
            q_BQNH, position_BQ, start_BQ = own
            keys, values = self.k_BKHT[..., :end], self.v_BKTH[:, :, :end]
            out.append(attend(q_BQNH, keys, values, position_BQ, start_BS=start_BQ))
        return jnp.concatenate(out, axis=1)

    def attend_block(
        self, q_BAGNH: jax.Array, k_BAGKH: jax.Array, v_BAGKH: jax.Array, limit_BA: jax.Array, rule: Rule = DEFAULT,
        own_limit: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        """Draft blocks over the first `limit` tokens of their document and over themselves, [B, A, G, N, H] float32.

        Scores are computed again in the backward pass: kept, they would be most of a training step's memory.
        """
        form = tpu_attention.block_attention if platform() == "tpu" else block_attention
        attend = jax.checkpoint(functools.partial(form, rule=rule))
        context, own = (self.k_BKHT, self.v_BKTH), (k_BAGKH, v_BAGKH)
        return attend(q_BAGNH, *context, *own, limit_BA, start_BA=self.block_start_BA, own_limit=own_limit)


class BlockRows(NamedTuple):
    """One layer's keys and values of R blocks that grow token by token behind what `committed` holds before `limit`. It
    stands in for a cache where a decoder runs on one row a block; the committed cache hears nothing of it."""

    committed: "LayerCache | PagedLayer"
    limit_R1: jax.Array
    k_R1GKH: jax.Array
    v_R1GKH: jax.Array

    @property
    def rows(self) -> tuple[jax.Array, jax.Array]:
        """The block's own keys and values."""
        return self.k_R1GKH, self.v_R1GKH

    def with_rows(self, k_R1GKH: jax.Array, v_R1GKH: jax.Array) -> "BlockRows":
        return self._replace(k_R1GKH=k_R1GKH, v_R1GKH=v_R1GKH)

    def append(self, k_R1KH: jax.Array, v_R1KH: jax.Array, position_R1: jax.Array) -> "BlockRows":
        """The row of each block at a position from `limit` on."""
        row_R, slot_R = jnp.arange(position_R1.shape[0]), (position_R1 - self.limit_R1)[:, 0]
        k_R1GKH = self.k_R1GKH.at[row_R, 0, slot_R].set(k_R1KH[:, 0])
        return self.with_rows(k_R1GKH, self.v_R1GKH.at[row_R, 0, slot_R].set(v_R1KH[:, 0]))

    def attend(self, q_R1NH: jax.Array, position_R1: jax.Array, rule: Rule = DEFAULT) -> jax.Array:
        """The newest row, the same slot in all blocks, over everything at or before it: [R, 1, N, H] float32."""
        slot = (position_R1 - self.limit_R1)[0, 0]
        if not rule.window:
            out_R11NH = self.committed.attend_block(
                q_R1NH[:, :, None], *self.rows, self.limit_R1, rule, own_limit=slot + 1
            )
            return out_R11NH[:, :, 0]
        # A window begins at the row's own position, which attention takes from its place in a block: so a whole block
        # of this row asks, and the one in its place is heard.
        shape = (*q_R1NH.shape[:2], self.k_R1GKH.shape[2], *q_R1NH.shape[2:])
        q_R1GNH, rule = jnp.broadcast_to(q_R1NH[:, :, None], shape), rule._replace(causal_block=True)
        out_R1GNH = self.committed.attend_block(q_R1GNH, *self.rows, self.limit_R1, rule)
        return jax.lax.dynamic_index_in_dim(out_R1GNH, slot, axis=2, keepdims=False)


Cache = LayerCache | PagedLayer | DocumentRows
SharedCache = PagedLayer | DocumentRows  # one for all layers: what a loop over layers carries


def empty(batch: int, num_kv_heads: int, length: int, head_dim: int, dtype: jnp.dtype) -> LayerCache:
    """A dense cache of zeros for `length` positions."""
    return LayerCache(
        jnp.zeros((batch, num_kv_heads, head_dim, length), dtype),
        jnp.zeros((batch, num_kv_heads, length, head_dim), dtype),
    )


def empty_pages(
    pages: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: jnp.dtype
) -> tuple[jax.Array, jax.Array]:
    """The page pool of one layer: keys [P, K, H, p] and values [P, K, p, H], zeros."""
    return (
        jnp.zeros((pages, num_kv_heads, head_dim, page_size), dtype),
        jnp.zeros((pages, num_kv_heads, page_size, head_dim), dtype),
    )


def empty_rows(start_BS: jax.Array, weight_dtype: jnp.dtype) -> DocumentRows:
    """Rows whose keys and values `append` will bring, for weights of a dtype."""
    nothing = jnp.zeros((0, 0, 0, 0), compute_dtype(weight_dtype))
    return DocumentRows(start_BS, nothing, nothing)


def empty_block(
    committed: LayerCache | PagedLayer, limit_R1: jax.Array, num_rows: int, num_kv_heads: int, head_dim: int
) -> BlockRows:
    """Blocks without a row yet, with room for `num_rows` each, at positions from `limit` on."""
    nothing = jnp.zeros((limit_R1.shape[0], 1, num_rows, num_kv_heads, head_dim))
    return BlockRows(committed, limit_R1, nothing, nothing)


def from_rows(k_BSKH: jax.Array, v_BSKH: jax.Array, dtype: jnp.dtype) -> LayerCache:
    """The dense cache of a whole sequence at positions 0..S-1."""
    return LayerCache(k_BSKH.astype(dtype).transpose(0, 2, 3, 1), v_BSKH.astype(dtype).swapaxes(1, 2))


def compute_dtype(weight_dtype: jnp.dtype) -> jnp.dtype:
    """The dtype of keys and values beside weights of a dtype: XLA's CPU backend has no batched bfloat16 dot."""
    return jnp.dtype(jnp.float32) if platform() == "cpu" else jnp.dtype(weight_dtype)


def platform() -> str:
    """The platform of the function being traced: that of the mesh, whose devices may not be here, else the default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
