"""Both attention functions against a dense float64 reference, one row at a time.

Here keys are [.., T, H] like values; the functions take them as caches hold them, [.., H, T].
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.attention import block_attention, causal_attention

B, N, K, H = 2, 6, 2, 4


@jax.jit
def causal(q, k, v, position):
    return causal_attention(q, k.swapaxes(-1, -2), v, position)


@jax.jit
def block(q, context_k, context_v, block_k, block_v, limit):
    return block_attention(q, context_k.swapaxes(-1, -2), context_v, block_k, block_v, limit)


def rows(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def attend(q_NH: np.ndarray, k_KTH: np.ndarray, v_KTH: np.ndarray) -> np.ndarray:
    """One query row [N, H] over T visible keys: query head n reads key/value head n // (N/K)."""
    q, k, v = (x.astype(np.float64) for x in (q_NH, k_KTH, v_KTH))
    out = np.zeros_like(q)
    for n in range(N):
        scores = k[n // (N // K)] @ q[n] / np.sqrt(H)
        weights = np.exp(scores - scores.max())
        out[n] = weights / weights.sum() @ v[n // (N // K)]
    return out


def test_causal_attention_is_dense_attention_up_to_each_rows_position():
    position = np.array([[0, 3, 8], [5, 6, 7]])
    q, k, v = rows(0, B, 3, N, H), rows(1, B, K, 9, H), rows(2, B, K, 9, H)
    out = np.asarray(causal(q, k, v, position))
    assert out.dtype == np.float32
    for b in range(B):
        for s in range(3):
            seen = position[b, s] + 1
            np.testing.assert_allclose(out[b, s], attend(q[b, s], k[b, :, :seen], v[b, :, :seen]), atol=1e-5)


def test_causal_attention_ignores_keys_beyond_the_position_whatever_they_hold():
    position = np.array([[2, 4], [0, 6]])
    q, k, v = rows(0, B, 2, N, H), rows(1, B, K, 9, H), rows(2, B, K, 9, H)
    clean = causal(q, k, v, position)
    for b in range(B):
        k[b, :, position[b].max() + 1 :] = 1e4
        v[b, :, position[b].max() + 1 :] = -1e4
    np.testing.assert_array_equal(clean, causal(q, k, v, position))


def block_inputs(num_keys: int) -> list[np.ndarray]:
    context = [rows(1, B, K, num_keys, H), rows(2, B, K, num_keys, H)]
    return [rows(0, B, 3, 5, N, H), *context, rows(3, B, 3, 5, K, H), rows(4, B, 3, 5, K, H)]


def test_block_attention_sees_the_context_before_the_limit_and_its_whole_own_block():
    limit = np.array([[0, 1, 7], [4, 9, 4]])
    q, context_k, context_v, block_k, block_v = block_inputs(9)
    out = np.asarray(block(q, context_k, context_v, block_k, block_v, limit))
    assert out.dtype == np.float32
    for b, a, g in np.ndindex(B, 3, 5):
        k = np.concatenate([context_k[b, :, : limit[b, a]], block_k[b, a].swapaxes(0, 1)], axis=1)
        v = np.concatenate([context_v[b, :, : limit[b, a]], block_v[b, a].swapaxes(0, 1)], axis=1)
        np.testing.assert_allclose(out[b, a, g], attend(q[b, a, g], k, v), atol=1e-5)


def test_block_attention_at_limit_zero_does_not_read_the_context():
    limit = np.zeros((B, 3), np.int32)
    q, context_k, context_v, block_k, block_v = block_inputs(9)
    clean = block(q, context_k, context_v, block_k, block_v, limit)
    np.testing.assert_array_equal(clean, block(q, context_k * 1e3, context_v * 1e3, block_k, block_v, limit))


def test_rows_that_see_nothing_stay_finite_and_so_do_their_gradients():
    q, k, v = rows(0, B, 2, N, H), rows(1, B, K, 5, H), rows(2, B, K, 5, H)
    nothing = np.full((B, 2), -1)

    def total(q, k, v):
        return jnp.sum(causal(q, k, v, nothing))

    assert np.isfinite(causal(q, k, v, nothing)).all()
    for gradient in jax.jit(jax.grad(total, argnums=(0, 1, 2)))(q, k, v):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_huge_scores_do_not_overflow(size):
    position = np.array([[1, 4], [0, 3]])
    q, k, v = rows(0, B, 2, N, H) * np.float32(size), rows(1, B, K, 5, H), rows(2, B, K, 5, H)
    assert np.isfinite(causal(q, k, v, position)).all()
