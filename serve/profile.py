"""Measures the machine: seconds of every compiled round, draft pass and head included (DSpark paper, section 5.2).

    python -m serve.profile [--target PATH --drafter PATH] [--out FOLDER] [--profile]

The scheduler needs to know what a verified token costs here and now. Curves are kept by machine, model and version;
`--profile` measures again.
"""

import contextlib
import dataclasses
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from dspark_jax import ConfigError, SamplingParams
from serve import curves as curves_lib
from serve import report
from serve.curves import Curves, Key
from serve.dtype import Dtype
from serve.engine import Engine

REPEATS = 7
ATTEMPTS = 3  # a machine that was busy with something else gets another chance


def identity(engine: Engine) -> dict[str, Any]:
    """What a profile is valid for."""
    drafter = engine.models.drafter
    return {
        "version": report.version("dspark-jax"),
        "machine": report.machine(),  # with its processor, devices and version of JAX
        "mesh": {} if engine.mesh is None else dict(engine.mesh.shape),
        "dtype": str(engine.dtype),
        "target": dataclasses.asdict(engine.target_config) | {"eos_token_ids": None},
        "drafter": {} if drafter is None else {k: str(v) for k, v in dataclasses.asdict(drafter).items()},
        "engine": {k: str(v) for k, v in dataclasses.asdict(engine.config).items()},
    }


def cache_path(engine: Engine) -> Path:
    """Where the curves of this engine are kept."""
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dspark-jax"
    digest = hashlib.sha256(repr(sorted(identity(engine).items())).encode()).hexdigest()[:16]
    return root / f"curves-{digest}.json"


def measure(
    engine: Engine, sampled: tuple[bool, ...] = (False, True), on_point: Callable[[str], None] | None = None
) -> Curves:
    """Times every round on full slots with contexts of half the longest length: median of repeats, after a warm-up.

    Overwrites the slots, so call it before serving. Raises ConfigError where the result stays flat.
    """
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(ConfigError):
            return curves_lib.make_curves(_measure(engine, sampled, on_point))
    return curves_lib.make_curves(_measure(engine, sampled, on_point))


def _measure(engine: Engine, sampled: tuple[bool, ...], on_point: Callable[[str], None] | None) -> dict[Key, float]:
    engine.reset()
    seconds: dict[Key, float] = {}
    for is_sampled in sampled:
        fill(engine, SamplingParams(temperature=1.0 if is_sampled else 0.0))
        for requests in engine.request_buckets:
            slots = list(range(requests))
            for tokens in (0, *engine.token_buckets.get(requests, ())):
                if on_point:
                    on_point(f"{requests} requests, {tokens or requests} tokens")
                seconds[requests, tokens, is_sampled] = _time(engine, slots, tokens)
    engine.reset()
    return seconds


def fill(engine: Engine, params: SamplingParams) -> None:
    """Puts a prompt of half the longest length into every slot. Where there are too few pages for all of them slots
    share some: what is in them is no matter here."""
    config = engine.config
    length, longest, each = max(config.max_context // 2, 1), max(config.prefill_lengths), config.pages_per_request
    for slot in range(config.max_requests):
        pages = [(slot * each + i) % config.pages for i in range(each)]
        for start in range(0, length, longest):
            engine.prefill(slot, [1] * min(longest, length - start), start, slot, params, pages)


def once(engine: Engine, slots: list[int], tokens: int) -> float:
    """Seconds of one round in `tokens` packed places, 0 for a plain one."""
    knobs = engine.knobs(by_survival=False) if tokens else None
    return timed(engine, lambda: engine.round(slots, tokens, knobs) if knobs is not None else engine.plain(slots))


def timed(engine: Engine, call: Callable[[], Any]) -> float:
    """Seconds until what `call` asks of the engine is there.

    Every call sees the same contexts: what it appended is rolled back by length.
    """
    before = jax.block_until_ready(jax.tree.map(lambda x: x.copy(), engine.state.slots))
    start = time.perf_counter()
    jax.block_until_ready(call())
    seconds = time.perf_counter() - start
    engine.state = engine.state._replace(slots=before)
    return seconds


def _time(engine: Engine, slots: list[int], tokens: int) -> float:
    return statistics.median([once(engine, slots, tokens) for _ in range(REPEATS + 1)][1:])


def curves_for(engine: Engine, force: bool = False, on_point: Callable[[str], None] | None = None) -> Curves:
    """The kept curves of this engine, measured first if there are none (or `force`)."""
    path, who = cache_path(engine), identity(engine)
    kept = None if force else curves_lib.load(path, who)
    if kept is not None:
        return kept
    curves = measure(engine, on_point=on_point)
    curves_lib.save(curves, path, who)
    return curves


def show(curves: Curves, num_drafts: int, console: Console | None = None) -> None:
    """Prints milliseconds and steps a second by requests and packed tokens."""
    table = Table(title="seconds a round, draft pass included")
    for column in (
        "requests",
        "packed tokens",
        "drafts",
        "greedy ms",
        "sampled ms",
        "steps/s",
        "tokens/s if all stand",
    ):
        table.add_column(column, justify="right")
    points = sorted({(r, t) for r, t, _ in curves.seconds})
    for requests, tokens in points:
        greedy = curves.seconds.get((requests, tokens, False))
        sampled = curves.seconds.get((requests, tokens, True))
        known = greedy or sampled or float("nan")
        texts = [f"{x * 1e3:.1f}" if x else "" for x in (greedy, sampled)]
        table.add_row(
            str(requests), str(tokens or requests), "yes" if tokens else "no", *texts, f"{1 / known:.1f}",
            f"{min(tokens or requests, requests * (num_drafts + 1)) / known:.0f}",
        )  # fmt: skip
    (console or Console()).print(table)


def plot(curves: Curves, path: Path) -> None:
    """Steps a second against packed tokens, a line for each number of requests."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for requests in sorted({r for r, _, _ in curves.seconds}):
        points = sorted(
            (t or r, s) for (r, t, is_sampled), s in curves.seconds.items() if r == requests and not is_sampled
        )
        axes.plot([t for t, _ in points], [1 / s for _, s in points], marker="o", label=f"{requests} requests")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("packed tokens a round (first point of a line: no drafts)")
    axes.set_ylabel("rounds a second")
    axes.set_title("What a verified token costs here")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


@dataclasses.dataclass(frozen=True)
class Args:
    """Measure the step times of this machine."""

    target: str = "smollm2-135m"
    """safetensors directory, .gguf file, or smollm2-135m."""
    drafter: Path | None = None
    """A drafter of that target; without it the one shipped for smollm2-135m."""
    dtype: Dtype = "fast"
    """Compute dtype of target and drafter; fast: the one that is faster on this machine."""
    tensor: int = 1
    """Devices that weights and caches are split over."""
    requests: int = 8
    """Most requests at a time."""
    out: Path | None = None
    """Folder for curves.json and curves.png."""
    profile: bool = False
    """Measure even if curves are kept for this machine, model and version."""


def main(arguments: Sequence[str] | None = None) -> int:
    from serve.setup import cache_programs, load_engine

    try:
        args = tyro.cli(Args, args=arguments, prog="serve.profile", description=__doc__)
        if args.out:
            report.make_folder(args.out, "--out")
        cache_programs()
        engine = load_engine(args.target, args.drafter, args.dtype, args.tensor, max_requests=args.requests)
        console = Console()
        with console.status("compiling") as status:
            engine.compile(on_program=lambda key: status.update(f"compiling: {key} ready"))
            curves = curves_for(engine, args.profile, lambda text: status.update(f"timing: {text}"))
        show(curves, engine.num_drafts, console)
        if args.out:
            curves_lib.save(curves, args.out / "curves.json", identity(engine))
            plot(curves, args.out / "curves.png")
            console.print(f"wrote {args.out}/curves.json and curves.png")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
