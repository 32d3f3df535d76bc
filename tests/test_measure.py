"""Benchmark statistics against cases worked out by hand."""

import numpy as np
import pytest

from dspark_jax.generate import Generation, Round
from serve import measure
from serve.measure import Speed

EOS = 9


def generation(*rounds: tuple[list[int], int]) -> Generation:
    return Generation([], [Round(draft, accepted, None) for draft, accepted in rounds])


# Four rounds of three drafts: 3, 0, 1 and 1 accepted.
TEXTS = [generation(([1, 2, 3], 3), ([4, 5, 6], 0)), generation(([1, 1, 1], 1), ([2, 2, 2], 1))]


def test_accepted_length_counts_the_targets_own_token():
    assert measure.accepted_length(measure.count_rounds(TEXTS)) == (4 + 1 + 2 + 2) / 4


def test_acceptance_by_position():
    counts = measure.count_rounds(TEXTS)
    assert measure.acceptance_by_position(counts, 3) == [3 / 4, 1 / 4, 1 / 4]
    assert measure.conditional_acceptance_by_position(counts, 3) == [3 / 4, 1 / 3, 1.0]


def test_length_is_one_plus_the_sum_of_acceptances():
    counts = measure.count_rounds(TEXTS)
    shares = [share or 0.0 for share in measure.acceptance_by_position(counts, 3)]
    assert measure.accepted_length(counts) == pytest.approx(1 + sum(shares))


def test_nothing_counts_after_an_accepted_end_of_sequence():
    text = generation(([1, 2, 3], 3), ([4, EOS, 5], 3))
    counts = measure.count_rounds([text], {EOS})
    assert counts.emitted_N.tolist() == [4, 2]  # the target adds no token after the end
    # Both rounds had a second draft, only the first a third.
    assert counts.attempted_N.tolist() == [3, 2]
    assert measure.acceptance_by_position(counts, 3) == [1.0, 1.0, 1.0]


def test_a_rejected_end_of_sequence_ends_nothing():
    counts = measure.count_rounds([generation(([1, EOS, 3], 1))], {EOS})
    assert (counts.accepted_N.tolist(), counts.attempted_N.tolist(), counts.emitted_N.tolist()) == ([1], [3], [2])


def test_what_never_happened_has_no_share():
    never = measure.count_rounds([generation(([1, 2, 3], 0))])
    assert measure.conditional_acceptance_by_position(never, 3) == [0.0, None, None]
    empty = measure.count_rounds([Generation([EOS], [])])
    assert measure.accepted_length(empty) is None
    assert measure.acceptance_by_position(empty, 3) == [None] * 3


def test_bootstrap_is_deterministic_and_covers_the_mean():
    values_N = np.random.default_rng(3).normal(5.0, 1.0, 400)

    def mean(index: np.ndarray) -> float:
        return float(values_N[index].mean())

    low, high = measure.bootstrap(mean, 400)
    assert (low, high) == measure.bootstrap(mean, 400)
    assert (low, high) != measure.bootstrap(mean, 400, seed=1)
    # The interval of a mean is about 1.96 standard errors either way.
    error = values_N.std() / 20
    assert low == pytest.approx(values_N.mean() - 1.96 * error, abs=0.5 * error)
    assert high == pytest.approx(values_N.mean() + 1.96 * error, abs=0.5 * error)


def test_interval_of_accepted_length_draws_prompts():
    # By prompt 5/2 and 4/2 tokens a round: resampling two prompts gives nothing outside them, and both ends.
    assert measure.accepted_length_interval(TEXTS) == (2.0, 2.5)
    assert measure.accepted_length_interval(TEXTS[:1]) is None
    assert measure.accepted_length_interval([TEXTS[0], Generation([EOS], [])]) is None


def test_speedup_is_the_ratio_of_whole_speeds():
    plain, draft = [Speed(10, 1.0), Speed(30, 3.0)], [Speed(10, 0.5), Speed(30, 1.5)]
    ratio, interval = measure.speedup(plain, draft)
    assert ratio == pytest.approx(2.0)
    assert interval == pytest.approx((2.0, 2.0))
    assert measure.speedup(plain[:1], draft[:1]) == (pytest.approx(2.0), None)
    assert measure.speedup([Speed(0, 0.0)], [Speed(0, 0.0)]) == (None, None)


@pytest.mark.parametrize(
    ("one", "other", "position"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [], None), ([], [1], 0)],
)
def test_first_difference(one: list[int], other: list[int], position: int | None):
    assert measure.first_difference(one, other) == position


def test_logit_margin_is_that_of_the_worse_token():
    logits_V = np.array([0.0, 3.0, 2.5, 2.75], np.float32)
    assert measure.logit_margin(logits_V, 1, 3) == 0.25
    assert measure.logit_margin(logits_V, 3, 1) == 0.25
    assert measure.logit_margin(logits_V, 2, 3) == 0.5  # neither is the best
