"""Started by test_train_kill: a training run that is killed and resumed, over and over, then left to finish.

The program is loaded once and forked for every attempt, before JAX starts: loading takes longer than training.
"""

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

from train import loop  # noqa: F401  (loaded here for all attempts)
from train.main import main


def attempt(arguments: list[str], resume: bool, kill_after: float | None) -> bool:
    """One process's run; says whether it came to its end."""
    child = os.fork()
    if child == 0:
        with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
            code = main([*arguments, *(["--resume"] if resume else [])])
        os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if status not in (0, signal.SIGKILL):
        sys.exit(f"an attempt failed with status {status}")
    return status == 0


def has_checkpoint(workdir: str) -> bool:
    directory = Path(workdir) / "checkpoints"
    return directory.is_dir() and any(path.name.isdigit() for path in directory.iterdir())


if __name__ == "__main__":
    workdir, kills, seed, *arguments = sys.argv[1:]
    arguments += ["--workdir", workdir]
    rng = random.Random(int(seed))
    longest, killed = 6.0, 0
    while killed < int(kills):
        killed += not attempt(arguments, has_checkpoint(workdir), rng.uniform(0.2, longest))
        longest = min(longest * 1.1, 20.0) if not has_checkpoint(workdir) else longest
    attempt(arguments, has_checkpoint(workdir), None)
    print(f"killed {killed}")
