"""Measures what drafting gains: the same prompts under each policy, one request and eight at a time.

    python -m serve.bench [--target PATH --drafter PATH] [--prompts FILE] [--json OUT]
    python -m serve.bench --load ...         # requests that come and go, see serve/load.py
    python -m serve.bench --suite quick ...  # seven questions and a report, see serve/suite.py

Without arguments: the embedded SmolLM2-135M, the drafter in assets/, built-in prompts of mathematics, code and chat.
"""

import dataclasses
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from dspark_jax import ConfigError, Drafter, Target
from dspark_jax.weights.locate import EMBEDDED
from serve import load, profile, report, suite
from serve.calibration import read_temperatures
from serve.cells import Bench, Prompts
from serve.dtype import Dtype
from serve.engine import Engine, EngineConfig
from serve.policy import parse
from serve.prompts import choose_prompts, encode
from serve.scheduler import positions
from serve.setup import cache_programs, load_models

REQUESTS = (1, 8)
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
    policy: str = "scheduled"
    """What is compared with plain decoding, besides verifying every draft: see serve/policy.py."""
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
    """Folder of a drafter, or a language model of the target's tokens; without it the one shipped for smollm2-135m."""
    dtype: Dtype = "fast"
    """Compute dtype of target and drafter; fast: the one that is faster on this machine."""
    tensor: int = 1
    """Devices that weights and caches are split over."""
    prompts: Path | None = None
    """JSONL, {"turns": ["text"]} a line; without it built-in prompts of three domains."""
    json: Path | None = None
    """Where to write every number."""


def engines(target: Target, drafter: Drafter, path: Path, longest: int, tokens: int) -> tuple[Engine, Engine]:
    """One engine without the drafter and one with it, for one request and for eight."""
    context = positions(longest, tokens, drafter.config.num_drafts)
    config = EngineConfig(
        max_requests=max(REQUESTS), request_sizes=REQUESTS, max_context=-(-context // 128) * 128,
        prefill_lengths=(80,),  # holds most of the built-in prompts: a chunk costs what its places cost
    )  # fmt: skip
    temperatures = read_temperatures(path, drafter.config.num_drafts)
    return Engine(target, None, config), Engine(target, drafter, config, temperatures)


def run(
    target: Target,
    plain: Engine,
    drafting: Engine,
    prompts: Prompts,
    settings: Settings,
    on_step: Callable[[str, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """Decodes the prompts (token ids, by domain) in every way and returns all numbers, ready for JSON.

    `on_step` hears what comes next and how many of `count_steps` steps that ends. Raises ConfigError as the engine
    does.
    """
    began = time.perf_counter()
    for engine, keys in _programs(plain, drafting, settings):
        on_step("compiling", 0)
        engine.compile(keys, lambda key: on_step(f"compiled {' '.join(map(str, key))}", 1))
    compiled = time.perf_counter()
    curves = profile.measure(drafting, on_point=lambda text: on_step(f"timing {text}", 0))
    on_step("timed", 1)
    bench = Bench(target, plain, drafting, curves, settings.tokens, settings.seed)
    for requests in REQUESTS:
        bench.warm_up(next(iter(prompts.values()))[:requests])
    rows, differences = [], []
    for requests in REQUESTS:
        for temperature in TEMPERATURES:
            for domain, ids in prompts.items():
                chosen = ids[: settings.single if requests == 1 else settings.limit]
                where = f"{report.requests_text(requests)}, temperature {temperature:g}, {domain}"
                tell = _teller(on_step, where)
                policies = compared(settings.policy, drafting.num_drafts, requests, temperature)
                cell = bench.cell(domain, chosen, requests, temperature, policies, tell)
                on_step(where, 1)
                rows += cell.rows
                differences += cell.differences
    return {
        "machine": report.machine(),
        "dtype": str(target.dtype),
        "settings": dataclasses.asdict(settings),
        "rows": rows,
        "summary": report.summarise(rows),
        "differences": differences,
        "curves": curves.to_json(),
        "compile_seconds": compiled - began,
        "total_seconds": time.perf_counter() - began,
    }


def compared(policy: str, num_drafts: int, requests: int, temperature: float) -> list[str]:
    """The policies of a cell, plain decoding first. What verifying every draft would do is shown for the fewest
    requests, greedy; `--load` has the rest."""
    everything = [f"fixed:{num_drafts}"] if requests == min(REQUESTS) and temperature == 0 else []
    return list(dict.fromkeys(["off", *everything, policy]))


def _teller(on_step: Callable[[str, int], None], where: str) -> Callable[[str], None]:
    return lambda policy: on_step(f"{where}: {policy}", 0)


def _programs(plain: Engine, drafting: Engine, settings: Settings) -> list[tuple[Engine, list[tuple[Any, ...]]]]:
    """What is compiled of each engine."""
    sync = parse(settings.policy, drafting.num_drafts).kind == "sync"
    return [(plain, plain.program_keys()), (drafting, drafting.program_keys(sync))]


def count_steps(plain: Engine, drafting: Engine, prompts: Prompts, settings: Settings) -> int:
    """How many steps `run` announces."""
    programs = sum(len(keys) for _, keys in _programs(plain, drafting, settings))
    return programs + 1 + len(REQUESTS) * len(TEMPERATURES) * len(prompts)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if "--load" in argv:
        return load.main([argument for argument in argv if argument != "--load"])
    if any(argument == "--suite" or argument.startswith("--suite=") for argument in argv):
        return suite.main(argv)
    try:
        args = tyro.cli(Args, args=argv, description=__doc__)
        # Cheap checks first: nobody should wait minutes to hear of a wrong path.
        args.settings.check()
        chosen = choose_prompts(args.prompts, args.settings.limit)
        if args.json:
            report.check_writable(args.json)
        cache_programs()
        target, drafter, path = load_models(args.target, args.drafter, args.dtype, args.tensor)
        parse(args.settings.policy, drafter.config.num_drafts)
        prompts = encode(target, chosen, args.settings.tokens)
        longest = max(len(ids) for domain in prompts.values() for ids in domain)
        plain, drafting = engines(target, drafter, path, longest, args.settings.tokens)
        with report.progress() as progress:
            task = progress.add_task("", total=count_steps(plain, drafting, prompts, args.settings))

            def on_step(text: str, done: int) -> None:
                progress.update(task, description=text, advance=done)

            result = run(target, plain, drafting, prompts, args.settings, on_step)
        command = shlex.join(["python", "-m", "serve.bench", *argv])
        result = {"command": command, "target": args.target, "drafter": str(args.drafter or path.name)} | result
        report.show(result, drafter.config.num_drafts)
        if args.json:
            report.write_json(args.json, result)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
