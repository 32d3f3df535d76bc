"""Proves without a TPU that the engine compiles for a slice and fits it, and predicts its step times.

    python -m serve.compile --target-config qwen3_8b --topology v5e:2x4 --requests 64

Every program that an engine for so many requests would compile is compiled here, ahead of time and from shapes alone:
no weights, no TPU, only libtpu (the extra `tpu`). The times are a roofline: a lower bound, whose shape by packed tokens
is the curve that the scheduler will measure on the real slice. Exit code 0 when the engine fits, 1 when it does not, 2
for what must be put right.
"""

import os

# Read when JAX starts: describe TPUs that are not here, and touch none that are.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-16")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no device is taken, so two may run at a time
# The least effort on the program's speed: it compiles sooner, and takes a little more memory than it would need.
os.environ.setdefault("JAX_EXEC_TIME_OPTIMIZATION_EFFORT", "-1.0")

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from dspark_jax import scanned_target, sharding, slices
from dspark_jax.config import ConfigError, DrafterConfig, MeshSettings, TargetConfig, drafter_config
from dspark_jax.config_files import load_config, load_target_shape
from dspark_jax.drafters.base import Frozen
from dspark_jax.drafters.registry import algorithm
from dspark_jax.hlo import traffic
from dspark_jax.slices import CHIPS, Chip
from dspark_jax.target import TargetModel, head_table
from serve import report, roofline
from serve.engine import empty_state, scans, state_shardings, trace
from serve.roofline import Work
from serve.rounds import Models, State, Weights
from serve.sizes import EngineConfig, program_keys
from serve.suite_store import finite

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
DTYPE = jnp.dtype(jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Command:
    """Compiles the serving rounds of a target and its drafter for a TPU topology."""

    target_config: str
    """A file of configs/ that has get_target(), such as qwen3_8b, or the path of one."""
    topology: str
    """A TPU slice: v5e:2x4, v5p:2x2x1, v6e:2x2, ..."""
    requests: int = 64
    """Most requests at a time."""
    bucket_growth: int = 4
    """How many times larger each bucket of requests and of tokens is than the one before (EngineConfig, where it is 2:
    twice as many programs)."""
    context: int = 2048
    """Context of each request that the times assume."""
    max_context: int = 4096
    """Longest context of a request: pages are there for all requests of this length."""
    prefill: tuple[int, ...] = (512,)
    """Chunk lengths of prompts."""
    tensor: int = 0
    """Devices that share the heads of a layer; 0: as many as its key/value heads allow, the others split weights."""
    json: Path | None = None
    """File for the numbers."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled round on one device: bytes it needs beside weights and pages, its work, seconds to compile."""

    key: tuple[Any, ...]
    temporaries: float
    work: Work
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Proof:
    """What the engine takes of each device. `memory`: bytes of weights and pages by name; where these alone do not fit,
    nothing was compiled."""

    chip: Chip
    mesh: Mesh
    memory: dict[str, float]
    programs: list[Program]

    @property
    def needed(self) -> float:
        return sum(self.memory.values()) + max((p.temporaries for p in self.programs), default=0)

    @property
    def margin(self) -> float:
        """The share of a device's memory that stays free; negative where the engine does not fit."""
        return 1 - self.needed / self.chip.memory


def load_models(name: str) -> tuple[TargetConfig, DrafterConfig]:
    """The target's shape and that of its drafter from a config file. Raises ConfigError where there is none."""
    path = Path(name) if name.endswith(".py") else CONFIGS / f"{name}.py"
    if not path.is_file():
        known = sorted(p.stem for p in CONFIGS.glob("*.py") if "def get_target" in p.read_text())
        raise ConfigError(f"--target-config {name}: no such file; known names: {', '.join(known) or 'none here'}")
    target = load_target_shape(path, "--target-config")
    return target, drafter_config(load_config(path, "--target-config").draft, target)


def slice_mesh(topology: str, tensor: int, num_kv_heads: int) -> Mesh:
    """The mesh over a slice's devices: `tensor` (0: as many as share the heads evenly) times `fsdp`, which splits each
    product once more. Raises ConfigError where there is no such slice, or it cannot be split so."""
    devices = slices.describe(topology)
    tensor = tensor or math.gcd(len(devices), num_kv_heads)
    return sharding.make_mesh(MeshSettings(data=1, fsdp=max(1, len(devices) // tensor), tensor=tensor), devices)


def abstract_arguments(models: Models, config: EngineConfig, mesh: Mesh) -> tuple[Weights, State]:
    """Weights and state as shapes with shardings. Raises ConfigError where the mesh does not divide them."""
    assert models.drafter is not None
    target, drafter, ids = models.target, models.drafter, jnp.zeros((1, 1), jnp.int32)

    def cast(shapes: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, DTYPE if len(x.shape) > 1 else x.dtype), shapes)

    def placed(shapes: Any, where: Any) -> Any:
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, where)

    with jax.set_mesh(mesh):
        params = cast(jax.eval_shape(lambda: TargetModel(target).init(jax.random.key(0), ids, ids))["params"])
        if models.scan_layers:
            params = jax.eval_shape(functools.partial(scanned_target.stack, target), params)
        draft_params = cast(jax.eval_shape(lambda: algorithm(drafter).init_params(drafter, jax.random.key(0))))
        make = functools.partial(empty_state, models, config, DTYPE)
        state = placed(jax.eval_shape(make), state_shardings(make, mesh))
    vocabulary, head = None, head_table(params)
    if drafter.draft_vocab_size:
        vocabulary = jax.ShapeDtypeStruct((drafter.draft_vocab_size,), jnp.int32)
        head = jax.ShapeDtypeStruct((drafter.draft_vocab_size, target.d_model), DTYPE)
    frozen = Frozen(params["embed"], head, vocabulary)  # type: ignore[arg-type]  (shapes stand for arrays here)
    weights = Weights(params, draft_params, frozen)
    return placed(weights, sharding.shardings(weights, mesh)), state


def weights_read(models: Models, weights: Weights, kind: str) -> int:
    """Bytes of the weights that a device reads in a round, each once: all matrices but an embedding that is no head,
    and where it drafts those of the drafter and the head again."""
    assert weights.frozen is not None
    read = slices.device_bytes(weights.target)
    if not models.target.tied_head:
        read -= slices.device_bytes(weights.target["embed"])
    return read + (slices.device_bytes((weights.drafter, weights.frozen.head_VD)) if kind == "round" else 0)


def compile_program(
    models: Models, config: EngineConfig, key: tuple[Any, ...], weights: Weights, state: State, mesh: Mesh, context: int
) -> Program:
    """Compiles one program for the devices of `mesh` and reads off what it takes."""
    kind, requests, tokens = sizes(key)
    begun = time.perf_counter()
    traced = trace(models, config, key, weights, state, mesh)
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        held = slices.device_bytes((weights, state))
        needed = slices.bytes_needed(error, held)
        if needed is None:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"the TPU compiler refuses the program {' '.join(map(str, key))}: {reason}") from error
        temporaries, work = needed - held, Work(math.nan, math.nan)
        return Program(key, temporaries, work, time.perf_counter() - begun)
    seconds, stats = time.perf_counter() - begun, compiled.memory_analysis()
    assert stats is not None and models.drafter is not None
    temporaries = stats.temp_size_in_bytes + stats.generated_code_size_in_bytes
    temporaries += stats.output_size_in_bytes - stats.alias_size_in_bytes
    # Attention is counted here, for contexts that are there: its loops run to no length known beforehand.
    dots = slices.flops(traced.jaxpr.jaxpr, without=("while", "pallas_call")) / mesh.size
    sent = sum(traffic(compiled.as_text() or "", mesh.size).collectives.values())
    work = Work(dots, weights_read(models, weights, kind), sent)
    tensor, itemsize = mesh.shape["tensor"], DTYPE.itemsize
    work += roofline.attention_work(models.target, requests, tokens, context, itemsize, tensor)
    if kind == "round":
        rows = requests * models.drafter.block_size
        work += roofline.attention_work(models.drafter, requests, rows, context, itemsize, tensor)
    return Program(key, temporaries, work, seconds)


def sizes(key: tuple[Any, ...]) -> tuple[str, int, int]:
    """What a program is, its requests, and the rows of the target in it."""
    return key[0], 1 if key[0] == "prefill" else key[1], key[-1]


def prove(command: Command, on_program: Callable[[str, int, int], None] = lambda *_: None) -> Proof:
    """Compiles every program of the engine that `command` describes. `on_program` hears which comes next, how many are
    done, and of how many. Raises ConfigError for what an engine would refuse."""
    target, drafter = load_models(command.target_config)
    config = EngineConfig(
        max_requests=command.requests, bucket_growth=command.bucket_growth, max_context=command.max_context,
        prefill_lengths=command.prefill,
    )  # fmt: skip
    if not 0 <= command.context <= command.max_context:
        raise ConfigError(f"--context {command.context}: expected 0 to --max-context {command.max_context}")
    heads = math.gcd(target.num_kv_heads, drafter.num_kv_heads)
    mesh = slice_mesh(command.topology, command.tensor, heads)
    models = Models(target, drafter, config.verify, config.shortlist, scans(config, target, "tpu"))
    weights, state = abstract_arguments(models, config, mesh)
    memory: dict[str, float] = {
        "target": slices.device_bytes(weights.target),
        "drafter": slices.device_bytes(weights.drafter),
        "target pages": slices.device_bytes(state.target_pages),
        "drafter pages": slices.device_bytes(state.draft_pages),
    }
    if drafter.draft_vocab_size and weights.frozen:  # else its head is the target's
        memory["draft vocabulary"] = slices.device_bytes((weights.frozen.head_VD, weights.frozen.draft_to_target_V))
    chip, programs = CHIPS[mesh.devices.flat[0].device_kind], []
    if sum(memory.values()) <= chip.memory:
        keys = program_keys(config, drafter.num_drafts)
        for done, key in enumerate(keys):
            on_program(" ".join(map(str, key)), done, len(keys))
            programs.append(compile_program(models, config, key, weights, state, mesh, command.context))
    return Proof(chip, mesh, memory, programs)


def rows(proof: Proof) -> list[dict[str, Any]]:
    """The numbers of each program."""
    found = []
    for program in proof.programs:
        kind, requests, tokens = sizes(program.key)
        times = roofline.times(program.work, proof.chip)
        found.append(
            {
                "program": kind, "requests": requests, "tokens": tokens, "temporaries_bytes": program.temporaries,
                "flops": program.work.flops, "bytes": program.work.bytes, "sent": program.work.links,
                "seconds": roofline.seconds(program.work, proof.chip), "bound_by": max(times, key=lambda k: times[k]),
                "compile_seconds": program.compile_seconds,
            }
        )  # fmt: skip
    return found


def show(proof: Proof, command: Command, console: Console) -> None:
    """Prints memory by class, the predicted curve, and the verdict."""
    shape = ", ".join(f"{name} {size}" for name, size in proof.mesh.shape.items())
    memory = Table(title=f"{command.topology} ({shape}): memory of a device", title_justify="left")
    memory.add_column("")
    memory.add_column("GiB", justify="right")
    for name, count in proof.memory.items():
        memory.add_row(name, f"{count / 2**30:.2f}")
    if proof.programs:
        largest = max(p.temporaries for p in proof.programs)
        memory.add_row("temporaries and code of the largest program", f"{largest / 2**30:.2f}")
    memory.add_row("all", f"{proof.needed / 2**30:.2f} of {proof.chip.memory / 2**30:.2f}")
    console.print(memory)
    curve = Table(title=f"roofline at a context of {command.context}", title_justify="left")
    names = (
        "program", "requests", "tokens", "temporaries GiB", "GFLOP", "GB", "MB sent", "ms", "bound by", "rounds/s",
        "compiled in s",
    )  # fmt: skip
    for name in names:
        curve.add_column(name, justify="left" if name == "program" else "right")
    for row in rows(proof):
        curve.add_row(
            row["program"], str(row["requests"]), str(row["tokens"]), f"{row['temporaries_bytes'] / 2**30:.2f}",
            f"{row['flops'] / 1e9:.1f}", f"{row['bytes'] / 1e9:.2f}", f"{row['sent'] / 1e6:.1f}",
            f"{row['seconds'] * 1e3:.2f}", row["bound_by"], f"{1 / row['seconds']:.0f}",
            f"{row['compile_seconds']:.0f}",
        )  # fmt: skip
    if proof.programs:
        console.print(curve)
    spare = (proof.chip.memory - proof.needed) / 2**30
    if proof.margin >= 0:
        console.print(f"fits: {spare:.2f} GiB ({proof.margin:.0%}) of each device stay free")
    else:
        console.print(
            f"does not fit: {-spare:.2f} GiB too much; lower --requests or --max-context, or take more devices"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        command = tyro.cli(Command, args=arguments, prog="serve.compile", description=__doc__)
        if command.json:
            report.check_writable(command.json)
        with report.progress() as progress:
            task = progress.add_task("describing the topology", total=None)

            def on_program(name: str, done: int, total: int) -> None:
                progress.update(task, description=f"compiling {name}", completed=done, total=total)

            proof = prove(command, on_program)
        show(proof, command, report.console())
        if command.json:
            numbers = {"memory": proof.memory, "needed": proof.needed, "chip": dataclasses.asdict(proof.chip)}
            report.write_json(command.json, finite(numbers | {"programs": rows(proof)}))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if proof.margin >= 0 else 1


if __name__ == "__main__":
    sys.exit(main())
