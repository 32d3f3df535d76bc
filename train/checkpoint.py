"""Checkpoints of a run: training state, place in the data and the run's own facts, written together or not at all."""

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from dspark_jax.config import Config, ConfigError, DrafterConfig

_STATE, _RUN = "state", "run"
# Settings that may change in mid-run without a word: where things lie, how work is cut, what is shown and kept. The
# drafter is checked by itself, what the data hold by its fingerprint.
_FREE = {
    "target": {"path"},
    "data": {"paths", "features", "workers"},
    "train": {
        "start_from", "recount_vocabulary", "markov_init", "accumulation_steps", "blocks_per_chunk", "log_every",
        "checkpoint_every", "keep_checkpoints", "eval_every",
    },
}  # fmt: skip
_FREE_GROUPS = ("draft", "mesh")


@dataclasses.dataclass(frozen=True)
class RunFacts:
    """What a resumed run must know beside the arrays. All of it is JSON.

    `data` is the fingerprint of the data (train.data.fingerprint), `place` the number of the next batch, `data_seed`
    what the order was seeded with. `draft_vocabulary` belongs to the weights: it is never computed again. `best` is
    the best accepted length so far, None before the first evaluation, and `best_step` where it was measured. `owed`:
    an evaluation falls on this step and was not made yet. `target` is the hash of the target's weights
    (weights/fingerprint.py).
    """

    step: int
    drafter: dict[str, Any]
    data: str
    data_seed: int
    place: int
    draft_vocabulary: list[int] | None
    best: float | None
    config: dict[str, Any]
    best_step: int | None = None
    owed: bool = False
    target: str = ""


@dataclasses.dataclass
class _LastAndBest:
    """Orbax asks it what to preserve: the last `keep` checkpoints, and that of step `best`."""

    keep: int
    best: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        last = len(checkpoints) - self.keep
        return [index >= last or checkpoint.step == self.best for index, checkpoint in enumerate(checkpoints)]


class Checkpoints:
    """The last `keep` checkpoints in `directory`, and the one that measured best. Writes happen in the background;
    errors show up one call later. With several processes each writes and reads its own parts of the arrays."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory.absolute()
        self._preserved = _LastAndBest(keep)
        try:
            self._checkpointer = ocp.training.Checkpointer(
                str(self._directory),
                preservation_policy=self._preserved,
                cleanup_tmp_directories=True,
            )
        except OSError as error:
            raise ConfigError(f"{directory}: cannot keep checkpoints there ({error})") from error
        self._writing: Any = None
        self._failed = False

    @property
    def latest(self) -> int | None:
        """Step of the newest finished checkpoint."""
        newest = self._checkpointer.latest
        return None if newest is None else newest.step

    def save(self, state: Any, facts: RunFacts) -> None:
        """Starts writing. Raises ConfigError when this write or the one before it fails, as on a full disk."""
        self.wait()
        self._preserved.best = facts.best_step
        run = json.loads(json.dumps(dataclasses.asdict(facts)))
        try:
            self._writing = self._checkpointer.save_checkpointables_async(
                facts.step, {_STATE: state, _RUN: run}, force=True
            )
        except Exception as error:
            raise self._cannot_write(error) from error

    def wait(self) -> None:
        """Returns when everything is on disk. Raises ConfigError where it could not be written."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except Exception as error:
            raise self._cannot_write(error) from error

    def close(self) -> None:
        """Waits as `wait` does. A failure that was reported already is not reported again."""
        try:
            self.wait()
        finally:
            with contextlib.suppress(*([Exception] if self._failed else [])):
                self._checkpointer.close()

    def load_facts(self) -> RunFacts:
        """Facts of the newest checkpoint. Raises ConfigError where there is none, or none that can be read."""
        if self.latest is None:
            raise ConfigError(f"{self._directory}: holds no finished checkpoint; start the run without --resume")
        try:
            return RunFacts(**self._checkpointer.load_checkpointables(self.latest, {_RUN: None})[_RUN])
        except Exception as error:
            raise self._cannot_read(error) from error

    def load_state(self, like: Any) -> Any:
        """State of the newest checkpoint, bit for bit, with the structure, dtypes and shardings of `like`."""
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        try:
            return self._checkpointer.load_checkpointables(self.latest, {_STATE: abstract})[_STATE]
        except Exception as error:
            raise self._cannot_read(error) from error

    def _cannot_read(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self._directory / str(self.latest)}: cannot read this checkpoint ({_first_line(error)}); remove it to go"
            " on from the one before it"
        )

    def _cannot_write(self, error: Exception) -> ConfigError:
        self._failed = True
        last = "there is no finished one" if self.latest is None else f"the last finished one is of step {self.latest}"
        return ConfigError(
            f"{self._directory}: cannot write a checkpoint ({_first_line(error)}); {last}; free some space, then go on"
            " with --resume"
        )


def check_drafter(facts: RunFacts, config: DrafterConfig, directory: Path) -> None:
    """Raises ConfigError naming the fields in which a checkpoint's drafter differs from the one asked for.

    A field that is younger than the checkpoint had its default when that was written.
    """
    wanted = json.loads(json.dumps(dataclasses.asdict(config)))
    default = {f.name: f.default for f in dataclasses.fields(config) if f.default is not dataclasses.MISSING}
    there = json.loads(json.dumps(default)) | facts.drafter
    differing = [
        f"{name} {there.get(name)!r} there, {here!r} here" for name, here in wanted.items() if there.get(name) != here
    ]
    if differing:
        raise ConfigError(
            f"{directory}: its checkpoint is of another drafter ({'; '.join(differing)}); use the config it was started"
            " with, or another --workdir"
        )


def check_target(facts: RunFacts, weights: str, config: Config, directory: Path) -> None:
    """Raises ConfigError where a checkpoint was trained on the features of another target. Those that are older than
    this note name none."""
    if facts.target not in ("", weights):
        raise ConfigError(
            f"{directory}: its checkpoint is of another target ({facts.config['target']['path']}, weights"
            f" {facts.target}; target {config.target.path} has {weights}); use its own, or another --workdir"
        )


def changed_settings(facts: RunFacts, config: Config) -> list[str]:
    """What a run goes on with that its checkpoint was not trained with, one line a setting."""
    groups = json.loads(json.dumps(dataclasses.asdict(config)))
    return [
        f"{group} {name} was {facts.config[group][name]!r}, is {value!r} from here on"
        for group, fields in groups.items()
        if group not in _FREE_GROUPS
        for name, value in fields.items()
        if name not in _FREE.get(group, ()) and facts.config.get(group, {}).get(name, value) != value
    ]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
