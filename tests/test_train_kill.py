"""Kill -9 at random moments: a run resumed twenty times ends, bit for bit, where an uninterrupted one does."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.config import drafter_config
from dspark_jax.config_files import load_config
from train.checkpoint import Checkpoints, RunFacts
from train.step import TrainState, init_state
from train.tiny import tiny_target

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIG = REPOSITORY / "configs" / "tiny.py"
SETTINGS = f"""--config {CONFIG} --train.max-steps 240 --train.checkpoint-every 3 --train.eval-every 0
    --train.log-every 60 --data.num-anchors 8""".split()


def run(workdir: Path, kills: int) -> str:
    environment = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "JAX_COMPILATION_CACHE_DIR": str(workdir.parent / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, str(REPOSITORY / "tests" / "kill_worker.py"), str(workdir), str(kills), "7", *SETTINGS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def end_of(workdir: Path) -> tuple[TrainState, RunFacts]:
    config = load_config(CONFIG)
    checkpoints = Checkpoints(workdir / "checkpoints", 2)
    like = init_state(drafter_config(config.draft, tiny_target().config), config)
    state, facts = checkpoints.load_state(like), checkpoints.load_facts()
    checkpoints.close()
    return state, facts


@pytest.mark.slow
def test_twenty_kills_change_no_bit(tmp_path: Path) -> None:
    run(tmp_path / "straight", 0)
    assert "killed 20" in run(tmp_path / "killed", 20)
    (state, facts), (wanted, wanted_facts) = end_of(tmp_path / "killed"), end_of(tmp_path / "straight")
    assert facts == wanted_facts
    assert facts.step == 240
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), state, wanted)
    written = [(tmp_path / name / "drafter" / "model.safetensors").read_bytes() for name in ("killed", "straight")]
    assert written[0] == written[1]
