"""Measures what drafting gains: the same prompts decoded with and without a drafter, one request and eight at a time.

    python -m serve.bench [--target PATH --drafter PATH] [--prompts FILE] [--json OUT]

Without arguments: the embedded SmolLM2-135M, the drafter in assets/, built-in prompts of mathematics, code and chat.
"""

import dataclasses
import functools
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it advises about torch, which nothing here uses

import jax
import tyro

from dspark_jax import ConfigError, Drafter, Target, load_drafter, load_target
from dspark_jax.weights.locate import EMBEDDED
from serve import probe, report
from serve.cells import Bench, Policy, Prompts
from serve.prompts import choose_prompts, encode
from serve.setup import find_drafter

REQUESTS = (8, 1)  # eight first: their greedy texts then serve single requests as reference
TEMPERATURES = (0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is decoded, and how."""

    tokens: int = 32
    """New tokens a prompt; a text may end earlier."""
    limit: int = 8
    """Prompts a domain, decoded eight at a time."""
    single: int = 3
    """How many of those are also decoded one at a time."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of drafted decoding; auto: what verifies faster on this machine. Plain decoding runs in its own fastest."""
    seed: int = 0

    def check(self) -> None:
        """Raises ConfigError; not at construction, which tyro would report in its own way."""
        for field, least in (("tokens", 2), ("limit", 1), ("single", 1)):
            if getattr(self, field) < least:
                raise ConfigError(f"--{field} {getattr(self, field)}: expected at least {least}")


@dataclasses.dataclass(frozen=True)
class Args:
    """Measure drafted against plain decoding."""

    settings: Annotated[Settings, tyro.conf.OmitArgPrefixes]
    target: str = EMBEDDED
    """safetensors directory, .gguf file, or smollm2-135m."""
    drafter: Path | None = None
    """Directory in DeepSpec's format; without it the one shipped for smollm2-135m."""
    prompts: Path | None = None
    """JSONL, {"turns": ["text"]} a line; without it built-in prompts of three domains."""
    json: Path | None = None
    """Where to write every number."""


def run(
    target: Target,
    drafter: Drafter,
    prompts: Prompts,
    settings: Settings,
    on_step: Callable[[str, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """Decodes the prompts (token ids, by domain) in every way and returns all numbers, ready for JSON.

    `on_step` hears what comes next and how many of `count_steps(prompts)` steps that ends. Raises ConfigError as
    `generate` does.
    """
    prompts = {domain: ids[: settings.limit] for domain, ids in prompts.items()}
    bench = Bench(target, drafter, prompts, settings.tokens, settings.seed)
    # From bfloat16 weights there is no way back to the float32 model.
    known = ["float32", "bfloat16"] if target.dtype == jax.numpy.float32 else ["bfloat16"]
    began = time.perf_counter()
    compile_seconds = 0.0
    rows, differences, probes, pieces = [], [], [], []
    for requests in REQUESTS:
        name = report.requests_text(requests)
        on_step(f"{name}: timing dtypes", 0)
        choice = probe.choose_dtype(target, requests, drafter.config.num_drafts + 1, bench.cache_length, known)
        draft_dtype = choice.draft_dtype if settings.dtype == "auto" else settings.dtype
        dtypes: dict[Policy, str] = {"plain": choice.plain_dtype, "draft": draft_dtype}
        probes.append({"requests": requests, **dtypes, "plain_ms": choice.plain_ms, "verify_ms": choice.verify_ms})
        chosen = {domain: ids[: settings.single if requests == 1 else None] for domain, ids in prompts.items()}
        on_step(f"{name}: compiling", 0)
        compile_seconds += bench.warm_up(chosen, requests, TEMPERATURES, dtypes)
        on_step(f"{name}: compiled", 1)
        mine = []
        for temperature in TEMPERATURES:
            for domain, ids in chosen.items():
                where = f"{name}, temperature {temperature:g}, {domain}"
                tell = functools.partial(lambda where, policy: on_step(f"{where}: {policy}", 0), where)
                cell = bench.cell(domain, ids, requests, temperature, dtypes, tell)
                on_step(where, 1)
                mine += cell.rows
                differences += cell.differences
        on_step(f"{name}: timing the pieces of a round", 0)
        times = probe.time_pieces(*bench.models(draft_dtype), requests, bench.cache_length)
        pieces.append(report.where_time_goes(mine, requests, times))
        rows += mine
    return {
        "machine": report.machine(),
        "dtype": {str(p["requests"]): {"plain": p["plain"], "draft": p["draft"]} for p in probes},
        "settings": dataclasses.asdict(settings),
        "probes": probes,
        "rows": rows,
        "summary": report.summarise(rows),
        "differences": differences,
        "where_time_goes": pieces,
        "compile_seconds": compile_seconds,
        "total_seconds": time.perf_counter() - began,
    }


def count_steps(prompts: Prompts) -> int:
    """How many steps `run` announces."""
    return len(REQUESTS) * (1 + len(TEMPERATURES) * len(prompts))


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        args = tyro.cli(Args, args=argv, description=__doc__)
        # Cheap checks first: nobody should wait minutes to hear of a wrong path.
        args.settings.check()
        drafter_path = find_drafter(args.target, args.drafter)
        chosen = choose_prompts(args.prompts, args.settings.limit)
        if args.json:
            report.check_writable(args.json)
        wanted = "bfloat16" if args.settings.dtype == "auto" else args.settings.dtype
        target = load_target(args.target, "float32" if jax.default_backend() == "cpu" else wanted)
        drafter = load_drafter(drafter_path, target, str(target.dtype))
        prompts = encode(target, chosen, args.settings.tokens)
        with report.progress() as progress:
            task = progress.add_task("", total=count_steps(prompts))

            def on_step(text: str, done: int) -> None:
                progress.update(task, description=text, advance=done)

            result = run(target, drafter, prompts, args.settings, on_step)
        command = shlex.join(["python", "-m", "serve.bench", *argv])
        result = {
            "command": command,
            "target": args.target,
            "drafter": str(args.drafter or drafter_path.name),
        } | result
        report.show(result)
        if args.json:
            report.write_json(args.json, result)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
