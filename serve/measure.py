"""Statistics of a benchmark: pure functions of decoded texts and their rounds. No clock, no model.

Positions are counted from 1 in words and from 0 in lists: entry 0 of `acceptance_by_position` is the first draft.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from dspark_jax.generate import Generation


class RoundCounts(NamedTuple):
    """One entry a round: drafts accepted, drafts that had a chance, and tokens added to the text."""

    accepted_N: np.ndarray
    attempted_N: np.ndarray
    emitted_N: np.ndarray


def count_rounds(generations: Sequence[Generation], eos_token_ids: Collection[int] = ()) -> RoundCounts:
    """The rounds of all texts. Where an accepted draft ends the text, nothing after it counts, either way.

    A last round cut short by the limit of new tokens counts whole: the limit says nothing about the drafter.
    """
    counts = []
    for round_ in (round_ for generation in generations for round_ in generation.rounds):
        ends = [i for i, token in enumerate(round_.draft[: round_.accepted]) if token in eos_token_ids]
        if ends:
            counts.append((ends[0] + 1, ends[0] + 1, ends[0] + 1))
        else:
            counts.append((round_.accepted, len(round_.draft), round_.accepted + 1))
    return RoundCounts(*np.array(counts, np.int64).reshape(-1, 3).T)


def accepted_length(counts: RoundCounts) -> float | None:
    """Mean tokens a round adds, the target's own included (the paper's tau). None without rounds."""
    return float(counts.emitted_N.mean()) if counts.emitted_N.size else None


def acceptance_by_position(counts: RoundCounts, num_drafts: int) -> list[float | None]:
    """P(draft k accepted), for k = 1..G: it and all drafts before it. None where no round came so far."""
    return [
        _share(counts.accepted_N >= k, counts.attempted_N >= k) for k in range(1, num_drafts + 1)
    ]  # fmt: skip


def conditional_acceptance_by_position(counts: RoundCounts, num_drafts: int) -> list[float | None]:
    """P(draft k accepted | drafts before it accepted), for k = 1..G. None where no round came so far."""
    return [
        _share(counts.accepted_N >= k, (counts.accepted_N >= k - 1) & (counts.attempted_N >= k))
        for k in range(1, num_drafts + 1)
    ]


def _share(hit_N: np.ndarray, of_N: np.ndarray) -> float | None:
    return float((hit_N & of_N).sum() / of_N.sum()) if of_N.any() else None


def bootstrap(
    statistic: Callable[[np.ndarray], float], size: int, samples: int = 1000, level: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of `statistic(indices)` over `size` units drawn with replacement; same seed, same interval.

    Units must be independent: prompts or batches, not rounds, which depend on each other within a text.
    """
    rng = np.random.default_rng(seed)
    return interval(np.array([statistic(rng.integers(0, size, size)) for _ in range(samples)]), level)


def interval(draws: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """The middle `level` of bootstrap draws."""
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


class PromptCounts(NamedTuple):
    """One entry a prompt: tokens that its rounds added, and how many rounds it had."""

    emitted_N: np.ndarray
    rounds_N: np.ndarray


def count_prompts(generations: Sequence[Generation], eos_token_ids: Collection[int] = ()) -> PromptCounts:
    """The accepted length of some prompts is the sum of the first over the sum of the second."""
    counts = [count_rounds([generation], eos_token_ids) for generation in generations]
    return PromptCounts(np.array([c.emitted_N.sum() for c in counts]), np.array([c.emitted_N.size for c in counts]))


def accepted_length_draws(sets: Sequence[PromptCounts], samples: int = 1000, seed: int = 0) -> np.ndarray:
    """Bootstrap draws of the mean over sets of their accepted lengths; prompts are drawn within each set.

    Every prompt must have rounds. Sets of the same sizes and the same seed draw the same prompts: differences of two
    results are then paired.
    """
    draws = np.zeros(samples)
    for number, counts in enumerate(sets):
        size = counts.rounds_N.size
        index = np.random.default_rng((seed, number)).integers(0, size, (samples, size))
        draws += counts.emitted_N[index].sum(axis=1) / counts.rounds_N[index].sum(axis=1)
    return draws / len(sets)


def accepted_length_interval(
    generations: Sequence[Generation], eos_token_ids: Collection[int] = ()
) -> tuple[float, float] | None:
    """95 % bootstrap interval of the accepted length over prompts. None for fewer than two prompts with rounds."""
    counts = count_prompts([generation for generation in generations if generation.rounds], eos_token_ids)
    return interval(accepted_length_draws([counts])) if counts.rounds_N.size >= 2 else None


class Speed(NamedTuple):
    """Tokens of a batch after the first of each text, and the seconds they took."""

    tokens: int
    seconds: float


def tokens_per_second(speeds: Sequence[Speed]) -> float | None:
    """Of all batches together. None where every text ended with its first token."""
    tokens, seconds = sum(s.tokens for s in speeds), sum(s.seconds for s in speeds)
    return tokens / seconds if tokens else None


def speedup(plain: Sequence[Speed], draft: Sequence[Speed]) -> tuple[float | None, tuple[float, float] | None]:
    """Drafted tokens a second over plain ones, and its 95 % bootstrap interval over batches (two or more).

    Batch i is the same prompts in both, decoded one right after the other, so that noise of the machine cancels.
    """
    fast, slow = tokens_per_second(draft), tokens_per_second(plain)
    ratio = fast / slow if fast and slow else None
    pairs = np.array([(*p, *d) for p, d in zip(plain, draft, strict=True) if p.tokens and d.tokens]).reshape(-1, 4)
    if len(pairs) < 2:
        return ratio, None

    def of(index: np.ndarray) -> float:
        plain_tokens, plain_seconds, draft_tokens, draft_seconds = pairs[index].sum(axis=0)
        return draft_tokens / draft_seconds * plain_seconds / plain_tokens

    return ratio, bootstrap(of, len(pairs))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token in which two texts differ, or at which only one goes on; None for equal texts."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def logit_margin(logits_V: np.ndarray, one: int, other: int) -> float:
    """How far the lower of two tokens' logits lies below the highest of all: near 0, both were as good as a tie."""
    return float(logits_V.max() - min(logits_V[one], logits_V[other]))
