"""The TPU's kernel of packed training rows, interpreted: the attention of XLA, values and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.attention import DEFAULT, Rule, causal_attention
from dspark_jax.tpu_attention import row_attention

STARTS = [0, 70, 131]  # of the documents of a row; the second row has one document


@pytest.mark.parametrize(
    ("length", "head_dim", "rule"),
    [
        (200, 64, Rule(window=40)),
        pytest.param(256, 128, DEFAULT, marks=pytest.mark.slow),
        pytest.param(200, 64, Rule(scale=0.3, softcap=5.0), marks=pytest.mark.slow),
    ],
    ids=["filled up, window", "whole blocks", "soft cap"],
)
def test_the_kernel_attends_as_xla_does(length: int, head_dim: int, rule: Rule) -> None:
    rng = np.random.default_rng(0)
    index_S = np.arange(length)
    start_BS = np.stack([np.max([np.where(index_S >= s, s, 0) for s in STARTS], axis=0), np.zeros_like(index_S)])
    start_BS, position_BS = (jnp.asarray(x, jnp.int32) for x in (start_BS, index_S[None] - start_BS))
    rows: Any = [jnp.asarray(rng.normal(size=(2, length, n, head_dim)), jnp.float32) for n in (4, 2, 2)]
    weight_BSNH = jnp.asarray(rng.normal(size=rows[0].shape), jnp.float32)

    def kernel(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
        with jax.numpy_dtype_promotion("standard"):  # the kernel's own code promotes
            return row_attention(q_BSNH, k_BSKH, v_BSKH, start_BS, rule, interpret=True)

    def xla(q_BSNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array) -> jax.Array:
        k_BKHT, v_BKTH = k_BSKH.transpose(0, 2, 3, 1), v_BSKH.swapaxes(1, 2)
        return causal_attention(q_BSNH, k_BKHT, v_BKTH, position_BS, rule, start_BS)

    def both(attend: Any) -> Any:
        (_, out), back = jax.vjp(lambda *rows: (jnp.sum(attend(*rows) * weight_BSNH), attend(*rows)), *rows)
        return out, back((jnp.float32(1.0), jnp.zeros_like(out)))

    for ours, wanted in zip(*(jax.tree.leaves(jax.jit(both, static_argnums=0)(f)) for f in (kernel, xla)), strict=True):
        np.testing.assert_allclose(ours, wanted, atol=2e-5)
