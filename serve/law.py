"""Do sampled texts follow the target's law? A chi-square test over every token of real texts.

Each token gets a place in [0, 1): the mass of the target's tokens that are likelier than it, plus a random part of its
own mass. If a token was drawn from that law, given the text before it, its place is uniform and independent of those
before it (the randomised probability integral transform), whatever the law. Verification that keeps too many drafts
leaves too many unlikely tokens, and places gather near 1.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaincc

from dspark_jax import Target

BINS = 10
LEAST = 5 * BINS  # tokens: the chi-square law is a bad approximation below five expected a bin


def places(
    target: Target, prompt: Sequence[int], text: Sequence[int], length: int, uniform_N: np.ndarray,
    temperatures: Sequence[float],
) -> np.ndarray:  # fmt: skip
    """Where the tokens of a text fall in the target's law at each of some temperatures: [temperatures, N].

    The row is padded to `length` tokens, so that texts share one program; `uniform_N` draws the part of the own mass.
    """
    row_S = np.zeros(length, np.int32)
    row_S[: len(prompt) + len(text)] = [*prompt, *text]
    logits_SV = target.forward(jnp.asarray(row_S)[None]).logits_BSV[0]
    logits_NV = np.asarray(logits_SV[len(prompt) - 1 : len(prompt) - 1 + len(text)])
    token_N1 = np.asarray(text)[:, None]
    own_N1 = np.take_along_axis(logits_NV, token_N1, axis=1)
    # Equal logits come in order of their ids.
    ahead_NV = (logits_NV > own_N1) | ((logits_NV == own_N1) & (np.arange(logits_NV.shape[1])[None, :] < token_N1))
    result = []
    for temperature in temperatures:
        weight_NV = np.exp((logits_NV - logits_NV.max(axis=1, keepdims=True)) / np.float32(temperature))
        own_N = np.take_along_axis(weight_NV, token_N1, axis=1)[:, 0]
        above_N = np.where(ahead_NV, weight_NV, 0).sum(axis=1, dtype=np.float64)
        result.append((above_N + uniform_N * own_N) / weight_NV.sum(axis=1, dtype=np.float64))
    return np.stack(result)


def uniform_test(places_N: np.ndarray) -> tuple[float, float] | None:
    """Chi-square statistic over equal bins and its p-value; None for too few tokens."""
    if places_N.size < LEAST:
        return None
    count = np.bincount(np.minimum((places_N * BINS).astype(np.int64), BINS - 1), minlength=BINS)
    expected = places_N.size / BINS
    statistic = float(((count - expected) ** 2 / expected).sum())
    return statistic, float(gammaincc((BINS - 1) / 2, statistic / 2))
