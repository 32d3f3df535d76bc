"""Started by test_multidevice with eight fake CPU devices: the training step on meshes, results as JSON on stdout."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import sharding, tpu_attention
from dspark_jax.attention import DEFAULT
from dspark_jax.config import MeshSettings
from dspark_jax.config_files import load_config
from dspark_jax.hlo import traffic
from dspark_jax.losses import Shares
from train import data, hosts, setup
from train.evaluate import to_batch
from train.step import jitted_step, loss_and_gradients, state_shardings, train_step

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "tiny.py"
MESHES = ((1, 1, 1), (8, 1, 1), (1, 8, 1), (2, 2, 2))


def settings(mesh: tuple[int, int, int], parts: int) -> Any:
    config = load_config(CONFIG)
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, packing=True, max_length=192, num_anchors=12),
        train=dataclasses.replace(config.train, batch_size=16, accumulation_steps=parts, blocks_per_chunk=8),
        mesh=MeshSettings(*mesh),
    )


def moved(run: setup.Run, mesh: Any) -> setup.Run:
    """The same run on another mesh."""
    weights = jax.device_get(run.weights)
    return dataclasses.replace(run, mesh=mesh, weights=sharding.place(weights, sharding.shardings(weights, mesh)))


def kernel_error(shape: tuple[int, int, int], cut_rows: bool) -> float:
    """The TPU's attention of packed rows and of draft blocks on a mesh, interpreted, against one device; `cut_rows`:
    inside `sum_over_rows`."""
    rng, mesh = np.random.default_rng(0), sharding.make_mesh(MeshSettings(*shape))
    q, k, v = (jnp.asarray(rng.normal(size=(8, 16, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    start = jnp.asarray(np.where(np.arange(16) < 5, 0, 5)[None].repeat(8, 0), jnp.int32)

    def total(whole: Any, rows: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[()]]:
        q, k, v, start = rows
        out = tpu_attention.row_attention(q, k, v, start, DEFAULT, interpret=True)
        own = tuple(x.reshape(-1, 4, 4, *x.shape[2:]) for x in rows[:3])  # four blocks of four
        context = k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)
        drafts = tpu_attention.block_attention(own[0], *context, *own[1:], start[:, ::4] + 3, interpret=True)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(drafts)), ()

    wanted = jax.jit(total)((), (q, k, v, start))[0]
    with jax.set_mesh(mesh):
        step = functools.partial(sharding.sum_over_rows, total, like=()) if cut_rows else total
        return abs(float(jax.jit(step)((), (q, k, v, start))[0] - wanted))


def main() -> None:
    assert jax.device_count() == 8
    base = setup.build(settings((8, 1, 1), 1), None)
    state = jax.device_get(base.first_state())
    rows = [row for group in base.groups for row in group.rows]
    elements = [data.element(rows[i % len(rows)], base.shapes[0], np.random.default_rng(i)) for i in range(16)]
    host = to_batch(jax.tree.map(lambda *leaves: np.stack(leaves), *elements))
    results, wanted = {}, None
    weight_bytes = sum(x.nbytes for x in jax.tree.leaves(state.params))
    for shape in MESHES:
        mesh = sharding.make_mesh(MeshSettings(*shape), jax.devices()[: np.prod(shape)])
        run = moved(base, mesh)
        where = state_shardings(run.models, mesh)
        for parts in (1, 2) if shape == (2, 2, 2) else (1,):
            models = run.models._replace(train=settings(shape, parts).train)
            step = functools.partial(loss_and_gradients, models)
            arguments = (
                sharding.place(state.params, where.params), run.weights, hosts.place_batch(mesh, host, parts),
                Shares(jnp.float32(0.3), jnp.float32(0.2)),
            )  # fmt: skip
            with jax.set_mesh(mesh):
                compiled = jax.jit(step, out_shardings=(None, where.params)).lower(*arguments).compile()
                metrics, grads = compiled(*arguments)
            sent = traffic(compiled.as_text() or "", mesh.size).collectives
            got = jax.device_get((metrics, grads))
            wanted = wanted or got
            scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(wanted[1]))
            pairs = zip(jax.tree.leaves(got[1]), jax.tree.leaves(wanted[1]), strict=True)
            results["x".join(map(str, shape)) + f" in {parts}"] = {
                "loss": abs(float(got[0]["loss"] - wanted[0]["loss"])),
                "gradients": max(float(np.abs(a - b).max()) for a, b in pairs) / scale,
                "sent": (sent["all-reduce"] + sent["reduce-scatter"]) / weight_bytes,
                "split": int(sum(not x.is_fully_replicated for x in jax.tree.leaves(grads))),
            }
    models = run.models
    placed = sharding.place(state, where)
    batch = hosts.place_batch(mesh, host, 1)
    lost = []
    for _ in range(2):
        placed, metrics = train_step(models, mesh, placed, run.weights, batch)
        ends = jax.tree.map(lambda x, y: x.sharding.is_equivalent_to(y, x.ndim), placed, where)
        lost.append(int(sum(not same for same in jax.tree.leaves(ends))))
    kernel = [kernel_error(shape, cut) for shape in ((8, 1, 1), (2, 2, 2)) for cut in (False, True)]
    traces = jitted_step(models, mesh)._cache_size()
    print(json.dumps({"meshes": results, "lost": lost, "traces": traces, "kernel": kernel}))


if __name__ == "__main__":
    main()
