"""Drafters against each other: the same target, conversations, batches, anchors, steps and optimiser for all.

    python -m benchmarks.drafters --config configs/compare_smollm2.py --data ANSWERS.jsonl [--features DIR]
        [--prompts FOLDER] [--workdir DIR] [--only NAME ...] [--json OUT]
    python -m benchmarks.drafters --markdown RESULTS.json

Each drafter is trained by train.loop in a folder of its own, then decodes held-out prompts. A drafter that is finished
is neither trained nor measured again, so the same command goes on where it was killed. The second form prints the
tables of docs/drafters.md.
"""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import dataclasses
import importlib.metadata
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console

from benchmarks import drafters_measure, drafters_plots, drafters_report, drafters_train
from dspark_jax import ConfigError, Target, load_drafter, load_target
from dspark_jax.config import Config, drafter_config
from dspark_jax.config_files import load_config, load_drafters
from serve import report
from serve.suite_sets import PromptSet, encode_sets, find_sets
from train.tiny import TINY, tiny_target

SETS = ("gsm8k", "humaneval", "mt-bench")
LONGEST_PROMPT = 512
_BATCH = 16
_PACKAGES = ("jax", "flax", "optax", "numpy")


@dataclasses.dataclass(frozen=True)
class Args:
    """Compare drafters trained alike."""

    config: Path = Path("configs/compare_smollm2.py")
    """Python file with get_config(), what all share, and get_drafters(), the run of each by name."""
    workdir: Path = Path("runs/drafters")
    """A folder for each drafter and seed, results.json and the plots."""
    data: tuple[str, ...] = ()
    """Training conversations, if not those of the config."""
    features: str = ""
    """Folder of cached target features (train.features), with the layers that any of the drafters taps."""
    steps: int = 0
    """Of each training, 0: those of the config. Drafters of one workdir must agree."""
    batch_size: int = 0
    """Rows a step, 0: as the config."""
    dtype: Literal["", "float32", "bfloat16"] = ""
    """Of target, training and decoding, empty: as the config. A CPU without matrix units is far faster in float32."""
    seeds: tuple[int, ...] = (1,)
    """Each drafter is trained once with each."""
    prompts: tuple[Path, ...] = ()
    """Prompt sets, JSONL with {"turns": ["text"]} a line, or the folder that holds gsm8k, humaneval and mt-bench.jsonl;
    none: the built-in prompts."""
    limit: int = 40
    """Prompts a set."""
    tokens: int = 64
    """New tokens a prompt."""
    temperatures: tuple[float, ...] = (0.0, 1.0)
    only: tuple[str, ...] = ()
    """Names of the drafters to train and measure; none: all of the config."""
    json: Path | None = None
    """Where the results go, if not to the workdir."""
    plots: Path | None = None
    """Folder of the pictures, if not the workdir."""
    markdown: Path | None = None
    """Print the tables of this file of results and do nothing else."""


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    args = tyro.cli(Args, args=given, description=__doc__)
    console = report.console()
    try:
        if args.markdown is not None:
            print(drafters_report.markdown(_results(args.markdown)))
            return 0
        # Orbax logs the traceback of a failed write, which is then reported as one line.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        finished = _compare(args, _command(given), console)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not finished:
        print("stopped and saved; the same command goes on")
    return 0


def _compare(args: Args, command: str, console: Console) -> bool:
    """Trains and measures; False when a signal stopped it."""
    common, runs = load_config(args.config), _runs(args)
    where = next(iter(runs.values())).target
    args.workdir.mkdir(parents=True, exist_ok=True)
    out = args.json or args.workdir / "results.json"
    report.check_writable(out)
    target = tiny_target() if where.path == TINY else load_target(where.path, where.dtype)
    longest = min(LONGEST_PROMPT, target.config.max_length - args.tokens)
    sets = list(encode_sets(target, _prompts(args.prompts), args.limit, longest, args.tokens).values())
    budget = drafters_train.make_budget(next(iter(runs.values())), target)
    result: dict[str, Any] = {
        "machine": report.machine(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "command": command,
        "target": target.config.name,
        "sets": [{"name": s.name, "domain": s.domain, "prompts": len(s.ids), "left_out": s.left_out} for s in sets],
        "tokens": args.tokens,
        "context": drafters_measure.CONTEXT,
        "common": _shared_settings(next(iter(runs.values()))),
        "drafters": [],
    }
    for number, ((name, seed), config) in enumerate(runs.items(), 1):
        console.rule(f"{number} of {len(runs)}: {name}, seed {seed}")
        folder = args.workdir / f"{name}-{seed}"
        facts = drafters_train.trained(config, folder, budget, target, console)
        if facts is None:
            return False
        measured = _measured(args, config, folder, target, sets, console)
        about = {key: facts[key] for key in ("seconds", "blocks", "positions", "skipped")}
        differs = _differences(config, common)
        result["drafters"].append({"name": name, "seed": seed, "differs": differs, **about, **measured})
        report.write_json(out, result)
    drafters_report.show(result, console)
    for path in drafters_plots.draw(result, args.plots or args.workdir):
        console.print(f"wrote {path}", highlight=False)
    console.print(f"wrote {out}", highlight=False)
    return True


def _runs(args: Args) -> dict[tuple[str, int], Config]:
    """The training of every drafter and seed, with what the command line says."""
    known = load_drafters(args.config)
    if unknown := [name for name in args.only if name not in known]:
        raise ConfigError(f"--only {' '.join(unknown)}: {args.config} has {', '.join(known)}")
    if min(args.seeds, default=0) < 0:
        raise ConfigError(f"--seeds {min(args.seeds)}: expected 0 or more")
    for field, least in (("steps", 0), ("batch_size", 0), ("limit", 1), ("tokens", 2)):
        if getattr(args, field) < least:
            raise ConfigError(f"--{field.replace('_', '-')} {getattr(args, field)}: expected at least {least}")
    if not args.seeds or not args.temperatures:
        raise ConfigError("--seeds and --temperatures: give at least one each")
    runs = {}
    # Seed by seed, so that a comparison that is cut short has whole seeds.
    for seed in dict.fromkeys(args.seeds):
        for name in args.only or known:
            config = known[name]
            train = dataclasses.replace(
                config.train, seed=seed, max_steps=args.steps or config.train.max_steps,
                batch_size=args.batch_size or config.train.batch_size, dtype=args.dtype or config.train.dtype,
            )  # fmt: skip
            target = dataclasses.replace(config.target, dtype=args.dtype or config.target.dtype)
            data = dataclasses.replace(config.data, paths=args.data or config.data.paths, features=args.features)
            runs[name, seed] = dataclasses.replace(config, target=target, train=train, data=data)
    return runs


def _prompts(files: Sequence[Path]) -> dict[str, list[Any]]:
    """The texts of the prompt sets by name."""
    if len(files) == 1 and files[0].is_dir():
        files = [files[0] / f"{name}.jsonl" for name in SETS]
    texts: dict[str, list[Any]] = {}
    for path in files:
        if not path.is_file():
            raise ConfigError(f"--prompts {path}: no such file")
        texts |= find_sets(path.parent, (path.stem,), ())
    return texts or find_sets(None, (), ())


def _measured(
    args: Args, config: Config, folder: Path, target: Target, sets: Sequence[PromptSet], console: Console
) -> dict[str, Any]:
    """What the trained drafter in `folder` is worth; read from there if it was measured in this way before."""
    file, dtype = folder / "measured.json", str(target.dtype)
    settings = {
        "sets": [[s.name, s.digest] for s in sets],
        "temperatures": list(args.temperatures),
        "tokens": args.tokens,
    }
    if file.is_file() and (kept := _read(file)).get("settings") == settings:
        return kept["result"]
    drafter = load_drafter(folder / "drafter", target, dtype)
    shape = drafter_config(config.draft, target.config)  # as it is trained: what is served may be multiplied out

    def say(text: str) -> None:
        console.print(text, highlight=False)

    result = {
        **drafters_measure.parameters(shape),
        "layers": shape.num_layers,
        "num_drafts": shape.num_drafts,
        "dtype": dtype,
        "draft_seconds": {str(r): drafters_measure.draft_seconds(drafter, r, dtype) for r in drafters_measure.REQUESTS},
        "rows": drafters_measure.accepted(
            target, drafter, sets, args.temperatures, args.tokens, _BATCH, config.train.seed, say
        ),
    }
    report.write_json(file, {"settings": settings, "result": result})
    return result


def _shared_settings(config: Config) -> dict[str, Any]:
    """What a run has in common with all others, as words of the report."""
    train, optimizer = config.train, config.optimizer
    return {
        "steps": train.max_steps,
        "batch_size": train.batch_size,
        "num_anchors": config.data.num_anchors,
        "max_length": config.data.max_length,
        "learning_rate": optimizer.learning_rate,
        "dtype": train.dtype,
        "cached_features": bool(config.data.features),
        "draft_vocab_size": config.draft.draft_vocab_size,
    }


def _differences(config: Config, common: Config) -> list[str]:
    """Where a drafter's loss, optimiser or start is not what the others have."""
    mine, theirs = (
        dataclasses.asdict(one.loss) | dataclasses.asdict(one.optimizer)
        | {"start_from": Path(one.train.start_from).name or "nothing"}
        for one in (config, common)
    )  # fmt: skip
    return [f"{name} = {value} ({theirs[name]})" for name, value in mine.items() if value != theirs[name]]


def _results(path: Path) -> dict[str, Any]:
    found = _read(path)
    if not all("rows" in one and "draft_seconds" in one for one in found.get("drafters", [{}])):
        raise ConfigError(f"{path}: holds no results of benchmarks.drafters")
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); expected results of benchmarks.drafters") from error


def _command(given: Sequence[str]) -> str:
    """The command without places on this machine: of a path that leads out of the repository only its name is kept."""
    words = [Path(word).name if word.startswith(("/", "..", "~")) else word for word in given]
    return " ".join(["python -m benchmarks.drafters", *words])


if __name__ == "__main__":
    sys.exit(main())
