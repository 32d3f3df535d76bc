"""The training half of benchmarks/drafters.py: one folder a run, which remembers what it was and how long it took."""

import dataclasses
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from dspark_jax.config import Config, ConfigError, drafter_config
from dspark_jax.target import Target
from serve.report import write_json
from train import data
from train.conversations import load_conversations
from train.loop import train
from train.objective import supervised_slots

Facts = dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Budget:
    """The rows that all drafters of a comparison learn from; `digest` names them."""

    groups: list[data.Group]
    digest: str


def make_budget(config: Config, target: Target) -> Budget:
    """Raises ConfigError for conversations that cannot be read."""
    if target.tokenizer is None:
        raise ConfigError(f"target {config.target.path}: has no tokenizer, so conversations cannot be encoded")
    records = load_conversations(config.data, target.tokenizer, target.config.vocab_size).records
    training, _ = data.split(records, config.data.validation_fraction)
    groups = data.groups(training, config.data, data.sizes(records, config.data))
    return Budget(groups, data.fingerprint(groups, batch_size=config.train.batch_size))


@functools.cache
def seen(budget: Budget, seed: int, steps: int, batch_size: int, num_drafts: int) -> tuple[int, int]:
    """Blocks and supervised positions of the first `steps` batches: the slots whose label counts in the loss."""
    slots = jax.jit(supervised_slots, static_argnums=4)
    stream, blocks, positions = data.batches(budget.groups, batch_size, seed), 0, 0
    for _ in range(steps):
        x = next(stream)
        blocks += int(x["keep"].sum())
        positions += int(slots(x["supervised"], x["start"], x["anchors"], x["keep"], num_drafts).sum())
    return blocks, positions


def trained(config: Config, folder: Path, budget: Budget, target: Target, console: Console) -> Facts | None:
    """What is known of the run in `folder` once it is over: seconds of training (all sessions together, compilation
    included), blocks and supervised positions. A run that is over is left alone, one that was stopped or killed goes on
    from its last checkpoint. None: it was stopped by a signal now, and saved.

    Raises ConfigError where the folder holds a run of other settings or data.
    """
    facts = _facts(folder, _settings(config, budget))
    if facts["finished"]:
        return facts
    file, newest = folder / "run.json", _newest_checkpoint(folder)
    if facts["started"] is not None and newest is not None:
        # Killed: what it did up to its checkpoint counts, what came after is done again.
        facts["seconds"] += max(0.0, newest.stat().st_mtime - facts["started"])
    facts["started"] = time.time()
    folder.mkdir(parents=True, exist_ok=True)
    write_json(file, facts)
    outcome = train(config, folder, newest is not None, console)
    facts["seconds"] += time.time() - facts["started"]
    facts |= {"started": None, "finished": not outcome.stopped, "skipped": facts["skipped"] + outcome.skipped}
    if facts["finished"]:
        size = drafter_config(config.draft, target.config).num_drafts
        plan = config.train
        facts["blocks"], facts["positions"] = seen(budget, plan.seed, plan.max_steps, plan.batch_size, size)
    write_json(file, facts)
    # The programs of a run are of no use to the next one.
    jax.clear_caches()
    return facts if facts["finished"] else None


def _settings(config: Config, budget: Budget) -> dict[str, Any]:
    """All that a run's result depends on, as it comes back from JSON."""
    made = dataclasses.asdict(config)
    made["data"] |= {"paths": budget.digest, "features": "", "workers": 0}
    made["target"]["path"] = Path(config.target.path).name
    return json.loads(json.dumps(made))


def _facts(folder: Path, settings: dict[str, Any]) -> Facts:
    fresh = {"settings": settings, "seconds": 0.0, "started": None, "finished": False, "skipped": 0}
    try:
        facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return fresh
    except ValueError as error:
        raise ConfigError(f"{folder / 'run.json'}: not JSON ({error}); remove {folder} to train it anew") from error
    old, new = (
        {f"{group}.{field}": value for group, fields in made.items() for field, value in fields.items()}
        for made in (facts["settings"], settings)
    )
    differing = [
        f"{name} {old.get(name)!r} there, {value!r} here" for name, value in new.items() if old.get(name) != value
    ]
    if differing:
        raise ConfigError(f"{folder}: holds a run of other settings ({'; '.join(differing)}); choose another --workdir")
    return facts


def _newest_checkpoint(folder: Path) -> Path | None:
    """The folder of the newest finished checkpoint."""
    steps = [path for path in folder.glob("checkpoints/*") if path.name.isdigit()]
    return max(steps, key=lambda path: int(path.name), default=None)
