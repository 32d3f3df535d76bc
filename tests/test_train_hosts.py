"""Several processes as one run: what the environment must say, and the same training as in one process."""

import dataclasses
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.config import ConfigError, drafter_config
from dspark_jax.config_files import load_config
from train import hosts
from train.checkpoint import Checkpoints, RunFacts
from train.step import TrainState, init_state
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


@dataclasses.dataclass(frozen=True)
class Started:
    """A run in its own process. What it says goes into a file: a full pipe would stop it, and with it the others."""

    process: subprocess.Popen
    log: Path


def begin(workdir: Path, *more: str, **environment: str) -> Started:
    command = [sys.executable, "-m", "train.main", "--workdir", str(workdir), *SETTINGS, *more]
    known = os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment
    with tempfile.NamedTemporaryFile("w", dir=workdir.parent, suffix=".log", delete=False) as log:
        process = subprocess.Popen(command, env=known, stdout=log, stderr=subprocess.STDOUT)
    return Started(process, Path(log.name))


def finished(*runs: Started, seconds: float = 400) -> list[str]:
    """What runs said that ended well. Where one fails, or time is up, none is left behind."""
    end = time.monotonic() + seconds
    try:
        while any(run.process.poll() is None for run in runs) and time.monotonic() < end:
            if any(run.process.poll() for run in runs):
                break
            time.sleep(0.1)
    finally:
        for run in runs:
            if run.process.poll() is None:
                run.process.kill()
                run.process.wait()
    said = [run.log.read_text(encoding="utf-8") for run in runs]
    assert [run.process.returncode for run in runs] == [0] * len(runs), "\n".join(text[-3000:] for text in said)
    return said


def losses(out: str) -> list[float]:
    return [float(line.split("loss ")[1].split()[0]) for line in out.splitlines() if ": loss " in line]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run in one process on one device, and what it printed."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    return workdir, *finished(begin(workdir))


def end_of(workdir: Path) -> tuple[TrainState, RunFacts]:
    config = load_config(CONFIG)
    like = init_state(drafter_config(config.draft, tiny_target().config), config)
    checkpoints = Checkpoints(workdir / "checkpoints", 2)
    state, facts = checkpoints.load_state(like), checkpoints.load_facts()
    checkpoints.close()
    return state, facts


def assert_alike(left: Path, right: Path) -> None:
    (one, one_facts), (two, two_facts) = end_of(left), end_of(right)
    assert one_facts.place == two_facts.place == one_facts.step == two_facts.step
    assert one_facts.best == pytest.approx(two_facts.best)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), one.params, two.params)


@pytest.mark.slow
def test_eight_devices_train_like_one_and_go_on_with_another_number(tmp_path: Path, alone: tuple[Path, str]) -> None:
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    mesh = ["--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2"]
    (out,) = finished(begin(tmp_path / "eight", *mesh, **devices))
    np.testing.assert_allclose(losses(out), losses(alone[1]), atol=1.5e-4)  # shown with four digits
    assert_alike(tmp_path / "eight", alone[0])
    (resumed,) = finished(begin(tmp_path / "eight", "--resume", "--train.max-steps", "8"))
    assert "finished at step 8" in resumed
    assert end_of(tmp_path / "eight")[1].place == 8


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path: Path, alone: tuple[Path, str]) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    names = {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": "2"}
    first, second = finished(*(begin(tmp_path / "two", **names, JAX_PROCESS_ID=str(index)) for index in range(2)))
    assert losses(second) == []
    assert len(losses(first)) == 6
    np.testing.assert_allclose(losses(first), losses(alone[1]), atol=1.5e-4)  # shown with four digits
    assert_alike(tmp_path / "two", alone[0])
    assert (tmp_path / "two" / "drafter" / "config.json").is_file()
    (resumed,) = finished(begin(tmp_path / "two", "--resume", "--train.max-steps", "8"))
    assert "finished at step 8" in resumed
