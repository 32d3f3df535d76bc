"""Profiled seconds of a round by requests and packed tokens: what the scheduler knows about the machine. No jax."""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.config import ConfigError

Key = tuple[int, int, bool]  # requests bucket R, packed tokens T (0: plain round), any request sampled


@dataclasses.dataclass(frozen=True)
class Curves:
    """Seconds a round, draft pass and head included, never falling in T for each R."""

    seconds: Mapping[Key, float]

    def plain(self, requests: int, sampled: bool) -> float:
        """A round of one token a request."""
        return self.seconds[requests, 0, sampled]

    def draft(self, requests: int, tokens: int, sampled: bool) -> float:
        """A drafting round of `tokens` packed places."""
        return self.seconds[requests, tokens, sampled]

    def steps_per_second(self, requests: int, num_drafts: int, sampled: bool, active: int) -> np.ndarray:
        """SPS(B) for B = 0 .. R (G + 1) packed tokens in rounds of bucket R, a staircase over the compiled sizes. Only
        `active` of the R requests are there: so many tokens are a plain round (Algorithm 1 reads nothing before it)."""
        edges = sorted(t for r, t, s in self.seconds if r == requests and s == sampled and t)
        sizes = np.arange(requests * (num_drafts + 1) + 1)
        up = np.minimum(np.searchsorted(edges, sizes), len(edges) - 1)
        seconds = np.array([self.draft(requests, edges[i], sampled) for i in up])
        seconds[: active + 1] = self.plain(requests, sampled)
        return (1.0 / seconds).astype(np.float32)

    def to_json(self) -> list[dict[str, Any]]:
        """One entry a measured point."""
        return [
            {"requests": r, "tokens": t or r, "drafts": bool(t), "sampled": s, "seconds": seconds}
            for (r, t, s), seconds in sorted(self.seconds.items())
        ]


def make_curves(measured: Mapping[Key, float]) -> Curves:
    """Makes measured medians monotone in T for each R. Raises ConfigError where more tokens cost nothing at all among
    the largest rounds, those of the largest R: such a table would make every draft look free."""
    seconds = dict(measured)
    for requests, sampled in {(r, s) for r, _, s in measured}:
        sizes = sorted(t for r, t, s in measured if (r, s) == (requests, sampled) and t)
        running = 0.0
        for t in sizes:
            running = max(running, seconds[requests, t, sampled])
            seconds[requests, t, sampled] = running
    for sampled in {s for _, _, s in measured}:
        requests = max(r for r, _, s in measured if s == sampled)
        drafting = {t: seconds[r, t, s] for r, t, s in measured if (r, s) == (requests, sampled) and t}
        if len(drafting) > 1 and drafting[max(drafting)] <= drafting[min(drafting)]:
            few, many = (f"{t} packed tokens take {drafting[t] * 1e3:.1f} ms" for t in (min(drafting), max(drafting)))
            raise ConfigError(
                f"the profile is flat: with {requests} requests {few} and {many}. Something else kept the machine busy:"
                " profile again (--profile)"
            )
    return Curves(seconds)


def from_json(points: Iterable[Mapping[str, Any]]) -> Curves:
    """The inverse of `Curves.to_json`."""
    return Curves({(p["requests"], p["tokens"] if p["drafts"] else 0, p["sampled"]): p["seconds"] for p in points})


def save(curves: Curves, path: Path, identity: Mapping[str, Any]) -> None:
    """Writes the curves and what they were measured for, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")  # another process may be saving the same curves
    part.write_text(json.dumps({"identity": dict(identity), "curves": curves.to_json()}, indent=1) + "\n")
    part.replace(path)


def load(path: Path, identity: Mapping[str, Any]) -> Curves | None:
    """Curves saved for exactly this identity; None if there are none, or the file is not readable as such."""
    try:
        saved = json.loads(path.read_text())
        if saved["identity"] != json.loads(json.dumps(dict(identity))):  # JSON has no tuples
            return None
        return from_json(saved["curves"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
