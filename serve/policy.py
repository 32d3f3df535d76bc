"""How many tokens the next round verifies, decided on the host from finished rounds. No jax.

    off               plain decoding
    fixed:K           the first K drafts of every request
    threshold:C       drafts before the first confidence below C, as far as a round of their usual number has room
    scheduled         the capacity with most expected tokens a second on the profiled curve (paper 5.2); the default
    scheduled:sync    the paper's Algorithm 1 on current confidences; the host waits for them

What the host knows when it decides is two rounds old, which keeps the decision independent of the drafts it is about.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from dspark_jax.config import ConfigError
from dspark_jax.schedule import capacity_from_stale
from serve.curves import Curves

Kind = Literal["off", "fixed", "threshold", "scheduled", "sync"]
DEFAULT = "scheduled"
PROBE_EVERY = 16  # rounds of one kind after which one is of the other: moods of drafter and machine change
LONGEST_WAIT = 128  # a probe that changes nothing makes the next one wait twice as long, up to this
FIRST_PROBE = 4  # the first plain one, sooner: until then a plain round's time is known from the profile alone
MEMORY = 0.95  # of the running means over rounds
TEXT_MEMORY = 0.7  # of a text's own running mean: one round's confidences say little about the round after next
LARGEST_SLIP = 4.0  # a round that took longer than this many times its profile was held up by something else


@dataclasses.dataclass(frozen=True)
class PolicySpec:
    """A parsed policy; `value` is K or C."""

    kind: Kind
    value: float = 0.0


def parse(text: str, num_drafts: int) -> PolicySpec:
    """Raises ConfigError for anything that is not one of the forms above."""
    name, _, value = text.partition(":")
    if not num_drafts and text != "off":
        raise ConfigError(f"policy {text!r}: there is no drafter here, so the only policy is off")
    if text in ("off", "scheduled"):
        return PolicySpec(text)
    if text == "scheduled:sync":
        return PolicySpec("sync")
    if name == "fixed" and value.isdigit() and 1 <= int(value) <= num_drafts:
        return PolicySpec("fixed", int(value))
    if name == "threshold":
        try:
            threshold = float(value)
        except ValueError:
            threshold = -1.0
        if 0 < threshold <= 1:
            return PolicySpec("threshold", threshold)
    raise ConfigError(
        f"policy {text!r}: expected off, fixed:K with K from 1 to {num_drafts}, threshold:C with C in (0, 1],"
        " scheduled or scheduled:sync"
    )


class Choice(NamedTuple):
    """The next round: `tokens` packed places, 0 for a plain round, and the knobs that are not at rest."""

    tokens: int
    by_survival: bool = True
    threshold: float = 0.0
    longest: int | None = None


class Policy:
    """Remembers what finished rounds showed; `choose` is called before each dispatch."""

    def __init__(self, spec: PolicySpec, num_drafts: int, token_buckets: Mapping[int, Sequence[int]]) -> None:
        self.spec, self.num_drafts, self.token_buckets = spec, num_drafts, token_buckets
        self._survival: dict[int, np.ndarray] = {}  # by text: a running mean
        # Before anything is known. Optimism here would open every run with the longest blocks; half is enough to draft
        # where drafts are cheap, and where they are not, probing finds out.
        self._mean_survival = 0.5 ** np.arange(1, num_drafts + 1)
        self._mean_length = float(num_drafts)
        self._plain_rounds, self._drafting_wait = 0, PROBE_EVERY  # since the last drafting round, and until a probe
        self._drafting_rounds, self._plain_wait = 0, FIRST_PROBE  # the other way round
        self._predicted, self._stood = 1.0, 1.0
        self._taken_G, self._tried_G = np.ones(num_drafts), np.full(num_drafts, 2.0)
        self._slip: dict[tuple[int, bool], tuple[float, float]] = {}  # by bucket and kind of round: sum of logs, weight

    @property
    def prior_G(self) -> np.ndarray:
        """Share of verified drafts that stood, by position, given those before: for drafters without confidences.
        Coarsely rounded, so that the device hears of a change only when there is one."""
        return np.clip(np.round(self._taken_G / self._tried_G * 16) / 16, 1 / 16, 15 / 16)

    @property
    def trust(self) -> float:
        """How many of the drafts that were expected to stand did: survivals are multiplied by it. The drafts that get
        verified are those that look best, so even a calibrated head promises a little too much about them, and a head
        calibrated for another temperature a lot."""
        return float(np.clip(self._stood / self._predicted, 0.1, 1.2))

    def choose(self, texts: Sequence[int], bucket: int, curves: Curves | None, sampled: bool) -> Choice:
        """The round for these texts. `bucket` is their requests bucket, `curves` the profiled seconds."""
        kind, count = self.spec.kind, len(texts)
        if kind == "off":
            return Choice(0)
        edges = [t for t in self.token_buckets[bucket] if t > count]
        if kind == "fixed":
            wanted = count * (int(self.spec.value) + 1)
            return Choice(_at_least(edges, wanted), by_survival=False, longest=int(self.spec.value))
        if kind == "threshold":
            return Choice(_at_least(edges, round(count * (self._mean_length + 1))), False, self.spec.value)
        assert curves is not None, "a scheduled policy needs a profile"
        survival_RG = np.stack([self._survival.get(text, self._mean_survival) for text in texts])
        survival_RG = np.minimum(survival_RG * self.trust, 1.0)
        plain = curves.plain(bucket, sampled) * self.slip(bucket, drafted=False)
        drafting = np.array([curves.draft(bucket, t, sampled) for t in edges]) * self.slip(bucket, drafted=True)
        capacity = capacity_from_stale(survival_RG, [plain, *drafting], [count, *edges])
        if capacity == 0:
            self._drafting_rounds, self._plain_wait = 0, PROBE_EVERY
            self._plain_rounds += 1
            if self._plain_rounds < self._drafting_wait:
                return Choice(0)
            self._plain_rounds, self._drafting_wait = 0, min(2 * self._drafting_wait, LONGEST_WAIT)
            return Choice(_at_least(edges, count + capacity_from_stale(survival_RG, drafting, edges)))
        self._plain_rounds, self._drafting_wait = 0, PROBE_EVERY
        self._drafting_rounds += 1
        if self._drafting_rounds < self._plain_wait:
            return Choice(_at_least(edges, count + capacity))
        self._drafting_rounds, self._plain_wait = 0, min(2 * self._plain_wait, LONGEST_WAIT)
        return Choice(0)

    def slip(self, bucket: int, drafted: bool) -> float:
        """How many times its profiled seconds a round has taken of late. Rounds in a row find other caches warm than
        the profile did, and the host has a part in each; what decides is how a plain and a drafting round compare. A
        kind that was hardly seen is taken to slip as all others do: else, on a machine slower than when it was
        profiled, it would look cheap for no better reason than that nobody tried it."""
        all_logs, all_weight = np.sum([*self._slip.values(), (0.0, 0.5)], axis=0)
        logs, weight = self._slip.get((bucket, drafted), (0.0, 0.0))
        return float(np.exp((logs + 2.0 * all_logs / all_weight) / (weight + 2.0)))

    def observe_seconds(self, bucket: int, tokens: int, sampled: bool, curves: Curves, seconds: float) -> None:
        """The time of a finished round, from the end of the one before it; `tokens` 0: a plain one."""
        profiled = curves.draft(bucket, tokens, sampled) if tokens else curves.plain(bucket, sampled)
        if 1 / LARGEST_SLIP < seconds / profiled < LARGEST_SLIP:
            logs, weight = self._slip.get((bucket, tokens > 0), (0.0, 0.0))
            self._slip[bucket, tokens > 0] = MEMORY * logs + float(np.log(seconds / profiled)), MEMORY * weight + 1.0

    def observe(self, text: int, survival_G: np.ndarray, length: int, accepted: int) -> None:
        """One request's part of a finished drafting round."""
        known_G = self._survival.get(text, self._mean_survival)
        self._survival[text] = TEXT_MEMORY * known_G + (1 - TEXT_MEMORY) * np.nan_to_num(survival_G)
        self._mean_survival = MEMORY * self._mean_survival + (1 - MEMORY) * np.nan_to_num(survival_G)
        if self.spec.kind == "threshold":
            self._mean_length = MEMORY * self._mean_length + (1 - MEMORY) * _certain(survival_G, self.spec.value)
        self._predicted = MEMORY * self._predicted + float(np.nan_to_num(survival_G[:length]).sum())
        self._stood = MEMORY * self._stood + accepted
        tried = np.arange(self.num_drafts) < min(length, accepted + 1)
        self._tried_G = self._tried_G * (1 - 0.01 * tried) + tried
        self._taken_G = self._taken_G * (1 - 0.01 * tried) + (np.arange(self.num_drafts) < accepted)

    def forget(self, text: int) -> None:
        """A text has ended."""
        self._survival.pop(text, None)


def _certain(survival_G: np.ndarray, threshold: float) -> int:
    """Drafts before the first confidence below the threshold, whatever there was room for: a mean over what was
    verified could only fall. Confidences are ratios of survivals, so one at the threshold may be off by rounding."""
    before_G = np.concatenate([[1.0], survival_G[:-1]])
    return int(np.cumprod((survival_G > 0) & (survival_G >= before_G * (threshold - 1e-6))).sum())


def _at_least(edges: Sequence[int], wanted: int) -> int:
    return min((t for t in edges if t >= wanted), default=edges[-1])
