"""Several processes as one run: what the environment must say, and the same training as in one process."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.config import ConfigError, drafter_config
from train import hosts
from train.checkpoint import Checkpoints
from train.main import load_config
from train.step import init_state
from train.tiny import tiny_target

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIG = REPOSITORY / "configs" / "tiny.py"
SETTINGS = f"""--config {CONFIG} --train.max-steps 6 --train.checkpoint-every 3 --train.eval-every 6
    --train.eval-prompts 2 --train.eval-tokens 4 --train.log-every 1 --data.num-anchors 8""".split()


def test_a_coordinator_without_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    monkeypatch.delenv("JAX_NUM_PROCESSES", raising=False)
    with pytest.raises(ConfigError, match="JAX_NUM_PROCESSES and JAX_PROCESS_ID must be numbers"):
        hosts.start()


def test_alone_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JAX_COORDINATOR_ADDRESS", "TPU_WORKER_HOSTNAMES", "SLURM_NTASKS", "MEGASCALE_NUM_SLICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    hosts.start()
    assert jax.process_count() == 1


def begin(workdir: Path, *more: str, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "train.main", "--workdir", str(workdir), *SETTINGS, *more]
    known = os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment
    return subprocess.Popen(command, env=known, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err[-3000:]
    return out


def losses(out: str) -> list[float]:
    return [float(line.split("loss ")[1].split()[0]) for line in out.splitlines() if ": loss " in line]


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path: Path) -> None:
    alone = finished(begin(tmp_path / "one"))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    pair = [
        begin(
            tmp_path / "two",
            JAX_COORDINATOR_ADDRESS=f"localhost:{port}",
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID=str(index),
        )
        for index in range(2)
    ]
    first, second = (finished(process) for process in pair)
    assert losses(second) == []
    assert len(losses(first)) == 6
    np.testing.assert_allclose(losses(first), losses(alone), atol=1.5e-4)  # shown with four digits
    config = load_config(CONFIG)
    like = init_state(drafter_config(config.draft, tiny_target().config), config)
    ends = []
    for name in ("one", "two"):
        checkpoints = Checkpoints(tmp_path / name / "checkpoints", 2)
        ends.append((checkpoints.load_state(like), checkpoints.load_facts()))
        checkpoints.close()
    (one, one_facts), (two, two_facts) = ends
    assert one_facts.place == two_facts.place == 6
    assert one_facts.best == pytest.approx(two_facts.best)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), one.params, two.params)
    notes = json.loads((tmp_path / "two" / "drafter" / "config.json").read_text())
    assert notes
    # And a run of two processes goes on in one.
    resumed = finished(begin(tmp_path / "two", "--resume", "--train.max-steps", "8"))
    assert "finished at step 8" in resumed
