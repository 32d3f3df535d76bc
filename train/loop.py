"""The training loop: steps, logs, evaluations, checkpoints, and a clean end on SIGTERM."""

import contextlib
import dataclasses
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from rich.console import Console

from dspark_jax.config import Config, ConfigError
from dspark_jax.weights.drafter_files import native_format, write_drafter
from train import data, evaluate, hosts, setup
from train.checkpoint import Checkpoints, RunFacts, changed_settings, check_drafter, check_target
from train.feed import Feed
from train.report import Report
from train.step import TrainState, eval_step, train_step

_HELD_OUT_RECORDS = 64


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended: last finished step, best accepted length, batches skipped, whether a signal stopped it."""

    step: int
    best: float | None
    skipped: int
    stopped: bool


def train(config: Config, workdir: Path, resume: bool, console: Console) -> Outcome:
    """Trains until `config.train.max_steps`, or until SIGTERM or SIGINT, which save first.

    `workdir` receives checkpoints/, tensorboard/, drafter/ (the last) and drafter_best/ (the best by accepted length
    at temperature 0). Raises ConfigError for settings, files and disks that cannot be used.
    """
    with contextlib.closing(_open(workdir, config.train.keep_checkpoints, resume)) as checkpoints:
        facts = checkpoints.load_facts() if resume else None
        run = setup.build(config, facts)
        if facts:
            check_drafter(facts, run.drafter, workdir)
            check_target(facts, run.target_hash, config, workdir)
            for change in changed_settings(facts, config):
                console.print(f"note: {change}", markup=False, highlight=False, soft_wrap=True)
        return _Training(run, workdir, checkpoints, facts, console).run()


def _open(workdir: Path, keep: int, resume: bool) -> Checkpoints:
    directory = workdir / "checkpoints"
    if resume and not directory.is_dir():
        raise ConfigError(f"{workdir}: holds no checkpoint to resume from; start the run without --resume")
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--workdir {workdir}: cannot be made ({error.strerror})") from error
    checkpoints = Checkpoints(directory, keep)
    if checkpoints.latest is not None and not resume:
        raise ConfigError(
            f"{workdir}: holds a run, at step {checkpoints.latest}; go on with --resume, or choose another --workdir"
        )
    return checkpoints


class _Training:
    """The moving parts of one run."""

    def __init__(
        self, run: setup.Run, workdir: Path, checkpoints: Checkpoints, facts: RunFacts | None, console: Console
    ) -> None:
        self.run_, self.workdir, self.checkpoints, self.console = run, workdir, checkpoints, console
        config = run.config
        self.fingerprint = data.fingerprint(run.groups, batch_size=config.train.batch_size)
        self.state: TrainState = run.first_state(resumed=facts is not None)
        self.step, self.data_seed, place = 0, config.train.seed, 0
        self.best, self.best_step, self.owed = None, None, False
        if facts:
            self.state = checkpoints.load_state(self.state)
            self.step, self.data_seed, place = facts.step, facts.data_seed, facts.place
            self.best, self.best_step, self.owed = facts.best, facts.best_step, facts.owed
            if facts.data != self.fingerprint:
                # Other records: the old place means nothing, and the old order would repeat its first records.
                self.data_seed, place = config.train.seed + self.step, 0
                console.print(f"note: the data changed since step {self.step}: its order starts anew", markup=False)
        self.feed = Feed(run.groups, config.data, config.train, run.mesh, self.data_seed, place, run.features)
        held_out = sorted(run.held_out, key=lambda record: record.split_key)
        self.held_out: list[data.Row] = [(record,) for record in held_out[:_HELD_OUT_RECORDS]]
        self.prompts = evaluate.prompts(
            held_out, config.train.eval_prompts, run.target.config.max_length - config.train.eval_tokens
        )
        if config.train.eval_every and not self.prompts:
            raise ConfigError(
                f"train eval_tokens = {config.train.eval_tokens}: no held-out prompt and its answer fit the target's"
                f" context of {run.target.config.max_length}"
            )
        self.measured: dict[str, Any] = {}
        self.saved: int | None = self.step if facts else None

    def run(self) -> Outcome:
        settings = self.run_.config.train
        for line in self.run_.summary():
            self.console.print(line, highlight=False, soft_wrap=True, markup=False)
        stopped = False
        with Report(self.workdir, self.step, settings.max_steps, self.console) as report, _stop_signals() as asked:
            if self.owed and settings.eval_every:
                self._evaluate(report)
            while self.step < settings.max_steps and not stopped:
                self._train_step(report)
                last = self.step == settings.max_steps
                stopped = hosts.agreed(asked, self.step) and not last
                if stopped or last or self.step % settings.log_every == 0:
                    report.flush(self.step)
                saving = stopped or last or self.step % settings.checkpoint_every == 0
                self.owed = bool(settings.eval_every) and (last or self.step % settings.eval_every == 0)
                if saving and not last:
                    self._checkpoint()  # an evaluation takes long, and a preempted run has little time
                if self.owed and not stopped:
                    self._evaluate(report)
                if saving:
                    self._save()
                    report.restart_clock()
            self.checkpoints.wait()
        return Outcome(self.step, self.best, report.skipped, stopped)

    def _train_step(self, report: Report) -> None:
        run, fed = self.run_, next(self.feed)
        self.state, metrics = train_step(run.models, run.mesh, self.state, run.weights, fed.batch)
        self.step += 1
        report.add(metrics, fed.tokens, fed.places)

    def _evaluate(self, report: Report) -> None:
        """Held-out loss and real accepted length; keeps the drafter when it is the best so far."""
        run, settings = self.run_, self.run_.config.train
        rows = settings.batch_size // settings.accumulation_steps  # as many as a training step works on at a time
        elements = data.held_out_batches(
            self.held_out, run.shapes[-1], rows, settings.seed, run.features, hosts.shard(run.mesh)
        )
        step = functools.partial(_eval, run, self.state.params)
        metrics: dict[str, Any] = dict(evaluate.held_out_metrics(step, elements))
        target, drafter = run.servable(self.state.params)
        lengths = [
            evaluate.accepted_length(target, drafter, self.prompts, settings.eval_tokens, temperature, settings.seed)
            for temperature in (0.0, 1.0)
        ]
        # Every host has decoded for itself, and rounding may differ: what is best must be one answer.
        length, sampled = (float(x) for x in hosts.of_first(np.asarray(lengths, np.float32)))
        metrics |= {"accepted_length/temperature_0": length, "accepted_length/temperature_1": sampled}
        self.measured = {"step": self.step, "temperature_0": length, "temperature_1": sampled}
        report.scalars("held_out", metrics, self.step)
        best = self.best is None or length > self.best
        report.say(
            f"step {self.step}: held-out loss {float(metrics['loss']):.4f}, tau {float(metrics['tau']):.3f}, accepted"
            f" length {length:.3f} (temperature 0), {sampled:.3f} (1){', the best so far' if best else ''}"
        )
        self.owed = False
        if best:
            self.best, self.best_step = length, self.step
            self._write_drafter("drafter_best")
            self._save()
        report.restart_clock()

    def _save(self) -> None:
        self._checkpoint()
        self._write_drafter("drafter")

    def _checkpoint(self) -> None:
        """Saves the state of this step, once."""
        if self.step == self.saved:
            return
        run = self.run_
        facts = RunFacts(
            step=self.step,
            drafter=dataclasses.asdict(run.drafter),
            data=self.fingerprint,
            data_seed=self.data_seed,
            place=self.feed.place,
            draft_vocabulary=None if run.draft_vocabulary is None else run.draft_vocabulary.tolist(),
            best=self.best,
            config=dataclasses.asdict(run.config),
            best_step=self.best_step,
            owed=self.owed,
            target=run.target_hash,
        )
        self.checkpoints.save(self.state, facts)
        self.saved = self.step

    def _write_drafter(self, name: str) -> None:
        run = self.run_
        config = dataclasses.asdict(run.config)
        # Names only: where the files lie is nobody's business who downloads the drafter.
        config["target"]["path"] = run.target.config.name or Path(run.config.target.path).name
        config["data"] |= {"paths": [Path(path).name for path in run.config.data.paths], "features": ""}
        config["train"] |= {"start_from": Path(run.config.train.start_from).name}
        notes = {
            "step": self.step,
            "measured": self.measured,
            "target_weights": run.target_hash,
            "chat_template": run.target.tokenizer.template_hash,
            "conversations": len(run.train),
            "thinking": sum(record.thinking for record in run.train),
            "skipped": run.conversations.skipped,
            "config": config,
        }
        params = hosts.to_host(self.state.params)
        if not hosts.is_first():
            return
        form = native_format(run.drafter)
        write_drafter(self.workdir / name, form, run.drafter, params, run.draft_vocabulary, notes)


def _eval(run: setup.Run, params: Any, batch: evaluate.Batch) -> dict[str, jax.Array]:
    return eval_step(run.models, run.mesh, params, run.weights, hosts.place_batch(run.mesh, batch, 1))


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Says whether SIGTERM (preemption) or SIGINT has come; a second SIGINT interrupts at once, a second SIGTERM does
    not disturb the save."""
    asked = threading.Event()
    # With several processes JAX itself listens for SIGTERM and makes them agree on a step.
    if threading.current_thread() is not threading.main_thread() or jax.process_count() > 1:
        yield asked.is_set
        return

    def stop(number: int, _: FrameType | None) -> None:
        asked.set()
        if number == signal.SIGINT:
            signal.signal(number, before[signal.SIGINT])

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
