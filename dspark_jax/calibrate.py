"""Calibration of the confidence head: sequential temperature scaling and the measures that judge it.

The scheduler multiplies confidences into survivals, so the product is what must be calibrated: even a perfect
conditional confidence gives a biased product, because the drafts that survive are not a random sample
(DSpark paper, section on calibration). Labels are hard prefix acceptances from real rollouts with the
deployed temperature and verifier, all G positions verified. Host code in float64; N counts blocks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dspark_jax.config import ConfigError
from dspark_jax.schedule import prefix_survival

TEMPERATURE_GRID = np.geomspace(0.125, 8.0, 49)  # log-spaced, 1.0 in the middle


class Reliability(NamedTuple):
    """A reliability diagram: equal-width bins of the prediction. Means are NaN where a bin is empty."""

    count: np.ndarray
    mean_prediction: np.ndarray
    mean_label: np.ndarray


def survival(logits_NG: ArrayLike, temperatures_G: ArrayLike) -> Array:
    """Calibrated chance that the first j drafts all stand: float32, never rising along a block. Jittable."""
    scaled_NG = jnp.asarray(logits_NG).astype(jnp.float32) / jnp.asarray(temperatures_G).astype(jnp.float32)[None, :]
    return prefix_survival(jax.nn.sigmoid(scaled_NG))


def fit_temperatures(
    confidence_logits_NG: ArrayLike,
    accepted_N: ArrayLike,
    mask_NG: ArrayLike | None = None,
    grid: np.ndarray = TEMPERATURE_GRID,
    bins: int = 20,
) -> np.ndarray:
    """One temperature a position, left to right: temperatures_G, float32.

    Position k takes the grid value that minimises the expected calibration error of the product of the first k
    scaled confidences against "at least k drafts were accepted", earlier temperatures fixed; ties, and positions
    without data, go to the value nearest 1. `mask_NG` False drops positions, such as those past an end of
    sequence. ConfigError for shapes that do not match, counts outside 0..G, and logits that are not finite.
    """
    logits = np.asarray(confidence_logits_NG, np.float64)
    accepted = np.asarray(accepted_N)
    if logits.ndim != 2 or accepted.shape != logits.shape[:1]:
        raise ConfigError(
            f"confidence logits {logits.shape} with accepted counts {accepted.shape}: expected [N, G], [N]"
        )
    mask = np.ones(logits.shape, bool) if mask_NG is None else np.asarray(mask_NG, bool)
    if mask.shape != logits.shape:
        raise ConfigError(f"calibration mask {mask.shape} does not match the confidence logits {logits.shape}")
    if accepted.size and not (accepted.min() >= 0 and accepted.max() <= logits.shape[1]):
        raise ConfigError(f"accepted counts span {accepted.min()}..{accepted.max()}: expected 0..{logits.shape[1]}")
    if not np.all(np.isfinite(logits[mask])):
        raise ConfigError("confidence logits hold NaN or infinity: drop those blocks, or mask them, before calibrating")
    by_distance = np.asarray(grid, np.float64)[np.argsort(np.abs(np.log(grid)), kind="stable")]
    temperatures = np.ones(logits.shape[1])
    product = np.ones(logits.shape[0])
    for k in range(logits.shape[1]):
        kept = mask[:, k]
        label = accepted[kept] > k
        errors = [
            expected_calibration_error(product[kept] * _sigmoid(logits[kept, k] / t), label, bins) for t in by_distance
        ]
        temperatures[k] = by_distance[int(np.argmin(errors))]
        product = product * _sigmoid(np.where(kept, logits[:, k], 0.0) / temperatures[k])
    return temperatures.astype(np.float32)


def reliability(prediction_N: ArrayLike, label_N: ArrayLike, bins: int = 20) -> Reliability:
    """Counts and means over equal-width bins of [0, 1]; predictions outside fall in the end bins."""
    prediction, label = np.asarray(prediction_N, np.float64), np.asarray(label_N, np.float64)
    index = np.clip((prediction * bins).astype(np.int64), 0, bins - 1)
    count = np.bincount(index, minlength=bins)
    empty = np.full(bins, np.nan)
    mean_prediction, mean_label = (
        np.divide(np.bincount(index, weights=x, minlength=bins), count, out=empty.copy(), where=count > 0)
        for x in (prediction, label)
    )
    return Reliability(count, mean_prediction, mean_label)


def expected_calibration_error(prediction_N: ArrayLike, label_N: ArrayLike, bins: int = 20) -> float:
    """Mean over predictions of |mean prediction - mean label| of their bin; 0 for no data."""
    count, mean_prediction, mean_label = reliability(prediction_N, label_N, bins)
    gap = np.nan_to_num(np.abs(mean_prediction - mean_label))
    return float(np.sum(count * gap) / max(int(np.sum(count)), 1))


def brier(prediction_N: ArrayLike, label_N: ArrayLike) -> float:
    """Mean squared error of predicted probabilities; NaN for no data."""
    error = np.asarray(prediction_N, np.float64) - np.asarray(label_N, np.float64)
    return float(np.mean(np.square(error))) if error.size else float("nan")


def auroc(prediction_N: ArrayLike, label_N: ArrayLike) -> float:
    """Chance that a positive outranks a negative, ties counting half; NaN unless both labels occur."""
    prediction, positive = np.asarray(prediction_N, np.float64), np.asarray(label_N, bool)
    num_positive, num_negative = int(np.sum(positive)), int(np.sum(~positive))
    if num_positive == 0 or num_negative == 0:
        return float("nan")
    _, group, size = np.unique(prediction, return_inverse=True, return_counts=True)
    mean_rank = (np.cumsum(size) - (size - 1) / 2)[group]  # 1-based, ties share the mean
    wins = np.sum(mean_rank[positive]) - num_positive * (num_positive + 1) / 2
    return float(wins / (num_positive * num_negative))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))  # no overflow at either end
