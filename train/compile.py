"""Proves without a pod that a run compiles for a TPU slice and fits it: memory, work and time of a step.

    python -m train.compile --config configs/qwen3_8b.py --topology v5p:2x2x4 [--GROUP.FIELD VALUE ...]

The full training step, target included, and the held-out loss are compiled ahead of time from shapes alone: no
weights, no TPU, only libtpu (the extra `tpu`). The config file's `get_target()` gives the target's shape. Exit code 0
when both fit, 1 when one does not, 2 for what must be put right.
"""

import os

# Read when JAX starts: describe TPUs that are not here, and touch none that are.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-16")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no device is taken, so several may run at a time
# The least effort on the program's speed: a quarter of the compile time, and a little more memory than it would need.
os.environ.setdefault("JAX_EXEC_TIME_OPTIMIZATION_EFFORT", "-1.0")

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from dspark_jax import sharding, slices
from dspark_jax.config import Config, ConfigError, TargetConfig, drafter_config
from dspark_jax.config_files import load_target_shape
from dspark_jax.drafters.base import Frozen
from dspark_jax.hlo import Traffic, traffic
from dspark_jax.slices import CHIPS, Chip
from dspark_jax.target import head_table
from train import options
from train.objective import Batch, StepModels, StepWeights, target_shapes
from train.step import TrainState, init_state, jitted_eval, jitted_step, state_shardings


@dataclasses.dataclass(frozen=True)
class Proof:
    """What a compiled step takes of each device. `memory` holds bytes by class; `flops` is the work of the whole step
    divided by the devices; `needed` the total, which exceeds the chip's memory where the compiler gave up; `evaluation`
    that of the held-out loss, beside the optimiser state."""

    chip: Chip
    devices: int
    memory: dict[str, float]
    needed: float
    evaluation: float
    flops: float
    traffic: Traffic
    seconds: float

    @property
    def margin(self) -> float:
        """The share of a device's memory that stays free; negative where something does not fit."""
        return 1 - max(self.needed, self.evaluation) / self.chip.memory

    @property
    def roofline(self) -> dict[str, float]:
        """Seconds that a step needs at least for each resource, if nothing else were slow."""
        return {
            "compute": self.flops / self.chip.flops,
            "memory": self.traffic.memory / self.chip.memory_bandwidth,
            "links": sum(self.traffic.collectives.values()) / self.chip.link_bandwidth,
        }


def abstract_step(
    config: Config, target: TargetConfig, mesh: Mesh
) -> tuple[StepModels, tuple[TrainState, StepWeights, Batch]]:
    """The step's static part and its arguments as shapes with shardings. Raises ConfigError as a run would."""
    drafter = drafter_config(config.draft, target)
    sharding.check_batch(mesh, config.train.batch_size, config.train.accumulation_steps)
    models = StepModels(target, drafter, config.loss, config.optimizer, config.train, scan_layers=True)

    def placed(shapes: Any, where: Any) -> Any:
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, where)

    state = jax.eval_shape(lambda: init_state(drafter, config))
    kind = jnp.dtype(config.target.dtype)
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, kind if len(x.shape) > 1 else x.dtype), target_shapes(target)
    )
    # Shapes stand for arrays from here on.
    vocabulary: Any = None
    to_draft: Any = None
    head: Any = head_table(params)
    if drafter.draft_vocab_size:
        vocabulary = jax.ShapeDtypeStruct((drafter.draft_vocab_size,), jnp.int32)
        to_draft = jax.ShapeDtypeStruct((target.vocab_size,), jnp.int32)
        head = jax.ShapeDtypeStruct((drafter.draft_vocab_size, target.d_model), kind)
    weights = StepWeights(params, Frozen(params["embed"], head, vocabulary), to_draft)
    parts, length, anchors = config.train.accumulation_steps, config.data.max_length, config.data.num_anchors
    lead = (parts, config.train.batch_size // parts) if parts > 1 else (config.train.batch_size,)
    rows = sharding.row_sharding(mesh, len(lead) - 1)
    shapes = (length, jnp.int32), (length, bool), (length, jnp.int32), (anchors, jnp.int32), (anchors, bool)
    fields: Any = (jax.ShapeDtypeStruct((*lead, size), kind, sharding=rows) for size, kind in shapes)
    batch = Batch(*fields)
    arguments = (
        placed(state, state_shardings(models, mesh)), placed(weights, sharding.shardings(weights, mesh)), batch
    )  # fmt: skip
    return models, arguments


def prove(config: Config, target: TargetConfig, topology: str) -> Proof:
    """Compiles training step and held-out loss of `config` for a topology and reads off what they take.

    Raises ConfigError for settings that a run would refuse.
    """
    mesh = sharding.make_mesh(config.mesh, slices.describe(topology))
    models, (state, weights, batch) = abstract_step(config, target, mesh)
    chip = CHIPS[mesh.devices.flat[0].device_kind]
    memory: dict[str, float] = {
        "frozen target": slices.device_bytes(weights.target_params),
        "drafter": slices.device_bytes(state.params),
        "optimiser state": slices.device_bytes(state.opt_state),
        "batch": slices.device_bytes(batch),
    }
    if weights.target_to_draft_V is not None:
        memory["draft vocabulary"] = slices.device_bytes((weights.frozen.head_VD, weights.frozen.draft_to_target_V))
    begun = time.perf_counter()
    with jax.set_mesh(mesh):
        traced = jitted_step(models, mesh).trace(state, weights, batch)
        work = slices.flops(traced.jaxpr.jaxpr) / mesh.size
        compiled, needed = _compile(traced, sum(memory.values()))
        rows = _rows_of_one_part(batch, mesh, config.train.accumulation_steps)
        held_out = jitted_eval(models, mesh).trace(state.params, weights, rows)
        _, evaluation = _compile(held_out, sum(memory.values()) - memory["optimiser state"])
    moved = Traffic({}, 0)
    if compiled is not None:
        stats = _memory_of(compiled)
        memory["activations"] = stats.temp_size_in_bytes
        memory["program"] = stats.generated_code_size_in_bytes
        moved = traffic(compiled.as_text() or "", mesh.size)
    evaluation += memory["optimiser state"]
    return Proof(chip, mesh.size, memory, needed, evaluation, work, moved, time.perf_counter() - begun)


def _rows_of_one_part(batch: Batch, mesh: Mesh, parts: int) -> Batch:
    """The batch that evaluation sees: as many rows as a step works on at a time."""
    if parts == 1:
        return batch
    rows = sharding.row_sharding(mesh)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=rows), batch)


def _compile(traced: Any, arguments: float) -> tuple[Any, float]:
    """A compiled program, None where it does not fit, and the bytes that it needs; `arguments` are those of its own."""
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        needed = slices.bytes_needed(error, arguments)
        if needed is None:
            raise
        return None, needed
    stats = _memory_of(compiled)
    new = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return compiled, stats.argument_size_in_bytes + stats.temp_size_in_bytes + stats.generated_code_size_in_bytes + new


def _memory_of(compiled: Any) -> Any:
    stats = compiled.memory_analysis()
    assert stats is not None
    return stats


def show(proof: Proof, config: Config, topology: str, console: Console) -> None:
    """Prints a proof: memory by class, work, bytes over the links, roofline, verdict."""
    table = Table(title=f"{topology}: {proof.devices} devices, compiled in {proof.seconds:.0f} s", title_justify="left")
    table.add_column("a device and step")
    table.add_column("", justify="right")
    for name, count in proof.memory.items():
        table.add_row(name, f"{count / 2**30:.2f} GiB")
    there = f"of {proof.chip.memory / 2**30:.2f} GiB"
    table.add_row("all", f"{proof.needed / 2**30:.2f} {there}")
    table.add_row("all, while the held-out loss is taken", f"{proof.evaluation / 2**30:.2f} {there}", end_section=True)
    table.add_row("work", f"{proof.flops / 1e12:.1f} TFLOP")
    table.add_row("main memory traffic", f"{proof.traffic.memory / 1e9:.1f} GB")
    for kind, count in proof.traffic.collectives.items():
        table.add_row(kind, f"{count / 1e9:.2f} GB")
    table.add_section()
    for name, seconds in proof.roofline.items():
        table.add_row(f"{name} alone", f"{seconds:.3f} s")
    slowest = max(proof.roofline.values())
    rows = config.train.batch_size
    table.add_row(
        "a step at the roofline", f"{slowest:.3f} s ({rows * config.data.num_anchors / slowest:.0f} anchors/s)"
    )
    console.print(table)
    if proof.margin >= 0:
        console.print(f"fits, with {proof.margin:.0%} of the memory to spare")
    else:
        cure = "raise accumulation_steps or mesh fsdp, or lower blocks_per_chunk"
        console.print(f"does not fit: {-proof.margin:.0%} too much; {cure}")


@dataclasses.dataclass(frozen=True)
class Command:
    """Compiles a run's training step for a TPU topology. With --config given, --help lists every setting of it too."""

    config: Path
    """Python file with get_config() -> Config and get_target() -> TargetConfig."""
    topology: str
    """A TPU slice: v5p:2x2x4, v6e:4x4, v5e:4x4, ..."""


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        command, config = options.parse(Command, arguments, "train.compile")
        proof = prove(config, load_target_shape(command.config), command.topology)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(proof, config, command.topology, Console())
    return 0 if proof.margin >= 0 else 1


if __name__ == "__main__":
    sys.exit(main())
