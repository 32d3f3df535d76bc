"""Attention in training on TPUs: JAX's splash kernel, which keeps scores in fast memory.

In XLA the scores of packed rows, and those of draft blocks over their context, go to main memory and back several
times: most of a training step's traffic there. A backward pass computes them again.

Packed rows: the kernel is causal by index and keeps to segments. With a document's first index as its segment, that is
causal attention inside each document. Draft blocks: the context and the own rows of all blocks are one sequence of
keys, and what a row sees of it is a mask of booleans, the same for all heads, whose empty blocks are skipped.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec

from dspark_jax.attention import DEFAULT, Rule, context_visible, grouped, own_visible
from dspark_jax.sharding import ROWS

_LANES = 128  # heads fill whole vector registers, and sequences are cut into blocks of at least so many tokens
_BLOCKS = (512, 256, _LANES)


def row_attention(
    q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, start_BS: jax.Array, rule: Rule, interpret: bool = False
) -> jax.Array:
    """Each token over its own document, up to itself: [B, S, N, H] float32.

    `start` is the index at which a token's document begins. Every device of a mesh attends with its own rows and heads.
    `interpret` runs the kernel's program without a TPU.
    """
    length, head_dim = q_BSNH.shape[1], q_BSNH.shape[-1]
    shape = _padded(length), _padded(length)
    mask = splash.LocalMask(shape, (rule.window - 1, 0), 0) if rule.window else splash.CausalMask(shape)

    def kernel(q_BNSH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, start_BS: jax.Array) -> jax.Array:
        attend = _kernel(splash.MultiHeadMask([mask] * q_BNSH.shape[1]), rule, interpret)
        return jax.vmap(attend)(q_BNSH, k_BKSH, v_BKSH, splash.SegmentIds(start_BS, start_BS))

    q_BNSH = _filled(_scaled(q_BSNH, rule).astype(k_BSKH.dtype).swapaxes(1, 2))
    k_BKSH, v_BKSH = (_filled(x_BSKH.swapaxes(1, 2)) for x_BSKH in (k_BSKH, v_BSKH))
    # Tokens that fill up a row are a document of their own.
    start_BS = jnp.pad(start_BS, ((0, 0), (0, shape[0] - length)), constant_values=length)
    out_BNSH = _on_own_part(kernel)(q_BNSH, k_BKSH, v_BKSH, start_BS)
    return out_BNSH[:, :, :length, :head_dim].swapaxes(1, 2).astype(jnp.float32)


def block_attention(
    q_BAGNH: jax.Array,
    context_k_BKHT: jax.Array,
    context_v_BKTH: jax.Array,
    block_k_BAUKH: jax.Array,
    block_v_BAUKH: jax.Array,
    limit_BA: jax.Array,
    rule: Rule = DEFAULT,
    start_BA: jax.Array | None = None,
    own_limit: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """As `attention.block_attention`, [B, A, G, N, H] float32; on a mesh and with `interpret` as `row_attention`."""
    batch, num_blocks, num_rows, num_heads, head_dim = q_BAGNH.shape
    (_, num_kv_heads, _, num_keys), num_own = context_k_BKHT.shape, block_k_BAUKH.shape[2]
    group, dtype = num_heads // num_kv_heads, context_k_BKHT.dtype
    # The J query heads of a key/value head are rows of one long sequence: R = J A G.
    q_BAGKJH = grouped(_scaled(q_BAGNH, rule), num_kv_heads).astype(dtype)
    q_BKRH = q_BAGKJH.transpose(0, 3, 4, 1, 2, 5).reshape(batch, num_kv_heads, -1, head_dim)

    def joined(context_BKTH: jax.Array, own_BAUKH: jax.Array) -> jax.Array:
        own_BKXH = own_BAUKH.astype(dtype).transpose(0, 3, 1, 2, 4).reshape(batch, num_kv_heads, -1, head_dim)
        return _filled(jnp.concatenate([context_BKTH, own_BKXH], axis=2))

    context_BAGT = context_visible(num_rows, num_keys, limit_BA, start_BA, rule)
    context_BAGT = jnp.broadcast_to(context_BAGT, (batch, num_blocks, num_rows, num_keys))
    own_GU = own_visible(num_rows, num_own, rule, own_limit)
    own_GU = jnp.ones((num_rows, num_own), bool) if own_GU is None else jnp.broadcast_to(own_GU, (num_rows, num_own))
    own_AGAU = jnp.eye(num_blocks, dtype=bool)[:, None, :, None] & own_GU[None, :, None, :]
    own_BAGX = jnp.broadcast_to(
        own_AGAU.reshape(1, num_blocks, num_rows, -1), (*context_BAGT.shape[:3], num_blocks * num_own)
    )
    mask_BRT = jnp.concatenate([context_BAGT, own_BAGX], axis=-1).reshape(batch, num_blocks * num_rows, -1)
    mask_BRT = jnp.tile(mask_BRT, (1, group, 1))
    fill_R, fill_T = (_padded(size) - size for size in mask_BRT.shape[1:])
    mask_BRT = jnp.pad(mask_BRT, ((0, 0), (0, 0), (0, fill_T)))
    mask_BRT = jnp.pad(mask_BRT, ((0, 0), (0, fill_R), (0, 0)), mode="edge")  # a row that sees nothing has no softmax

    def kernel(q_BKRH: jax.Array, k_BKTH: jax.Array, v_BKTH: jax.Array, mask_BRT: jax.Array) -> jax.Array:
        def one(q_KRH: jax.Array, k_KTH: jax.Array, v_KTH: jax.Array, mask_RT: jax.Array) -> jax.Array:
            return _kernel(mask_RT[None], rule, interpret)(q_KRH, k_KTH, v_KTH)

        return jax.vmap(one)(q_BKRH, k_BKTH, v_BKTH, mask_BRT)

    k_BKTH, v_BKTH = joined(context_k_BKHT.swapaxes(2, 3), block_k_BAUKH), joined(context_v_BKTH, block_v_BAUKH)
    num_queries = q_BKRH.shape[2]
    out_BKRH = _on_own_part(kernel)(_filled(q_BKRH), k_BKTH, v_BKTH, mask_BRT)[:, :, :num_queries, :head_dim]
    out_BKJAGH = out_BKRH.reshape(batch, num_kv_heads, group, num_blocks, num_rows, head_dim)
    return out_BKJAGH.transpose(0, 3, 4, 1, 2, 5).reshape(q_BAGNH.shape).astype(jnp.float32)


def _scaled(q: jax.Array, rule: Rule) -> jax.Array:
    """Queries times the scale of scores, while they are float32 still."""
    return q * rule.scale_of(q.shape[-1])


def _padded(size: int) -> int:
    return -(-size // _LANES) * _LANES


def _filled(x_BNSH: jax.Array) -> jax.Array:
    """Sequence and heads filled up with zeros to what the kernel cuts them into."""
    *_, length, head_dim = x_BNSH.shape
    return jnp.pad(x_BNSH, ((0, 0), (0, 0), (0, _padded(length) - length), (0, _padded(head_dim) - head_dim)))


def _kernel(mask: splash.MultiHeadMask | jax.Array, rule: Rule, interpret: bool) -> Any:
    """The kernel for a mask [heads or 1, queries, keys], which is known now or an array of the program."""
    q, kv = (next(size for size in _BLOCKS if length % size == 0) for length in mask.shape[1:])
    sizes = splash.BlockSizes(block_q=q, block_kv=kv, block_q_dkv=q, block_kv_dkv=kv, block_q_dq=q, block_kv_dq=kv)
    kernel: Any = splash.make_splash_mha(
        mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, attn_logits_soft_cap=rule.softcap or None,
        interpret=interpret,
    )  # fmt: skip
    if isinstance(mask, jax.Array):
        # Inside a traced function make_splash_mha makes arrays of the flags too, which the kernel then branches on.
        for name in ("fwd_mask_info", "dq_mask_info", "dkv_mask_info"):
            setattr(kernel, name, getattr(kernel, name)._replace(is_dynamic_mask=True))
    return kernel


def _on_own_part(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The kernel on each device's own rows and heads: XLA cannot split it by itself. What `sum_over_rows` has cut
    already stays as it is. The last of the kernel's four arrays has no heads."""
    mesh = jax.sharding.get_abstract_mesh()
    free = [axis for axis in mesh.axis_names if axis not in mesh.manual_axes]
    if mesh.empty or not free:
        return kernel
    rows = tuple(axis for axis in ROWS if axis in free) or None
    heads = PartitionSpec(rows, "tensor" if "tensor" in free else None)
    parts = (heads, heads, heads, PartitionSpec(rows))
    return jax.shard_map(kernel, in_specs=parts, out_specs=heads, axis_names={*free}, check_vma=False)
