"""Where a round's time goes: draft pass, sequential head, verification, rest; against a plain step.

    python -m benchmarks.round_parts [--json OUT]

The two halves of `scheduled:sync` are the round cut in two, so they are timed as programs of their own: the draft pass
with its choice of lengths, and verification with acceptance and commit. The head's part is what the draft pass of the
same drafter without its Markov head takes less.
"""

import dataclasses
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from rich.table import Table

from benchmarks.block_growth import untrained
from dspark_jax import ConfigError, SamplingParams
from serve import profile, report
from serve.engine import Engine, EngineConfig
from serve.setup import load_models


@dataclasses.dataclass(frozen=True)
class Args:
    """Measure the parts of a round of the shipped drafter."""

    requests: tuple[int, ...] = (1, 8)
    repeats: int = 25
    temperature: float = 0.0
    json: Path | None = None


def _engines(size: int) -> tuple[Engine, Engine]:
    """With the sequential head, and with random weights without it."""
    target, shipped, _ = load_models("smollm2-135m", None)
    sizes = EngineConfig(max_requests=size, request_sizes=(size,), max_context=256, prefill_lengths=(64,))
    return Engine(target, shipped, sizes), Engine(target, untrained(shipped, str(target.dtype), head=False), sizes)


def measure(requests: int, repeats: int, temperature: float) -> list[dict[str, Any]]:
    """Median seconds of the parts for every size of a round; each is called in turn, so that noise falls on all."""
    engine, bare = _engines(requests)
    slots, sizes = list(range(requests)), engine.token_buckets[requests]
    engine.compile([("prefill", 64), ("plain", requests), ("draft", requests),
                    *((kind, requests, t) for kind in ("round", "verify") for t in sizes)])  # fmt: skip
    bare.compile([("prefill", 64), ("draft", requests)])
    for one in (engine, bare):
        profile.fill(one, SamplingParams(temperature))
    drafted, _ = _draft(engine, slots)

    def verify(tokens: int) -> Callable[[], Any]:
        longest = min(engine.num_drafts, tokens // requests - 1)
        lengths_R = jax.device_put(np.full(requests, longest, np.int32))
        return lambda: engine.verify(slots, tokens, drafted, lengths_R)

    knobs = engine.knobs(by_survival=False)
    calls: dict[tuple[str, int], Callable[[], Any]] = {
        ("plain", 0): lambda: engine.plain(slots),
        ("draft", 0): lambda: _draft(engine, slots),
        ("headless", 0): lambda: _draft(bare, slots),
    }
    for t in sizes:
        calls["verify", t] = verify(t)
        calls["round", t] = lambda t=t: engine.round(slots, t, knobs)
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in calls}
    for _ in range(repeats + 1):
        for key, call in calls.items():
            seconds[key].append(profile.timed(engine, call))
    median = {key: statistics.median(values[1:]) for key, values in seconds.items()}
    head = median["draft", 0] - median["headless", 0]
    return [
        {
            "requests": requests, "tokens": t, "plain": median["plain", 0], "draft": median["draft", 0] - head,
            "head": head, "verify": median["verify", t], "round": median["round", t],
            "rest": median["round", t] - median["draft", 0] - median["verify", t],
        }
        for t in sizes
    ]  # fmt: skip


def _draft(engine: Engine, slots: list[int]) -> Any:
    curve = np.linspace(2.0, 1.0, len(slots) * (engine.num_drafts + 1) + 1, dtype=np.float32)
    return engine.draft(slots, engine.knobs(), jax.device_put(curve))


def main() -> int:
    args = tyro.cli(Args, description=__doc__)
    try:
        if args.json:
            report.check_writable(args.json)
        rows = [row for size in args.requests for row in measure(size, args.repeats, args.temperature)]
        if args.json:
            settings = dataclasses.asdict(args) | {"json": None}
            report.write_json(args.json, {"machine": report.machine(), "settings": settings, "rows": rows})
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = Table("requests", "tokens", "plain", "draft", "head", "verify", "rest", "round", title="milliseconds")
    for row in rows:
        parts = (f"{1000 * row[name]:.1f}" for name in ("plain", "draft", "head", "verify", "rest", "round"))
        table.add_row(str(row["requests"]), str(row["tokens"]), *parts)
    report.console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
