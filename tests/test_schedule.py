"""Prefix schedules against plain-Python references, and the condition that makes them lossless."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.config import ConfigError
from dspark_jax.schedule import admit_top, capacity_from_stale, prefix_schedule, prefix_survival, threshold_lengths

R, G = 3, 3
EIGHTHS = st.lists(st.integers(0, 8), min_size=R * G, max_size=R * G)  # exact in float32, with many ties


def grid(eighths: list[int]) -> np.ndarray:
    return np.array(eighths, np.float32).reshape(R, G) / 8


def reveal(confidence: np.ndarray, keep_going) -> list[int]:
    """Admit the largest next survival of any request, ties to the lowest (position, request), while told to."""
    survival, lengths = np.cumprod(confidence, axis=1), [0] * len(confidence)
    admitted: list[float] = []
    while True:
        frontier = [(-survival[r, n], n, r) for r, n in enumerate(lengths) if n < G and survival[r, n] > 0]
        if not frontier:
            return lengths
        value, _, request = min(frontier)
        if not keep_going(admitted, -value):
            return lengths
        admitted.append(-value)
        lengths[request] += 1


@given(EIGHTHS, st.lists(st.integers(1, 64), min_size=R * G + R + 1, max_size=R * G + R + 1))
def test_algorithm_1_is_the_sequential_one(eighths, steps):
    curve = np.sort(np.array(steps, np.float32))[::-1] / 64

    def keep_going(admitted, value):
        total = R + sum(admitted)
        return (total + value) * curve[R + len(admitted) + 1] > total * curve[R + len(admitted)]

    lengths = jax.jit(prefix_schedule)(grid(eighths), curve)
    assert lengths.tolist() == reveal(grid(eighths), keep_going)


@given(EIGHTHS, st.integers(0, R * G + 2))
def test_admission_is_the_sequential_one(eighths, capacity):
    lengths = jax.jit(admit_top)(jax.jit(prefix_survival)(grid(eighths)), capacity)
    assert lengths.tolist() == reveal(grid(eighths), lambda admitted, _: len(admitted) < capacity)


@jax.jit
def all_rules(confidence, capacity):
    curve = np.linspace(1.0, 0.4, R * G + R + 1)
    return (
        prefix_schedule(confidence, curve),
        admit_top(prefix_survival(confidence), capacity),
        threshold_lengths(confidence, 0.5),
    )


@given(EIGHTHS, EIGHTHS, st.integers(0, R - 1), st.integers(1, G), st.integers(0, R * G))
def test_what_a_draft_decides_never_decides_about_it(eighths, others, row, k, capacity):
    """{length_r >= k} is the same for any confidences of that row after c_k, which draft k may have shaped."""
    one, other = grid(eighths), grid(eighths)
    other[row, k:] = grid(others)[row, k:]
    for before, after in zip(all_rules(one, capacity), all_rules(other, capacity), strict=True):
        assert (before[row] >= k) == (after[row] >= k)


@given(EIGHTHS, st.lists(st.integers(1, 64), min_size=R * G + R + 1, max_size=R * G + R + 1), st.integers(1, R))
def test_algorithm_1_counts_the_requests_that_are_there(eighths, steps, active):
    """A bucket with empty rows: lengths are those of its requests alone, under the same curve."""
    curve, confidence = np.sort(np.array(steps, np.float32))[::-1] / 64, grid(eighths)
    confidence[active:] = 0.0
    lengths = jax.jit(prefix_schedule)(confidence, curve, active).tolist()
    assert lengths == [*prefix_schedule(confidence[:active], curve).tolist(), *[0] * (R - active)]


def test_algorithm_1_stops_at_the_first_step_down():
    curve = [0.0, 1.0, 0.5, 0.9, 0.9]
    assert prefix_schedule(np.ones((1, 3), np.float32), curve).tolist() == [0]
    assert prefix_schedule(np.ones((1, 3), np.float32), [0.0, 1.0, 0.9, 0.9, 0.1]).tolist() == [2]


def test_length_zero_for_everyone_is_reachable():
    assert prefix_schedule(np.full((2, 3), 0.5), 1 / np.arange(1, 10)).tolist() == [0, 0]
    assert admit_top(np.zeros((2, 3)), 4).tolist() == [0, 0]
    assert admit_top(np.ones((2, 3)), 0).tolist() == [0, 0]


def test_ties_go_by_position_then_request():
    for capacity, lengths in [(1, [1, 0]), (2, [1, 1]), (3, [2, 1]), (4, [2, 2])]:
        assert admit_top(np.ones((2, 2)), capacity).tolist() == lengths


def test_a_nan_confidence_ends_its_own_prefix_only():
    confidence = np.array([[0.9, np.nan, 0.9], [0.9, 0.8, 0.7]])
    assert prefix_schedule(confidence, np.ones(9)).tolist() == [1, 3]
    assert threshold_lengths(confidence, 0.1).tolist() == [1, 3]
    assert admit_top(np.cumprod(confidence, axis=1), 6).tolist() == [1, 3]


def test_threshold_keeps_the_leading_confidences():
    confidence = np.array([[0.9, 0.4, 0.9], [0.5, 0.5, 0.5], [0.1, 1.0, 1.0]])
    assert threshold_lengths(confidence, 0.5).tolist() == [1, 3, 0]


def test_schedules_compile_with_traced_capacity_and_threshold():
    confidence = jnp.array([[0.9, 0.8], [0.7, 0.1]])
    assert jax.jit(admit_top)(prefix_survival(confidence), jnp.int32(3)).tolist() == [2, 1]
    assert jax.jit(threshold_lengths)(confidence, 0.5).tolist() == [2, 1]
    assert jax.jit(prefix_schedule)(confidence, jnp.ones(7)).tolist() == [2, 2]


def test_survival_never_rises():
    confidence = np.random.default_rng(0).uniform(0.999, 1.0, (64, 16))
    assert np.all(np.diff(prefix_survival(confidence), axis=1) <= 0)


def test_capacity_looks_past_a_cliff():
    survival = np.array([[0.9, 0.8, 0.7], [0.9, 0.6, 0.1]])
    # expected tokens with 0, 2, 6 drafts: 2, 3.8, 6
    assert capacity_from_stale(survival, [1.0, 2.0, 2.5], [2, 4, 8]) == 6
    assert capacity_from_stale(survival, [1.0, 1.5, 3.5], [2, 4, 8]) == 2
    assert capacity_from_stale(survival, [1.0, 2.0, 3.5], [2, 4, 8]) == 0
    assert capacity_from_stale(survival, [3.5, 1.0, 2.0], [8, 2, 4]) == 0  # in any order
    assert capacity_from_stale(survival, [1.0, 1.0], [1, 64]) == 6  # edge 1 cannot hold two requests


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: prefix_schedule(np.ones((2, 3)), np.ones(8)), "0..8 packed tokens"),
        (lambda: capacity_from_stale(np.ones((2, 3)), [1.0], [2, 4]), "one time for each edge"),
        (lambda: capacity_from_stale(np.ones((2, 3)), [1.0], [1]), "cannot hold 2 requests"),
        (lambda: capacity_from_stale(np.ones((2, 3)), [0.0], [2]), "positive"),
    ],
)
def test_sizes_that_do_not_fit_are_named(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
