"""What the two commands on checkpoints share: which folder is meant, and how bad input ends."""

import sys
from collections.abc import Callable
from pathlib import Path

from dspark_jax.config import ConfigError

# What a training run keeps in its folder: the best drafter so far, and the newest.
_IN_WORKDIR = ("drafter_best", "drafter")


def drafter_folder(path: str) -> str:
    """`path` itself, or the drafter inside it where it is the folder of a training run."""
    folder = Path(path)
    if folder.is_dir() and not (folder / "config.json").exists():
        for name in _IN_WORKDIR:
            if (folder / name / "config.json").exists():
                print(f"{path}: a training run; taking {name}", file=sys.stderr)
                return str(folder / name)
    return path


def run(command: Callable[[], None]) -> int:
    """Exit status of `command`: 2, and one line on stderr, for bad input."""
    try:
        command()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or 'files'}: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0
