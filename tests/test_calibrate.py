"""Sequential temperature scaling recovers known temperatures; the measures match their definitions."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.calibrate import (
    TEMPERATURE_GRID,
    auroc,
    brier,
    expected_calibration_error,
    fit_temperatures,
    reliability,
    survival,
)
from dspark_jax.config import ConfigError

N, TRUE = 20_000, np.array([2.0, 0.5, 4.0])


def rollouts(seed: int, count: int = N) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are wrong by the factors TRUE, and how many drafts each block had accepted."""
    rng = np.random.default_rng(seed)
    honest = rng.normal(1.0, 1.5, (count, 3))
    passed = rng.random((count, 3)) < 1 / (1 + np.exp(-honest))
    return honest * TRUE, np.cumprod(passed, axis=1).sum(1)


def test_fit_recovers_the_temperatures_and_calibrates_a_third_split():
    logits, accepted = rollouts(0)
    temperatures = fit_temperatures(logits, accepted)
    assert np.all(np.abs(np.log(temperatures / TRUE)) < 0.3)
    logits, accepted = rollouts(1)
    before, after = survival(logits, np.ones(3)), survival(logits, temperatures)
    for k in range(3):
        label = accepted > k
        error = expected_calibration_error(after[:, k], label)
        assert error < 0.02
        assert error < 0.5 * expected_calibration_error(before[:, k], label)
        assert brier(after[:, k], label) < brier(before[:, k], label)


def test_later_temperatures_do_not_move_earlier_ones():
    logits, accepted = rollouts(2, 2000)
    alone = fit_temperatures(logits[:, :1], np.minimum(accepted, 1))
    assert fit_temperatures(logits, accepted)[0] == alone[0]


def test_masked_positions_are_dropped():
    logits, accepted = rollouts(3, 2000)
    mask = np.ones(logits.shape, bool)
    mask[1000:, 1:] = False
    spoiled = np.where(mask, logits, np.nan)
    expected = fit_temperatures(logits[:1000], accepted[:1000])
    got = fit_temperatures(spoiled, accepted, mask)
    assert got[0] == fit_temperatures(logits, accepted)[0]
    assert np.all(np.abs(np.log(got[1:] / expected[1:])) < 0.7)
    mask[:, 2] = False
    assert fit_temperatures(spoiled, accepted, mask)[2] == 1.0


def test_the_grid_is_the_published_one():
    assert len(TEMPERATURE_GRID) == 49
    np.testing.assert_allclose(TEMPERATURE_GRID[[0, 24, 48]], [0.125, 1.0, 8.0])


def test_survival_is_the_product_of_scaled_sigmoids():
    logits = np.array([[0.0, np.log(3.0)]])
    np.testing.assert_allclose(jax.jit(survival)(logits, np.array([5.0, 1.0])), [[0.5, 0.375]], rtol=1e-6)


def test_calibration_error_by_hand():
    prediction, label = [0.1, 0.1, 0.9, 1.0], [0, 1, 1, 1]
    assert expected_calibration_error(prediction, label, bins=2) == pytest.approx(0.5 * 0.4 + 0.5 * 0.05)
    assert expected_calibration_error([], []) == 0.0


def test_reliability_bins():
    table = reliability([0.0, 0.04, 0.52, 1.0], [0, 1, 1, 1], bins=20)
    assert table.count.sum() == 4
    assert (table.count[0], table.count[10], table.count[19]) == (2, 1, 1)
    assert table.mean_label[0] == 0.5
    assert table.mean_prediction[0] == pytest.approx(0.02)
    assert np.isnan(table.mean_label[5])


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=12))
def test_auroc_counts_pairs(pairs):
    prediction, label = np.array([p for p, _ in pairs]) / 4, np.array([y for _, y in pairs])
    wins = [(a > b) + 0.5 * (a == b) for a in prediction[label] for b in prediction[~label]]
    expected = np.mean(wins) if wins else np.nan
    np.testing.assert_allclose(auroc(prediction, label), expected)


def test_brier():
    assert brier([0.5, 1.0], [1, 1]) == 0.125
    assert np.isnan(brier([], []))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros((4, 2)), np.zeros(3)), r"expected \[N, G\], \[N\]"),
        ((np.zeros((4, 2)), np.full(4, 3)), r"expected 0\.\.2"),
        ((np.zeros((4, 2)), np.zeros(4), np.ones((4, 3), bool)), "mask"),
        ((np.full((4, 2), np.nan), np.zeros(4)), "NaN"),
    ],
)
def test_unusable_data_is_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        fit_temperatures(*arguments)
