"""Trains a drafter.

    python -m train.main --config configs/X.py --workdir DIR [--resume] [--train.max-steps N] [--GROUP.FIELD VALUE ...]

A config is a Python file whose `get_config()` returns a dspark_jax.config.Config; every field of it is also an option.
"""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dspark_jax.config import ConfigError
from train import options


@dataclasses.dataclass(frozen=True)
class Command:
    """Trains a drafter. With --config given, --help lists every setting of that config as an option."""

    config: Path
    """Python file with get_config() -> Config."""
    workdir: Path
    """Where checkpoints, TensorBoard scalars and drafters go."""
    resume: bool = False
    """Go on from the newest checkpoint in the workdir."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when the run finished or was stopped and saved, 2 for what the user must put right."""
    try:
        command, config = options.parse(Command, arguments, "train.main")
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
