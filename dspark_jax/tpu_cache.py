"""The paged cache of TPUs: pages as the kernel `ragged_paged_attention` of JAX reads them.

A page holds [p, 2K, H], key and value of a head side by side. The kernel takes a round's flat packing as it is: packed
queries, lengths, page table and cumulative query counts, and reads each request's keys once for all of its tokens.
It is causal, so a draft block, whose rows see each other, attends in XLA, page by page.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import PartitionSpec

from dspark_jax import kv_cache
from dspark_jax.attention import DEFAULT, Rule, walk_pages
from dspark_jax.config import ConfigError
from dspark_jax.kv_cache import Packing, PagedLayer

_LANES = 128  # the kernel's head sizes are multiples of a vector register's lanes
_KEYS_PER_BLOCK = 1024  # positions that one step of the kernel holds in fast memory, twice
_QUERIES_PER_BLOCK = 32


class RaggedLayer(NamedTuple):
    """One layer's pages and the packing of this round. As PagedLayer: inputs are [1, T, ...], blocks [R, 1, G, ...].

    Requests lie packed in order, those without rows last. Heads are padded with zeros to a multiple of 128. The pages
    may be those of all layers, as with PagedLayer.
    """

    kv_PpCH: jax.Array
    packing: Packing

    def of_layer(self, number: jax.Array, num_layers: int) -> "RaggedLayer":
        return self._replace(packing=self.packing.of_layer(number, num_layers, self.kv_PpCH.shape[0]))

    def after_layer(self, layer: "RaggedLayer") -> "RaggedLayer":
        return layer._replace(packing=self.packing)

    def append(self, k_1TKH: jax.Array, v_1TKH: jax.Array, position_1T: jax.Array) -> "RaggedLayer":
        """Writes every packed token into its request's page; fillers and positions without a page are dropped, and
        what is not finite is stored as 0, as PagedLayer does."""
        num_pages, page, num_combined, width = self.kv_PpCH.shape
        page_T = self.packing.page_of(position_1T[0], page, num_pages)
        kv_TKCH = jnp.stack([k_1TKH[0], v_1TKH[0]], axis=2)
        kv_TCH = _pad(kv_TKCH.reshape(kv_TKCH.shape[0], num_combined, -1), width)
        kv_TCH = jnp.where(jnp.isfinite(kv_TCH), kv_TCH, 0).astype(self.kv_PpCH.dtype)
        return self._replace(kv_PpCH=self.kv_PpCH.at[page_T, position_1T[0] % page].set(kv_TCH, mode="drop"))

    def read(self, position_1T: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As PagedLayer, padded heads: [1, T, K, width]."""
        num_pages, page, _, width = self.kv_PpCH.shape
        page_T = self.packing.page_of(position_1T[0], page, num_pages)
        kv_1TKCH = self.kv_PpCH[page_T, position_1T[0] % page].reshape(1, page_T.shape[0], -1, 2, width)
        return kv_1TKCH[..., 0, :], kv_1TKCH[..., 1, :]

    def read_block(self, position_R1: jax.Array) -> tuple[jax.Array, jax.Array]:
        """As PagedLayer, padded heads: [R, 1, K, width]."""
        k_1RKH, v_1RKH = self._replace(packing=self.packing.of_requests()).read(position_R1.T)
        return k_1RKH.swapaxes(0, 1), v_1RKH.swapaxes(0, 1)

    def attend(self, q_1TNH: jax.Array, position_1T: jax.Array, rule: Rule = DEFAULT) -> jax.Array:
        """Packed rows over their own requests, in the kernel: [1, T, N, H] float32, fillers zero."""
        pack, (_, num_tokens, _, head_dim) = self.packing, q_1TNH.shape
        _, page, _, width = self.kv_PpCH.shape
        there_RS = pack.index_RS < num_tokens
        limit_RS = jnp.where(there_RS, position_1T[0][jnp.where(there_RS, pack.index_RS, 0)] + 1, 0)
        count_R = jnp.sum(there_RS, axis=1, dtype=jnp.int32)
        first_Q = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(count_R, dtype=jnp.int32)])
        out_TNH = _over_heads(
            functools.partial(
                ragged_paged_attention,
                sm_scale=rule.scale_of(head_dim),
                sliding_window=rule.window or None,
                soft_cap=rule.softcap or None,
                num_kv_pages_per_block=min(pack.page_table_RN.shape[1], max(1, _KEYS_PER_BLOCK // page)),
                num_queries_per_block=min(num_tokens, _QUERIES_PER_BLOCK),
            )
        )(
            _pad(q_1TNH[0], width).astype(self.kv_PpCH.dtype),
            self.kv_PpCH,
            jnp.max(limit_RS, axis=1),
            pack.page_table_RN,
            first_Q,
            jnp.sum(count_R > 0, dtype=jnp.int32)[None],
        )
        filler_T = pack.row_T >= pack.page_table_RN.shape[0]  # the kernel leaves there what was in its memory
        out_TNH = jnp.where(filler_T[:, None, None], 0, out_TNH[..., :head_dim].astype(jnp.float32))
        return out_TNH[None]

    def attend_block(
        self, q_R1GNH: jax.Array, k_R1GKH: jax.Array, v_R1GKH: jax.Array, limit_R1: jax.Array, rule: Rule = DEFAULT,
        own_limit: jax.Array | None = None,
    ) -> jax.Array:  # fmt: skip
        """One draft block a request over its context before `limit` and over itself, [R, 1, G, N, H] float32."""
        limit_RG = jnp.broadcast_to(limit_R1, (limit_R1.shape[0], q_R1GNH.shape[2]))
        head_dim = q_R1GNH.shape[-1]

        def read(page_R: jax.Array) -> tuple[jax.Array, jax.Array]:
            kv_RpCH = self.kv_PpCH[page_R][..., :head_dim]
            kv_RpKCH = kv_RpCH.reshape(*kv_RpCH.shape[:2], -1, 2, head_dim)
            return kv_RpKCH[..., 0, :].transpose(0, 2, 3, 1), kv_RpKCH[..., 1, :].swapaxes(1, 2)

        own = (k_R1GKH[:, 0], v_R1GKH[:, 0])
        table = self.packing.page_table_RN
        return walk_pages(q_R1GNH[:, 0], read, table, limit_RG, own, rule, own_limit)[:, None]


def paged_cache() -> type[PagedLayer] | type[RaggedLayer]:
    """The paged cache for the platform of the function being traced."""
    return RaggedLayer if kv_cache.platform() == "tpu" else PagedLayer


def empty_pages(
    pages: int, num_kv_heads: int, page_size: int, head_dim: int, dtype: jnp.dtype
) -> tuple[jax.Array, ...]:
    """The page pool of one layer, zeros, in the layout of this platform's cache. Raises ConfigError where the kernel
    could not read it."""
    if paged_cache() is PagedLayer:
        return kv_cache.empty_pages(pages, num_kv_heads, page_size, head_dim, dtype)
    check_kernel(num_kv_heads, dtype, jax.sharding.get_abstract_mesh().shape.get("tensor", 1))
    return (jnp.zeros((pages, page_size, 2 * num_kv_heads, -(-head_dim // _LANES) * _LANES), dtype),)


def page_specs() -> tuple[PartitionSpec, ...]:
    """Mesh axes of the arrays of a page pool: key/value heads over `tensor`."""
    if paged_cache() is PagedLayer:
        return (PartitionSpec(None, "tensor"),) * 2
    return (PartitionSpec(None, None, "tensor"),)


def check_kernel(num_kv_heads: int, dtype: jnp.dtype, tensor: int) -> None:
    """Raises ConfigError where the kernel cannot read the pages that a device holds when `tensor` devices share the
    key/value heads: a position of a page must fill whole tiles of memory."""
    if num_kv_heads % tensor:
        raise ConfigError(f"mesh tensor = {tensor} does not divide the {num_kv_heads} key/value heads")
    words, rest = divmod(2 * num_kv_heads // tensor * jnp.dtype(dtype).itemsize, 4)
    if rest or not (words in (1, 2, 4) or words % 8 == 0):
        raise ConfigError(
            f"{num_kv_heads // tensor} key/value heads on a device: the TPU kernel reads 1, 2, 4 or a multiple of 8;"
            " choose another mesh tensor"
        )


def _pad(x: jax.Array, width: int) -> jax.Array:
    """The last axis filled up to `width` with zeros."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, width - x.shape[-1]),))


def _over_heads(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The kernel on each device's own heads: XLA cannot split it by itself. Without a mesh, the kernel as it is."""
    if jax.sharding.get_abstract_mesh().empty:
        return kernel
    heads = PartitionSpec(None, "tensor", None)
    whole = (PartitionSpec(),) * 4
    return jax.shard_map(
        kernel, in_specs=(heads, PartitionSpec(None, None, "tensor", None), *whole), out_specs=heads, check_vma=False
    )
