"""What a run shows: a progress bar, or lines where there is no terminal, and scalars for TensorBoard."""

import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter

from dspark_jax.config import ConfigError

_MOST_SKIPPED = 20


class Report:
    """Collects the step's metrics on the device and fetches them only in `flush`, so that no step waits for another."""

    def __init__(self, workdir: Path, start: int, max_steps: int, console: Console) -> None:
        self.console = console
        self._writer = SummaryWriter(
            str(workdir / "tensorboard"), purge_step=start + 1, write_to_disk=jax.process_index() == 0
        )
        columns = (
            TextColumn("train"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
        )  # fmt: skip
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=max_steps, completed=start, note="compiling")
        self._pending: list[dict[str, Any]] = []
        self._tokens, self._timed_from = 0, 0
        self._real, self._places = 0, 0
        self._clock: float | None = None
        self._in_a_row = 0
        self.skipped = 0

    def __enter__(self) -> "Report":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._writer.close()

    def add(self, metrics: dict[str, Any], tokens: int, places: int) -> None:
        """Takes the metrics of one step, still on the device, and how many real tokens its `places` held."""
        self._pending.append(metrics)
        self._tokens += tokens
        self._real, self._places = self._real + tokens, self._places + places
        if self._clock is None:
            # The first step compiles: its time says nothing about the rest.
            jax.block_until_ready(metrics)
            self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves out of the rates what is not training: compilation, evaluation, checkpoints."""
        self._clock, self._timed_from, self._tokens = time.perf_counter(), len(self._pending), 0

    def flush(self, step: int) -> None:
        """Writes the means since the last flush. Raises ConfigError after too many skipped batches in a row."""
        host = jax.device_get(self._pending)
        elapsed = max(time.perf_counter() - (self._clock or 0.0), 1e-9)
        timed = host[self._timed_from :]
        used = []
        for metrics in host:
            skipped = bool(metrics["skipped"] > 0)
            self._in_a_row = self._in_a_row + 1 if skipped else 0
            self.skipped += skipped
            if not skipped:
                used.append(metrics)
            if self._in_a_row >= _MOST_SKIPPED:
                raise ConfigError(
                    f"step {step}: {_MOST_SKIPPED} batches in a row had a loss or gradient that is not finite; the last"
                    " checkpoint is unharmed: lower --optimizer.learning-rate, or look for broken data"
                )
        means = {name: np.mean([metrics[name] for metrics in used], axis=0) for name in (used[0] if used else ())}
        for name in ("skipped", "slots"):
            means.pop(name, None)
        rates = {}
        if timed:
            rates["blocks_per_second"] = sum(float(metrics["blocks"]) for metrics in timed) / elapsed
            rates["tokens_per_second"] = self._tokens / elapsed
        waste = {"padding": 1.0 - self._real / max(self._places, 1)}
        self._real, self._places = 0, 0
        self.scalars("train", means | rates | waste | {"skipped_batches": self.skipped}, step)
        note = " ".join(
            f"{label} {float((means | rates | waste)[name]):.{digits}f}"
            for label, name, digits in (
                ("loss", "loss", 4), ("tau", "tau", 3), ("acc", "acceptance", 3), ("blocks/s", "blocks_per_second", 0),
                ("padding", "padding", 2),
            )
            if name in means | rates | waste
        )  # fmt: skip
        note += f" skipped {self.skipped}" if self.skipped else ""
        self._progress.update(self._task, completed=step, note=note)
        if not self.console.is_terminal:
            self.say(f"step {step}: {note}")
        self._pending.clear()
        self.restart_clock()

    def scalars(self, group: str, values: dict[str, Any], step: int) -> None:
        """Writes numbers, and vectors as one scalar a slot, under `group`/name."""
        for name, value in values.items():
            if np.ndim(value) == 0:
                self._writer.add_scalar(f"{group}/{name}", float(value), step)
            else:
                for slot, part in enumerate(np.ravel(value)):
                    self._writer.add_scalar(f"{group}/{name}/{slot + 1}", float(part), step)
        self._writer.flush()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)
