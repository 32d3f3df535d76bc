"""What a training step costs: time and memory against anchors and length, its parts, and a dense step beside it.

    python -m benchmarks.train_cost [--json benchmarks/results/train_cost.json] [--repeats 3]

Every point runs in its own process, since peak memory is a process's own. SmolLM2-135M and the drafter of
configs/smollm2_135m.py with the whole vocabulary, random weights (cost does not depend on them), one row a step.
"""

import dataclasses
import functools
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import tyro

Part = Literal["step", "target", "draft", "dense"]
_ANCHORS, _LENGTHS = (64, 128, 256, 512), (512, 1024, 2048, 4096)


@dataclasses.dataclass(frozen=True)
class Args:
    """Measure the cost of training steps."""

    json: Path = Path("benchmarks/results/train_cost.json")
    repeats: int = 3
    """Timed calls a point; the fastest counts."""
    point: tuple[str, int, int] | None = None
    """For the child processes: part, anchors, length."""


def _models(anchors: int, length: int) -> tuple[Any, Any]:
    """Step models and a batch with every slot supervised."""
    import numpy as np

    from dspark_jax.config import LossConfig, OptimizerSettings, TargetConfig, TrainSettings, drafter_config
    from train.main import load_config
    from train.objective import Batch, StepModels

    target = TargetConfig(
        family="llama", vocab_size=49152, d_model=576, d_ff=1536, num_layers=30, num_heads=9, num_kv_heads=3,
        head_dim=64, rope_theta=1e5, norm_eps=1e-5, max_length=8192, tied_head=True, name="SmolLM2-135M",
    )  # fmt: skip
    config = load_config(Path(__file__).resolve().parents[1] / "configs" / "smollm2_135m.py")
    drafter = drafter_config(dataclasses.replace(config.draft, draft_vocab_size=0), target)
    train = TrainSettings(max_steps=100, batch_size=1, dtype="float32", blocks_per_chunk=32, remat="vocabulary")
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
    import jax
    import jax.numpy as jnp

    from dspark_jax.drafters import dspark
    from dspark_jax.drafters.drafter import frozen_parts
    from dspark_jax.target import TargetModel
    from train.objective import StepWeights

    ids = jnp.zeros((1, 1), jnp.int32)
    params: Any = jax.jit(lambda: TargetModel(models.target).init(jax.random.key(0), ids, ids)["params"])()
    return dspark.init_params(models.drafter, jax.random.key(1)), StepWeights(params, frozen_parts(params, None), None)


def _dense_loss(models: Any, params: Any, weights: Any, batch: Any) -> Any:
    """The same loss written straightforwardly: one attention over context and all blocks under a dense mask, and the
    logits of all anchors at once."""
    import jax
    import jax.numpy as jnp

    from dspark_jax import layers, losses
    from dspark_jax import target as target_lib
    from dspark_jax.drafters import base
    from train.objective import supervised_slots

    c, tokens, anchors = models.drafter, batch.tokens_BS, batch.anchors_BA
    hidden_BSD, taps_BSMD, _ = target_lib.features(
        models.target, weights.target_params, tokens, tap_layers=c.target_layer_ids
    )
    hidden_BSD, taps_BSMD = jax.lax.stop_gradient((hidden_BSD, taps_BSMD))
    length, count, rows = tokens.shape[1], anchors.shape[1], c.block_size
    block = params["backbone"]
    fused = layers.rms_norm(
        layers.linear(taps_BSMD.reshape(1, length, -1), block["fc"].reshape(c.d_model, -1)), block["hidden_norm"],
        c.norm_eps,
    )  # fmt: skip
    ids = jnp.full((1, count, rows), c.mask_token_id).at[:, :, 0].set(base.gather_positions(tokens, anchors))
    x = weights.frozen.embed_VD[ids].reshape(1, count * rows, -1)
    position = (anchors[:, :, None] + jnp.arange(rows)[None, None, :]).reshape(1, -1)
    owner = jnp.repeat(jnp.arange(count), rows)
    sees_context = jnp.arange(length)[None, :] < jnp.repeat(anchors[0], rows)[:, None]
    mask = jnp.concatenate([sees_context, owner[:, None] == owner[None, :]], axis=1)
    bias_QT = jnp.where(mask, 0.0, -1e30).astype(jnp.float32)
    tables = [layers.rotary_table(p, c.head_dim, c.rope_theta) for p in (jnp.arange(length)[None], position)]
    group = c.num_heads // c.num_kv_heads
    for i in range(c.num_layers):
        w = block[f"layers_{i}"]
        u = layers.rms_norm(x, w["attn_norm"], c.norm_eps)
        q = layers.rotate(layers.rms_norm(layers.linear(u, w["q"]), w["q_norm"], c.norm_eps), tables[1])
        both = [layers.linear(y, w["kv"]) for y in (fused, u)]
        k = jnp.concatenate(
            [
                layers.rotate(layers.rms_norm(kv[..., 0, :, :], w["k_norm"], c.norm_eps), table)
                for kv, table in zip(both, tables, strict=True)
            ],
            axis=1,
        )
        v = jnp.concatenate([kv[..., 1, :, :] for kv in both], axis=1)
        k, v = (jnp.repeat(y, group, axis=2) for y in (k, v))
        scores = jnp.einsum("BQNH,BTNH->BNQT", q, k) * c.head_dim**-0.5 + bias_QT[None, None]
        out = jnp.einsum("BNQT,BTNH->BQNH", jax.nn.softmax(scores, axis=-1), v)
        x = x + layers.linear(out.reshape(1, count * rows, -1), w["o"].reshape(c.d_model, -1))
        x = x + layers.gated_mlp(layers.rms_norm(x, w["mlp_norm"], c.norm_eps), w["gate"], w["up"], w["down"])
    hidden = layers.rms_norm(x, block["norm"], c.norm_eps).reshape(1, count, rows, -1)
    embedded = params["markov"]["w1"][base.previous_tokens(tokens, anchors, c.num_drafts)]
    logits = layers.linear(hidden, weights.frozen.head_VD) + layers.linear(embedded, params["markov"]["w2"])
    head = params["confidence_head"]
    confidence = jnp.einsum("BAGD,D->BAG", jnp.concatenate([hidden, embedded], -1), head["weight"]) + head["bias"]
    at = anchors[:, :, None] + jnp.arange(c.num_drafts)[None, None, :]
    teacher = jax.lax.stop_gradient(layers.linear(base.gather_positions(hidden_BSD, at), weights.frozen.head_VD))
    terms = losses.slot_terms(logits, confidence, base.gather_positions(tokens, at + 1), teacher)
    slots = supervised_slots(batch.supervised_BS, batch.start_BS, anchors, batch.keep_BA, c.num_drafts)
    return losses.total_loss(losses.loss_sums(terms, slots, models.loss), models.loss)[0]


def _function(part: Part, models: Any, weights: Any) -> Callable[..., Any]:
    """What is timed, as a function of drafter weights and batch. `target` is the target's forward pass alone, `draft`
    the step without vocabulary work, given the target's features."""
    import jax
    import jax.numpy as jnp

    from dspark_jax.drafters import dspark
    from dspark_jax.drafters.base import Committed
    from dspark_jax.losses import Shares
    from train.objective import target_features
    from train.step import loss_and_gradients

    c = models.drafter
    match part:
        case "step":
            shares = Shares(jnp.float32(0.0), jnp.float32(0.0))
            return lambda params, batch: loss_and_gradients(models, params, weights, batch, shares)
        case "dense":
            return lambda params, batch: jax.value_and_grad(functools.partial(_dense_loss, models))(
                params, weights, batch
            )
        case "target":
            return lambda _, batch: target_features(
                models.target, c, weights.target_params, batch.tokens_BS, batch.start_BS
            )
    taps = jnp.ones((1, 1, len(c.target_layer_ids), c.d_model))

    def draft(params: Any, batch: Any) -> Any:
        taps_BSMD = jnp.broadcast_to(taps, (*batch.tokens_BS.shape, *taps.shape[2:]))
        committed = Committed(batch.tokens_BS, taps_BSMD, taps_BSMD[:, :, 0])  # no hidden state is read
        rows = dspark.context_rows(c, params, weights.frozen, committed, batch.start_BS)
        blocks = dspark.teacher_forced_blocks(c, params, weights.frozen, batch.tokens_BS, rows, batch.anchors_BA)
        return sum(jnp.sum(x) for x in jax.tree.leaves(blocks))

    return jax.value_and_grad(draft)


def measure(part: Part, anchors: int, length: int, repeats: int) -> dict[str, Any]:
    """Seconds of the fastest call and peak memory of this process, in MB, over what it held before the first call."""
    import jax

    models, batch = _models(anchors, length)
    params, weights = jax.block_until_ready(_weights(models))
    # Weights are arguments in effect: closed over, they would be constants that compilation copies.
    step = jax.jit(lambda params, weights, batch: _function(part, models, weights)(params, batch))
    compiled = step.lower(params, weights, batch).compile()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loss = jax.block_until_ready(compiled(params, weights, batch))
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(compiled(params, weights, batch))
        seconds.append(time.perf_counter() - begun)
    stats = compiled.memory_analysis()
    result = {
        "part": part, "anchors": anchors, "length": length, "seconds": min(seconds), "slowest": max(seconds),
        "anchors_per_second": anchors / min(seconds), "temporary_mb": stats.temp_size_in_bytes / 1e6 if stats else None,
        "peak_mb_over_weights": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3,
    }  # fmt: skip
    if part in ("step", "dense"):
        result["loss"] = float(loss[0]["loss"] if part == "step" else loss[0])
    return result


def main() -> int:
    args = tyro.cli(Args, description=__doc__)
    if args.point is not None:
        part, anchors, length = args.point
        print(json.dumps(measure(part, anchors, length, args.repeats)))  # type: ignore[arg-type]
        return 0
    # The comparison first: what is interrupted has measured that.
    points: list[tuple[Part, int, int]] = [("step", 128, 1024), ("dense", 128, 1024)]
    points.extend(("step", anchors, 1024) for anchors in _ANCHORS if anchors != 128)
    points.extend([("target", 128, 1024), ("draft", 128, 1024)])
    for length in _LENGTHS:
        if length != 1024:
            points.extend([("step", 128, length), ("target", 128, length)])
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    results = []
    for point in points:
        command = [sys.executable, "-m", "benchmarks.train_cost", "--repeats", str(args.repeats), "--point"]
        done = subprocess.run([*command, *map(str, point)], capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            print(f"{point}: failed ({reason[-1]})")
            continue
        results.append(json.loads(done.stdout.splitlines()[-1]))
        args.json.write_text(json.dumps({"machine": machine, "points": results}, indent=1) + "\n", encoding="utf-8")
        shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in results[-1].items()}
        print(" ".join(f"{name} {value}" for name, value in shown.items()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
