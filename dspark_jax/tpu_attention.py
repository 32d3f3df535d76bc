"""Attention of packed training rows on TPUs: JAX's splash kernel, which keeps scores in fast memory.

In XLA the scores of a row go to main memory and back several times: a quarter of a training step's traffic there. The
kernel is causal by index and keeps to segments: with a document's first index as its segment, that is causal attention
inside each document. A backward pass computes the scores again.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash
from jax.sharding import PartitionSpec

from dspark_jax.attention import Rule
from dspark_jax.sharding import ROWS

_LANES = 128  # heads fill whole vector registers, and rows are cut into blocks of at least so many tokens
_BLOCKS = (512, 256, _LANES)


def row_attention(
    q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, start_BS: jax.Array, rule: Rule, interpret: bool = False
) -> jax.Array:
    """Each token over its own document, up to itself: [B, S, N, H] float32.

    `start` is the index at which a token's document begins. Every device of a mesh attends with its own rows and heads.
    `interpret` runs the kernel's program without a TPU.
    """
    _, length, _, head_dim = q_BSNH.shape
    padded, width = (-(-size // _LANES) * _LANES for size in (length, head_dim))
    scale = head_dim**-0.5 if rule.scale is None else rule.scale

    def prepared(x_BSNH: jax.Array) -> jax.Array:
        return jnp.pad(x_BSNH.swapaxes(1, 2), ((0, 0), (0, 0), (0, padded - length), (0, width - head_dim)))

    def kernel(q_BNSH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, start_BS: jax.Array) -> jax.Array:
        attend = _kernel(q_BNSH.shape[1], padded, rule, interpret)
        return jax.vmap(attend)(q_BNSH, k_BKSH, v_BKSH, splash.SegmentIds(start_BS, start_BS))

    # Scaled while still in float32; tokens that fill up a row are a document of their own.
    q_BNSH = prepared((q_BSNH * scale).astype(k_BSKH.dtype))
    start_BS = jnp.pad(start_BS, ((0, 0), (0, padded - length)), constant_values=length)
    out_BNSH = _on_own_part(kernel)(q_BNSH, prepared(k_BSKH), prepared(v_BSKH), start_BS)
    return out_BNSH[:, :, :length, :head_dim].swapaxes(1, 2).astype(jnp.float32)


def _kernel(num_heads: int, length: int, rule: Rule, interpret: bool) -> Any:
    block = next(size for size in _BLOCKS if length % size == 0)
    shape = (length, length)
    mask = splash.LocalMask(shape, (rule.window - 1, 0), 0) if rule.window else splash.CausalMask(shape)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=block, block_q_dq=block, block_kv_dq=block
    )
    return splash.make_splash_mha(
        splash.MultiHeadMask([mask] * num_heads), block_sizes=sizes, head_shards=1, q_seq_shards=1,
        attn_logits_soft_cap=rule.softcap or None, interpret=interpret,
    )  # fmt: skip


def _on_own_part(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The kernel on each device's own rows and heads: XLA cannot split it by itself. What `sum_over_rows` has cut
    already stays as it is."""
    mesh = jax.sharding.get_abstract_mesh()
    free = [axis for axis in mesh.axis_names if axis not in mesh.manual_axes]
    if mesh.empty or not free:
        return kernel
    rows = tuple(axis for axis in ROWS if axis in free) or None
    heads = PartitionSpec(rows, "tensor" if "tensor" in free else None)
    parts = (heads, heads, heads, PartitionSpec(rows))
    return jax.shard_map(kernel, in_specs=parts, out_specs=heads, axis_names={*free}, check_vma=False)
