"""Losslessness at temperature 0 on the real model: every built-in prompt with and without drafting, token by token.

python -m benchmarks.greedy_equality --json OUT

A text that differs is shown with the margin between the two tokens in the target's own logits: near zero, rounding
decided a tie; far from zero, something is wrong.
"""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console

from dspark_jax import ConfigError, generate, load_drafter, load_target
from dspark_jax.generate import bucket
from dspark_jax.weights.locate import EMBEDDED
from serve import measure, report
from serve.prompts import choose_prompts, encode
from serve.setup import SHIPPED_DRAFTER


@dataclasses.dataclass(frozen=True)
class Args:
    """Compare greedy texts with and without drafting."""

    prompts: Path | None = None
    """JSONL, {"turns": ["text"]} a line; without it the built-in 24 prompts of each of three domains."""
    target: str = EMBEDDED
    drafter: Path = SHIPPED_DRAFTER
    limit: int = 24
    """Prompts of each domain."""
    tokens: int = 64
    batch_size: int = 8
    dtype: Literal["float32", "bfloat16"] = "float32"
    tie: float = 1e-4
    """Largest logit margin that counts as a tie."""
    json: Path | None = None


def run(args: Args) -> dict[str, Any]:
    target = load_target(args.target, args.dtype)
    drafter = load_drafter(args.drafter, target, args.dtype)
    ids = [
        row for rows in encode(target, choose_prompts(args.prompts, args.limit), args.tokens).values() for row in rows
    ]
    eos = target.config.eos_token_ids
    plain, drafted = (
        generate(target, which, ids, args.tokens, eos_token_ids=eos, batch_size=args.batch_size)
        for which in (None, drafter)
    )
    differences = []
    for number, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        position = measure.first_difference(one.tokens, other.tokens)
        if position is None:
            continue
        prefix = [*ids[number], *one.tokens[:position]]
        row_S = np.zeros(bucket(len(prefix), 64), np.int32)
        row_S[: len(prefix)] = prefix
        logits_V = np.asarray(target.forward(jnp.asarray(row_S)[None]).logits_BSV[0, len(prefix) - 1])
        tokens = one.tokens[position], other.tokens[position]
        differences.append({"prompt": number, "position": position, "margin": measure.logit_margin(logits_V, *tokens)})
    return {
        "machine": report.machine(),
        "dtype": args.dtype,
        "prompts": len(ids),
        "tokens": sum(len(text.tokens) for text in plain),
        "equal": len(ids) - len(differences),
        "differences": differences,
        "explained": all(found["margin"] < args.tie for found in differences),
    }


def main(argv: Sequence[str] | None = None) -> int:
    args = tyro.cli(Args, args=argv, description=__doc__)
    try:
        if args.limit < 1:
            raise ConfigError(f"--limit {args.limit}: expected at least 1")
        if args.json:
            report.check_writable(args.json)
        result = run(args)
        if args.json:
            report.write_json(args.json, result)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = f"{result['equal']} of {result['prompts']} greedy texts ({result['tokens']} tokens, {args.dtype}) are equal"
    Console().print(text, *(f"prompt {d['prompt']}: margin {d['margin']:.2g}" for d in result["differences"]), sep="\n")
    return 0 if result["explained"] else 1


if __name__ == "__main__":
    sys.exit(main())
