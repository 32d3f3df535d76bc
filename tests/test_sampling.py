"""Request laws against a sorting reference, exact draws, and the block sampler."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from dspark_jax.config import SamplingParams
from dspark_jax.sampling import (
    BlockSample,
    SamplingRows,
    request_law,
    sample_block,
    sample_law,
    sample_rows,
    sampling_rows,
)

V = 7


def reference_law(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Sort by (value down, id up), cut to k, cut to the first run of mass >= p; float64."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    law = np.zeros(len(logits))
    if temperature == 0:
        law[order[0]] = 1
        return law
    kept = order[: top_k or len(order)]
    chance = np.exp((logits[kept] - logits.max()) / temperature)
    mass = np.cumsum(chance / chance.sum())
    assume(np.abs(mass - top_p).min() > 1e-4 or top_p == 1)  # float32 may fall on either side of an exact tie
    count = len(kept) if top_p == 1 else int(np.argmax(mass >= top_p)) + 1
    law[kept[:count]] = chance[:count] / chance[:count].sum()
    return law


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([-np.inf, -2.0, -0.0, 0.0, 0.5, 1.0, 3.0]), min_size=V, max_size=V),
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.integers(0, V + 2),
    st.sampled_from([0.05, 0.3, 0.5, 0.77, 0.9, 0.999, 1.0]),
)
def test_request_law_is_the_sorted_one(logits, temperature, top_k, top_p):
    assume(max(logits) > -np.inf)
    row = np.array(logits, np.float32)
    law = request_law(row, np.float32(temperature), np.int32(top_k), np.float32(top_p))
    np.testing.assert_allclose(law, reference_law(row.astype(np.float64), temperature, top_k, top_p), atol=1e-6)


def test_ties_go_to_the_lowest_ids():
    flat = np.zeros((3, 6), np.float32)
    law = request_law(flat, np.array([1.0, 1.0, 0.0], np.float32), np.array([4, 0, 0]), np.array([1.0, 0.5, 1.0]))
    np.testing.assert_allclose(law, [[0.25] * 4 + [0, 0], [1 / 3] * 3 + [0] * 3, [1, 0, 0, 0, 0, 0]], rtol=1e-6)


def test_top_p_counts_the_mass_that_top_k_left():
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    law = request_law(logits, 1.0, 2, 0.56)  # of 4/7 and 3/7 the first is enough; of 0.4 and 0.3 it would not be
    np.testing.assert_allclose(law, [1, 0, 0, 0], atol=1e-6)


def test_parameters_of_a_request_cover_its_positions():
    logits = jax.random.normal(jax.random.key(0), (2, 3, V))
    rows = sampling_rows([SamplingParams(0.5, 2, 1.0), SamplingParams(0.0)])
    law = request_law(logits, *rows)
    for r in range(2):
        for g in range(3):
            alone = request_law(logits[r, g], rows.temperature_R[r], rows.top_k_R[r], rows.top_p_R[r])
            np.testing.assert_allclose(law[r, g], alone, rtol=1e-6)


def test_broken_rows_become_nan_and_leave_the_others_alone():
    logits = np.zeros((5, 4), np.float32)
    logits[0, 1], logits[1, 2], logits[2], logits[3, 0] = np.nan, np.inf, -np.inf, np.nan
    temperature = np.array([1, 1, 1, 0, 1], np.float32)
    law = request_law(logits, temperature, np.full(5, 3), np.full(5, 0.9, np.float32))
    assert np.isnan(law[:4]).all()
    np.testing.assert_allclose(law[4], [1 / 3, 1 / 3, 1 / 3, 0], rtol=1e-6)


def test_a_large_vocabulary_keeps_exactly_k():
    logits = jnp.round(jax.random.normal(jax.random.key(1), (2, 49152)), 1)  # thousands of ties
    law = jax.jit(request_law)(logits, jnp.ones(2), jnp.array([50, 1000]), jnp.ones(2))
    np.testing.assert_array_equal(np.sum(np.asarray(law) > 0, axis=1), [50, 1000])
    np.testing.assert_allclose(np.sum(law, axis=1), 1, rtol=1e-5)


@given(st.integers(0, 2**31))
def test_a_one_hot_law_gives_its_token(seed):
    ids = np.random.default_rng(seed).integers(0, 300, 16)
    keys = jax.random.split(jax.random.key(seed), 16)
    np.testing.assert_array_equal(jax.jit(sample_rows)(keys, np.eye(300, dtype=np.float32)[ids]), ids)


def test_draws_follow_the_law_and_never_leave_its_support():
    rng = np.random.default_rng(2)
    law = rng.gamma(0.5, size=300) * (rng.random(300) > 0.5)  # runs of 128 ids and a last, short one
    law[128:200] = 0
    law = (law / law.sum()).astype(np.float32)
    keys = jax.random.split(jax.random.key(5), 60_000)
    ids = jax.jit(jax.vmap(sample_law, in_axes=(0, None)))(keys, law)
    counts = np.bincount(ids, minlength=300)
    assert not counts[law == 0].any()
    seen = law > 1e-4
    expected = np.append(law[seen], law[~seen].sum()).astype(np.float64)
    observed = np.append(counts[seen], counts[~seen].sum())
    assert chisquare(observed, expected / expected.sum() * len(keys)).pvalue > 1e-3


def test_a_chance_below_the_grid_of_one_uniform_is_kept():
    law = jnp.array([1.0] + [0.0] * 255 + [1e-9])
    keys = jax.random.split(jax.random.key(6), 4096)
    assert not np.any(jax.jit(jax.vmap(sample_law, in_axes=(0, None)))(keys, law))


G, R, ANCHORS = 3, 4, np.array([4, 3, 0, 1])
D2T = np.array([2, 0, 4])


@functools.partial(jax.jit, static_argnames="greedy")
def markov_block(rows: SamplingRows, greedy: bool = False, seed: int = 0) -> tuple[BlockSample, jax.Array]:
    """A first-order head over five target tokens and three draft tokens; the state counts its steps."""
    rng = np.random.default_rng(0)
    base, inputs = rng.normal(size=(R, G, 3)).astype(np.float32), rng.normal(size=(R, G)).astype(np.float32)
    table = rng.normal(size=(5, 3)).astype(np.float32)

    def step(count, previous, scale):
        return count + 1, jnp.asarray(table)[previous] * scale[:, None] + count.astype(jnp.float32)[:, None]

    keys = jax.random.split(jax.random.key(seed), (R, G))
    state = jnp.zeros(R, jnp.int32)
    block = sample_block(step, state, ANCHORS, base, inputs, keys, rows, d2t_V=jnp.asarray(D2T), greedy=greedy)
    previous = jnp.concatenate([jnp.asarray(ANCHORS, jnp.int32)[:, None], block.tokens_RG[:, :-1]], 1)
    logits = base + jnp.asarray(table)[previous] * inputs[:, :, None] + np.arange(G, dtype=np.float32)[None, :, None]
    return block, logits


def test_block_sampler_feeds_target_ids_and_returns_the_law_it_drew_from():
    rows = sampling_rows(
        [SamplingParams(1.0), SamplingParams(0.5, 2), SamplingParams(1.0, 0, 0.6), SamplingParams(0.0)]
    )
    block, logits = markov_block(rows)
    np.testing.assert_array_equal(block.tokens_RG, D2T[block.draft_ids_RG])
    np.testing.assert_allclose(block.law_RGV, request_law(logits, *rows), rtol=1e-5)
    assert np.all(np.take_along_axis(np.asarray(block.law_RGV), np.asarray(block.draft_ids_RG)[..., None], 2) > 0)


def test_greedy_block_is_the_block_at_temperature_zero():
    rows = sampling_rows([SamplingParams(0.0)] * R)
    fast, logits = markov_block(rows, greedy=True)
    slow, _ = markov_block(rows, seed=1)
    assert fast.law_RGV is None
    np.testing.assert_array_equal(fast.tokens_RG, slow.tokens_RG)
    np.testing.assert_array_equal(fast.draft_ids_RG, logits.argmax(-1))


@pytest.mark.parametrize("seed", [1, 2])
def test_rows_have_their_own_streams(seed):
    """Each key decides its own draw only: a row's first draft does not move when other rows ask for something else."""
    mixed = sampling_rows([SamplingParams(1.0), SamplingParams(0.3), SamplingParams(1.0, 1), SamplingParams(0.0)])
    plain = sampling_rows([SamplingParams(1.0)] * R)
    np.testing.assert_array_equal(
        markov_block(mixed, seed=seed)[0].tokens_RG[0], markov_block(plain, seed=seed)[0].tokens_RG[0]
    )
