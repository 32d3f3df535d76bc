"""Is the confidence head still calibrated? A running calibration error over verified drafts. No jax."""

import math

import numpy as np

BINS = 20
MEMORY = 0.999  # a request's part of a round weighs half after some 700 more, of whatever requests
LEAST = 200  # verified drafts before there is anything to say
ALARM, CALM = 0.1, 0.05  # error beyond chance that raises the alarm, and below which it may be raised again


class DriftMonitor:
    """Predicted survival of verified prefixes against what the target accepted, by position, forgetting slowly.

    Only verified positions have a label. Which ones those are depends on earlier tokens and confidences alone, so
    the labels are fair; but the scheduler verifies likely drafts more often, and the bins are weighted accordingly.
    """

    def __init__(self, num_drafts: int) -> None:
        self._count, self._prediction, self._label = np.zeros((3, num_drafts, BINS))
        self._raised = False

    def observe(self, survival_G: np.ndarray, length: int, accepted: int) -> None:
        """One request's part of a round: the first `length` drafts were verified, `accepted` of them stood."""
        for array in (self._count, self._prediction, self._label):
            array *= MEMORY
        for position in range(length):
            survival = float(survival_G[position])
            index = min(int(survival * BINS), BINS - 1) if survival == survival else 0
            self._count[position, index] += 1
            self._prediction[position, index] += survival if survival == survival else 0.0
            self._label[position, index] += accepted > position

    def error_by_position(self) -> list[float | None]:
        """Expected calibration error of each position's survival; None before any verification there."""
        gap = np.abs(self._prediction - self._label).sum(axis=1)
        count = self._count.sum(axis=1)
        return [float(g / c) if c else None for g, c in zip(gap, count, strict=True)]

    @property
    def error(self) -> float | None:
        """Over all positions, weighted by how often they were verified."""
        count = self._count.sum()
        return float(np.abs(self._prediction - self._label).sum() / count) if count else None

    @property
    def excess(self) -> float:
        """The error beyond what as many drafts of a calibrated head would show by chance; 0 while there are few."""
        count, error = self._count.sum(), self.error
        if error is None or count < LEAST:
            return 0.0
        share = self._prediction / np.maximum(self._count, 1e-9)
        spread = np.sqrt(np.maximum(self._prediction * (1 - share), 0.0)).sum()  # of the accepted ones in each bin
        return error - math.sqrt(2 / math.pi) * float(spread / count)

    def alarm(self) -> bool:
        """True once when the confidences have drifted, and again only after they had come back."""
        before, excess = self._raised, self.excess
        self._raised = excess > (CALM if before else ALARM)
        return self._raised and not before
