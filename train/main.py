"""Trains a drafter.

    python -m train.main --config configs/X.py --workdir DIR [--resume] [--train.max-steps N] [--GROUP.FIELD VALUE ...]

A config is a Python file whose `get_config()` returns a dspark_jax.config.Config; every field of it is also an option.
"""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import dataclasses
import importlib.util
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import tyro
from rich.console import Console

from dspark_jax.config import Config, ConfigError, TargetConfig

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Command:
    """Trains a drafter. With --config given, --help lists every setting of that config as an option."""

    config: Path
    """Python file with get_config() -> Config."""
    workdir: Path
    """Where checkpoints, TensorBoard scalars and drafters go."""
    resume: bool = False
    """Go on from the newest checkpoint in the workdir."""


def load_config(path: Path) -> Config:
    """What `get_config()` of the Python file at `path` returns. Raises ConfigError with the file and what is wrong."""
    return _call(path, "get_config", Config)


def load_target_shape(path: Path) -> TargetConfig:
    """What `get_target()` of the Python file at `path` returns: the target's shape, where no weights are read."""
    return _call(path, "get_target", TargetConfig)


def load_drafters(path: Path) -> dict[str, Config]:
    """What `get_drafters()` of the Python file at `path` returns: the runs of a comparison, by name."""
    return _call(path, "get_drafters", dict)


def _call(path: Path, name: str, kind: type[_T]) -> _T:
    spec = importlib.util.spec_from_file_location("dspark_jax_run_config", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"--config {path}: no such Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        function = getattr(module, name, None)
        if function is None:
            raise ConfigError(f"defines no {name}()")
        made = function()
    except Exception as error:
        raise ConfigError(f"--config {path}: {error or type(error).__name__}") from error
    if not isinstance(made, kind):
        raise ConfigError(f"--config {path}: {name}() returned {type(made).__name__}, expected {kind.__name__}")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when the run finished or was stopped and saved, 2 for what the user must put right."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    wants_help = [option for option in given if option in ("-h", "--help")]
    names = {option.split("=")[0] for option in given}
    ours = given
    if wants_help and "--config" in names:  # the help of that config, which needs no place for a run
        ours = [option for option in given if option not in wants_help]
        ours += [] if "--workdir" in names else ["--workdir", "."]
    try:
        command, settings = tyro.cli(Command, args=ours, prog="train.main", return_unknown_args=True)
        config = tyro.cli(Config, args=settings + wants_help, default=load_config(command.config), prog="train.main")
        from train import hosts
        from train.loop import train

        hosts.start()
        # Orbax logs the traceback of a failed write, which is then reported as one line.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        outcome = train(config, command.workdir, command.resume, Console(quiet=not hosts.is_first()))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # Every host says it: the one that reads the exit code of a host must know whether there is more to do.
    best = "not measured" if outcome.best is None else f"{outcome.best:.3f}"
    print(
        f"{'stopped and saved' if outcome.stopped else 'finished'} at step {outcome.step}; best accepted length {best}"
    )
    if outcome.stopped:
        print("go on with the same command and --resume")
    return 0


if __name__ == "__main__":
    sys.exit(main())
