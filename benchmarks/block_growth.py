"""What a longer block costs a round: SmolLM2 and untrained drafters of block 4, 8, 12, 16, with and without the head.

    python -m benchmarks.block_growth --json OUT

The number of verified tokens stays the same, so all growth is the draft pass: the backbone's rows and the steps of the
sequential head over a shortlist. Weights are random: time does not depend on them.
"""

import dataclasses
import statistics
import sys
from pathlib import Path

import jax
import tyro
from rich.table import Table

from dspark_jax import ConfigError, Drafter, SamplingParams
from dspark_jax.drafters import dspark
from dspark_jax.target import cast_params
from serve import profile, report
from serve.engine import Engine, EngineConfig
from serve.setup import load_models


@dataclasses.dataclass(frozen=True)
class Args:
    """Measure a round against the length of its block."""

    blocks: tuple[int, ...] = (4, 8, 12, 16)
    requests: int = 8
    tokens: int = 32
    """Packed tokens of the verification, the same for all."""
    shortlist: int = 32
    repeats: int = 15
    json: Path | None = None


def untrained(shipped: Drafter, dtype: str, head: bool, block_size: int = 0) -> Drafter:
    """A drafter like the shipped one, with random weights: with its Markov head or without, of another block (0: its
    own)."""
    own = shipped.config
    config = dataclasses.replace(
        own, block_size=block_size or own.block_size, markov_rank=own.markov_rank if head else 0,
        confidence_with_markov=head,
    )  # fmt: skip
    return Drafter(config, cast_params(dspark.init_params(config, jax.random.key(0)), dtype), shipped.frozen)


def time_rounds(args: Args) -> list[dict[str, float]]:
    """Median seconds of a greedy round by block, with the Markov head and without."""
    target, shipped, _ = load_models("smollm2-135m", None)
    engines: list[tuple[int, bool, Engine]] = []
    for block in args.blocks:
        for head in (True, False):
            sizes = EngineConfig(
                max_requests=args.requests, request_sizes=(args.requests,), max_context=256, prefill_lengths=(64,),
                shortlist=args.shortlist,
            )  # fmt: skip
            engine = Engine(target, untrained(shipped, str(target.dtype), head, block), sizes)
            engine.compile([("prefill", 64), ("round", args.requests, args.tokens)])
            profile.fill(engine, SamplingParams(0.0))
            engines.append((block, head, engine))
    times: dict[tuple[int, bool], list[float]] = {}
    slots = list(range(args.requests))
    for _ in range(args.repeats + 1):  # in turn, so that noise of the machine falls on all
        for block, head, engine in engines:
            times.setdefault((block, head), []).append(profile.once(engine, slots, args.tokens))
    median = {key: statistics.median(values[1:]) for key, values in times.items()}
    first = args.blocks[0]
    return [
        {
            "block": block,
            "round_seconds": median[block, True],
            "without_head_seconds": median[block, False],
            "growth": median[block, True] / median[first, True] - 1,
            "head_share": 1 - median[block, False] / median[block, True],
        }
        for block in args.blocks
    ]


def main() -> int:
    args = tyro.cli(Args, description=__doc__)
    try:
        if args.json:
            report.check_writable(args.json)
        rows = time_rounds(args)
        if args.json:
            settings = dataclasses.asdict(args) | {"json": None}
            report.write_json(args.json, {"machine": report.machine(), "settings": settings, "rows": rows})
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = Table("block", "round", "growth", "without the sequential head", "share of the head")
    for row in rows:
        table.add_row(
            str(row["block"]), f"{1000 * row['round_seconds']:.1f} ms", f"{row['growth']:+.1%}",
            f"{1000 * row['without_head_seconds']:.1f} ms", f"{row['head_share']:.1%}",
        )  # fmt: skip
    report.console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
