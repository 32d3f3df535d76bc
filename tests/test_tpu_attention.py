"""The TPU's attention of training, interpreted: what XLA's computes, values and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import normal

from dspark_jax import attention, tpu_attention
from dspark_jax.attention import DEFAULT, Rule

STARTS = [0, 70, 131]  # of the documents of a row; the second row has one document


def assert_alike(kernel: Any, xla: Any, arrays: tuple[jax.Array, ...]) -> None:
    """Values, and the gradients of a weighted sum of them to all arrays."""

    def both(attend: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):  # the kernel's own code promotes
            out, back = jax.vjp(attend, *arrays)
            return out, back(normal(np.random.default_rng(1), *out.shape))

    for ours, wanted in zip(*(jax.tree.leaves(jax.jit(both, static_argnums=0)(f)) for f in (kernel, xla)), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=2e-5)


@pytest.mark.parametrize(
    ("length", "head_dim", "rule"),
    [
        (200, 64, Rule(window=40)),
        pytest.param(256, 128, DEFAULT, marks=pytest.mark.slow),
        pytest.param(200, 64, Rule(scale=0.3, softcap=5.0), marks=pytest.mark.slow),
    ],
    ids=["filled up, window", "whole blocks", "soft cap"],
)
def test_packed_rows_attend_as_in_xla(length: int, head_dim: int, rule: Rule) -> None:
    rng, index_S = np.random.default_rng(0), np.arange(length)
    start_BS = np.stack([np.max([np.where(index_S >= s, s, 0) for s in STARTS], axis=0), np.zeros_like(index_S)])
    start_BS, position_BS = (jnp.asarray(x, jnp.int32) for x in (start_BS, index_S[None] - start_BS))

    def kernel(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
        return tpu_attention.row_attention(q_BSNH, k_BSKH, v_BSKH, start_BS, rule, interpret=True)

    def xla(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
        k_BKHT, v_BKTH = k_BSKH.transpose(0, 2, 3, 1), v_BSKH.swapaxes(1, 2)
        return attention.causal_attention(q_BSNH, k_BKHT, v_BKTH, position_BS, rule, start_BS)

    assert_alike(kernel, xla, tuple(normal(rng, 2, length, heads, head_dim) for heads in (4, 2, 2)))


@pytest.mark.parametrize(
    ("rule", "own"),
    [
        (DEFAULT, None),
        pytest.param(Rule(0.2, softcap=4.0, window=20, causal_block=True), None, marks=pytest.mark.slow),
        pytest.param(DEFAULT, 2, marks=pytest.mark.slow),
    ],
    ids=["whole blocks", "window, soft cap, causal", "a block's newest row"],
)
def test_draft_blocks_attend_as_in_xla(rule: Rule, own: int | None) -> None:
    rng, (batch, blocks, keys, kv_heads, head_dim) = np.random.default_rng(0), (2, 5, 200, 2, 64)
    rows, own_rows, own_limit = (3, 3, None) if own is None else (1, 4, jnp.int32(own))
    limit_BA, start_BA = (jnp.asarray(rng.integers(0, most, (batch, blocks)), jnp.int32) for most in (150, 50))
    limit_BA = limit_BA.at[0, 0].set(0)  # a block without context

    def form(attend: Any, **how: Any) -> Any:
        return lambda *arrays: attend(*arrays, limit_BA, rule, start_BA, own_limit, **how)

    arrays = (
        normal(rng, batch, blocks, rows, 2 * kv_heads, head_dim), normal(rng, batch, kv_heads, head_dim, keys),
        normal(rng, batch, kv_heads, keys, head_dim), normal(rng, batch, blocks, own_rows, kv_heads, head_dim),
        normal(rng, batch, blocks, own_rows, kv_heads, head_dim),
    )  # fmt: skip
    assert_alike(form(tpu_attention.block_attention, interpret=True), form(attention.block_attention), arrays)
