"""Accepted length of a drafter on prompt sets: no plain decoding, so many prompts in little time.

python -m benchmarks.accepted_length --prompts gsm8k.jsonl humaneval.jsonl --limit 40 --json OUT
"""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from dspark_jax import ConfigError, SamplingParams, generate, load_drafter, load_target
from dspark_jax.weights.locate import EMBEDDED
from serve import measure, report
from serve.prompts import encode, load_prompts
from serve.setup import SHIPPED_DRAFTER


@dataclasses.dataclass(frozen=True)
class Args:
    """Measure the accepted length of a drafter on prompt files."""

    prompts: tuple[Path, ...]
    """JSONL files, {"turns": ["text"]} a line; each is one row of the result."""
    target: str = EMBEDDED
    drafter: Path = SHIPPED_DRAFTER
    limit: int = 40
    """Prompts of each file, from its beginning."""
    tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 1.0)
    batch_size: int = 16
    dtype: str = "float32"
    seed: int = 0
    json: Path | None = None


def run(args: Args) -> list[dict[str, object]]:
    target = load_target(args.target, args.dtype)
    drafter = load_drafter(args.drafter, target, args.dtype)
    rows: list[dict[str, object]] = []
    for path in args.prompts:
        prompts = [dataclasses.replace(p, domain=path.stem) for p in load_prompts(path)[: args.limit]]
        ids = encode(target, prompts, args.tokens)[path.stem]
        for temperature in args.temperatures:
            generations = generate(
                target, drafter, ids, args.tokens, SamplingParams(temperature), args.seed,
                target.config.eos_token_ids, batch_size=args.batch_size,
            )  # fmt: skip
            counts = measure.count_rounds(generations, target.config.eos_token_ids)
            rows.append({
                "set": path.stem, "temperature": temperature, "prompts": len(ids), "tokens": args.tokens,
                "rounds": len(counts.accepted_N), "accepted_length": measure.accepted_length(counts),
                "interval_95": measure.accepted_length_interval(generations, target.config.eos_token_ids),
                "acceptance_by_position": measure.acceptance_by_position(counts, drafter.config.num_drafts),
            })  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    args = tyro.cli(Args, args=argv, description=__doc__)
    try:
        if args.limit < 1:
            raise ConfigError(f"--limit {args.limit}: expected at least 1")
        if args.json:
            report.check_writable(args.json)
        rows = run(args)
        if args.json:
            of = {"target": Path(args.target).name, "drafter": args.drafter.name, "dtype": args.dtype}
            report.write_json(args.json, {"machine": report.machine()} | of | {"rows": rows})
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    table = Table("set", "temperature", "prompts", "accepted length", "95 % interval")
    for row in rows:
        between = row["interval_95"]  # none of a single prompt
        table.add_row(
            str(row["set"]), f"{row['temperature']:g}", str(row["prompts"]), f"{row['accepted_length']:.2f}",
            "-" if between is None else "{:.2f} to {:.2f}".format(*between),  # type: ignore[misc]
        )  # fmt: skip
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
