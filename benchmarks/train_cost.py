"""What a training step costs on this machine: against a dense implementation, and by anchors, length and part.

    python -m benchmarks.train_cost [--json OUT] [--dtype bfloat16] [--repeats 2]

Every row of the table is made in its own process, since peak memory is a process's own. SmolLM2-135M and the drafter of
configs/smollm2_135m.py with the whole vocabulary, random weights (cost does not depend on them), one row a step.
"""

import dataclasses
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.table import Table

from serve import report

Part = Literal["step", "target", "draft", "dense", "dense-slots"]
Dtype = Literal["auto", "float32", "bfloat16"]
_ANCHORS, _LENGTHS = (64, 128, 256, 512), (512, 1024, 2048, 4096)


@dataclasses.dataclass(frozen=True)
class Args:
    """Measure the cost of training steps."""

    json: Path | None = None
    dtype: Dtype = "auto"
    """Of weights and dots, for all that is compared; auto: bfloat16 where the processor has matrix units for it."""
    chunk: int = 64
    """train.blocks_per_chunk."""
    repeats: int = 2
    """Timed calls a program; the fastest counts."""
    point: tuple[str, int, int] | None = None
    """For the child processes: parts joined by commas, anchors, length."""


def _chosen(dtype: Dtype) -> str:
    if dtype != "auto":
        return dtype
    known = Path("/proc/cpuinfo")
    return "bfloat16" if known.is_file() and "amx_bf16" in known.read_text(encoding="utf-8") else "float32"


def _models(dtype: str, chunk: int, anchors: int, length: int) -> tuple[Any, Any]:
    """Step models and a batch with every slot supervised."""
    import numpy as np

    from dspark_jax.config import LossConfig, OptimizerSettings, TargetConfig, TrainSettings, drafter_config
    from dspark_jax.config_files import load_config
    from train.objective import Batch, StepModels

    target = TargetConfig(
        family="llama", vocab_size=49152, d_model=576, d_ff=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64, rope_theta=1e5, norm_eps=1e-5, max_length=8192, tied_head=True, name="SmolLM2-135M",
    )  # fmt: skip
    config = load_config(Path(__file__).resolve().parents[1] / "configs" / "smollm2_135m.py")
    drafter = drafter_config(dataclasses.replace(config.draft, draft_vocab_size=0), target)
    train = TrainSettings(max_steps=100, batch_size=1, dtype=dtype, blocks_per_chunk=chunk)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    places = np.sort(rng.choice(length - drafter.num_drafts - 1, anchors, replace=False)).astype(np.int32)
    batch = Batch(
        tokens_BS=rng.integers(0, target.vocab_size, (1, length)).astype(np.int32),  # type: ignore[arg-type]
        supervised_BS=np.ones((1, length), bool),  # type: ignore[arg-type]
        start_BS=np.zeros((1, length), np.int32),  # type: ignore[arg-type]
        anchors_BA=places[None],  # type: ignore[arg-type]
        keep_BA=np.ones((1, anchors), bool),  # type: ignore[arg-type]
    )
    return StepModels(target, drafter, LossConfig(), OptimizerSettings(), train), batch


def _weights(models: Any) -> tuple[Any, Any]:
    """Float32 drafter weights, as a run keeps them, and the target in the dtype that is measured."""
    import jax
    import jax.numpy as jnp

    from dspark_jax.drafters import dspark
    from dspark_jax.drafters.drafter import frozen_parts
    from dspark_jax.target import TargetModel, cast_params
    from train.objective import StepWeights

    ids = jnp.zeros((1, 1), jnp.int32)
    params: Any = jax.jit(lambda: TargetModel(models.target).init(jax.random.key(0), ids, ids)["params"])()
    params = cast_params(params, models.train.dtype)
    return dspark.init_params(models.drafter, jax.random.key(1)), StepWeights(params, frozen_parts(params, None), None)


def _function(part: Part, models: Any, weights: Any) -> Callable[..., Any]:
    """What is timed, as a function of drafter weights and batch. `target` is the target's forward pass alone, `draft`
    the step without vocabulary work, given the target's features."""
    import jax
    import jax.numpy as jnp

    from benchmarks import dense_step
    from dspark_jax.drafters import dspark
    from dspark_jax.drafters.base import Committed
    from dspark_jax.losses import Shares
    from train.objective import target_features
    from train.step import loss_and_gradients

    c = models.drafter

    def cast(params: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(models.train.dtype) if x.ndim > 1 else x, params)

    match part:
        case "step":
            shares = Shares(jnp.float32(0.0), jnp.float32(0.0))
            return lambda params, batch: loss_and_gradients(models, params, weights, batch, shares)
        case "dense" | "dense-slots":
            everywhere = part == "dense"
            return jax.value_and_grad(
                lambda params, batch: dense_step.loss(models, cast(params), weights, batch, everywhere)
            )
        case "target":
            return lambda _, batch: target_features(
                models.target, c, weights.target_params, batch.tokens_BS, batch.start_BS
            )
    taps = jnp.ones((1, 1, len(c.target_layer_ids), c.d_model))

    def draft(params: Any, batch: Any) -> Any:
        taps_BSMD = jnp.broadcast_to(taps, (*batch.tokens_BS.shape, *taps.shape[2:]))
        params = cast(params)
        committed = Committed(batch.tokens_BS, taps_BSMD, taps_BSMD[:, :, 0])  # no hidden state is read
        rows = dspark.context_rows(c, params, weights.frozen, committed, batch.start_BS)
        blocks = dspark.teacher_forced_blocks(c, params, weights.frozen, batch.tokens_BS, rows, batch.anchors_BA)
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(blocks))

    return jax.value_and_grad(draft)


def measure(args: Args, parts: list[Part], anchors: int, length: int) -> dict[str, Any]:
    """Of one batch: seconds of each part, the fastest of its calls; temporary memory of the first part's program, and
    what the process grew to over the weights by running it, in MB."""
    import jax

    dtype = _chosen(args.dtype)
    models, batch = _models(dtype, args.chunk, anchors, length)
    params, weights = jax.block_until_ready(_weights(models))
    result: dict[str, Any] = {"anchors": anchors, "length": length, "dtype": dtype}
    for number, part in enumerate(parts):
        # Weights are arguments in effect: closed over, they would be constants that compilation copies.
        program = jax.jit(lambda params, weights, batch, part=part: _function(part, models, weights)(params, batch))
        compiled = program.lower(params, weights, batch).compile()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        out = jax.block_until_ready(compiled(params, weights, batch))
        seconds = []
        for _ in range(args.repeats):
            begun = time.perf_counter()
            jax.block_until_ready(compiled(params, weights, batch))
            seconds.append(time.perf_counter() - begun)
        result[part] = {"seconds": min(seconds), "slowest": max(seconds)}
        if number == 0:
            stats = compiled.memory_analysis()
            result |= {
                "part": part,
                "anchors_per_second": anchors / min(seconds),
                "temporary_mb": stats.temp_size_in_bytes / 1e6 if stats else None,
                "resident_mb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3,
                "work_gflop": _work(program, params, weights, batch) / 1e9,
            }
            if part != "draft":
                result["loss"] = float(out[0]["loss"] if part == "step" else out[0])
    return result


def _work(program: Any, *arguments: Any) -> float:
    from dspark_jax.slices import flops

    return flops(program.trace(*arguments).jaxpr.jaxpr)


def _show(results: list[dict[str, Any]]) -> None:
    """The table of all points."""
    table = Table(title=f"training steps, {results[0]['dtype']}", title_justify="left")
    for name in (
        "anchors",
        "length",
        "",
        "seconds",
        "anchors/s",
        "GFLOP",
        "temporary MB",
        "target",
        "draft",
        "vocabulary",
    ):
        table.add_column(name, justify="right")
    for result in results:
        whole = result[result["part"]]["seconds"]
        shares = ["", "", ""]
        if "target" in result:
            target, draft = (result[name]["seconds"] / whole for name in ("target", "draft"))
            shares = [f"{share:.0%}" for share in (target, draft, 1 - target - draft)]
        table.add_row(
            str(result["anchors"]), str(result["length"]), result["part"], f"{whole:.2f}",
            f"{result['anchors_per_second']:.1f}", f"{result['work_gflop']:.0f}", f"{result['temporary_mb']:.0f}",
            *shares,
        )  # fmt: skip
    Console(width=120).print(table)
    by_part = {r["part"]: r for r in results if (r["anchors"], r["length"]) == (128, 1024)}
    for name in ("dense", "dense-slots"):
        if name in by_part and "step" in by_part:
            ratio = {key: by_part["step"][key] / by_part[name][key] for key in ("anchors_per_second", "temporary_mb")}
            print(
                f"step against {name}: {ratio['anchors_per_second']:.2f} times the anchors/s,"
                f" {ratio['temporary_mb']:.2f} times the temporary memory"
            )


def main() -> int:
    args = tyro.cli(Args, description=__doc__)
    if args.point is not None:
        parts, anchors, length = args.point
        print(json.dumps(measure(args, parts.split(","), anchors, length)))  # type: ignore[arg-type]
        return 0
    if args.json:
        report.check_writable(args.json)
    # The comparison first: what is interrupted has measured that.
    points = [("dense", 128, 1024), ("dense-slots", 128, 1024)]
    points += [("step,target,draft", 128, length) for length in sorted(_LENGTHS, key=lambda length: length != 1024)]
    points += [("step", anchors, 1024) for anchors in _ANCHORS if anchors != 128]
    results: list[dict[str, Any]] = []
    for point in points:
        command = [sys.executable, "-m", "benchmarks.train_cost", "--repeats", str(args.repeats)]
        command += ["--dtype", args.dtype, "--chunk", str(args.chunk), "--point", *map(str, point)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            print(f"{point}: failed ({reason[-1]})", file=sys.stderr)
            continue
        results.append(json.loads(done.stdout.splitlines()[-1]))
        if args.json:  # after each, so that what is interrupted has what was measured
            settings = {"dtype": args.dtype, "chunk": args.chunk, "repeats": args.repeats}
            report.write_json(args.json, {"machine": report.machine(), "settings": settings, "points": results})
        print(f"{point}: {results[-1]['anchors_per_second']:.1f} anchors/s", file=sys.stderr, flush=True)
    if results:
        _show(results)
    return 0 if len(results) == len(points) else 1


if __name__ == "__main__":
    sys.exit(main())
