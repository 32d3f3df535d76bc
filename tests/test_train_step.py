"""The training step: chunks change nothing, supervision is exact, a broken sample leaves the state alone."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.config import OptimizerSettings
from dspark_jax.config_files import load_config
from dspark_jax.losses import Shares
from train import data, setup
from train.evaluate import to_batch
from train.objective import Batch, StepModels, supervised_slots
from train.step import init_state, learning_rate_schedule, loss_and_gradients, train_step

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "tiny.py"


@pytest.fixture(scope="module")
def run() -> setup.Run:
    return setup.build(load_config(CONFIG), None)


@pytest.fixture(scope="module")
def batch(run: setup.Run) -> Batch:
    rows = [data.element((record,), run.shapes[0], np.random.default_rng(3)) for record in run.train[:3]]
    return to_batch(jax.tree.map(lambda *leaves: np.stack(leaves), *rows))


def chunked(run: setup.Run, blocks: int) -> StepModels:
    return run.models._replace(train=dataclasses.replace(run.config.train, blocks_per_chunk=blocks))


@pytest.mark.slow
def test_chunks_change_neither_values_nor_gradients(run: setup.Run, batch: Batch) -> None:
    params = init_state(run.drafter, run.config).params

    def value_and_grad(blocks: int) -> tuple:
        step = functools.partial(loss_and_gradients, chunked(run, blocks))
        return jax.jit(step)(params, run.weights, batch, Shares(jnp.float32(0.3), jnp.float32(0.2)))

    plain_metrics, plain_grads = value_and_grad(1000)
    for blocks in (15, 12):  # 5 anchors of each row at a time, which do not divide their number, and 4
        metrics, grads = value_and_grad(blocks)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), metrics, plain_metrics)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), grads, plain_grads)


@pytest.mark.slow
def test_one_loop_over_stacked_layers_gives_the_same_loss_and_gradients(run: setup.Run, batch: Batch) -> None:
    """Accelerators run the loop, CPUs the layers one by one."""
    params = init_state(run.drafter, run.config).params

    def value_and_grad(scan_layers: bool) -> tuple:
        step = functools.partial(loss_and_gradients, run.models._replace(scan_layers=scan_layers))
        return jax.jit(step)(params, run.weights, batch, Shares(jnp.float32(0.0), jnp.float32(0.0)))

    plain, looped = (value_and_grad(scan_layers) for scan_layers in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), plain, looped)


def test_slots_stop_at_the_first_unsupervised_token_and_at_the_rows_end() -> None:
    supervised = jnp.asarray([[0, 1, 1, 1, 0, 1, 1, 1]], bool)
    anchors, keep = jnp.asarray([[1, 4, 5, 6, 1]]), jnp.asarray([[True, True, True, True, False]])
    start = jnp.zeros((1, 8), jnp.int32)
    slots = supervised_slots(supervised, start, anchors, keep, 3)[0].astype(int).tolist()
    assert slots == [[1, 1, 0], [1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]]


def test_a_batch_that_is_not_finite_leaves_the_state_alone(run: setup.Run, batch: Batch) -> None:
    state = run.first_state()
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    embed = run.weights.frozen.embed_VD.at[batch.tokens_BS[0, int(batch.anchors_BA[0, 0])]].set(jnp.nan)
    weights = run.weights._replace(frozen=run.weights.frozen._replace(embed_VD=embed))
    state, metrics = train_step(run.models, run.mesh, state, weights, batch)
    assert float(metrics["skipped"]) == 1.0 and not np.isfinite(float(metrics["loss"]))
    assert int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state))
    state, metrics = train_step(run.models, run.mesh, state, run.weights, batch)
    assert float(metrics["skipped"]) == 0.0 and np.isfinite(float(metrics["loss"]))
    # The rate of the first update, though it comes in the second step.
    assert float(metrics["learning_rate"]) == 0.0
    _, metrics = train_step(run.models, run.mesh, state, run.weights, batch)
    with jax.numpy_dtype_promotion("standard"):
        wanted = learning_rate_schedule(run.config.optimizer, run.config.train.max_steps)(1)
    assert float(metrics["learning_rate"]) == pytest.approx(float(wanted))


def test_an_empty_mask_gives_zero_loss_and_finite_gradients(run: setup.Run, batch: Batch) -> None:
    state = run.first_state()
    empty = batch._replace(supervised_BS=np.zeros_like(batch.supervised_BS))
    _, metrics = train_step(run.models, run.mesh, state, run.weights, empty)
    assert float(metrics["loss"]) == 0.0 and float(metrics["grad_norm"]) == 0.0 and float(metrics["skipped"]) == 0.0


def test_the_learning_rate_warms_up_and_falls_to_its_floor() -> None:
    settings = OptimizerSettings(learning_rate=1.0, warmup_fraction=0.1, final_fraction=0.25)
    with jax.numpy_dtype_promotion("standard"):
        rates = [float(learning_rate_schedule(settings, 100)(step)) for step in (0, 5, 10, 55, 100)]
    np.testing.assert_allclose(rates, [0.0, 0.5, 1.0, 0.625, 0.25], atol=1e-6)


def test_a_detached_confidence_term_trains_its_head_only(run: setup.Run, batch: Batch) -> None:
    loss = dataclasses.replace(run.config.loss, ce=0.0, tv=0.0, detach_confidence=True)
    step = functools.partial(loss_and_gradients, run.models._replace(loss=loss))
    params = init_state(run.drafter, run.config).params
    _, grads = jax.jit(step)(params, run.weights, batch, Shares(jnp.float32(0.0), jnp.float32(0.0)))
    head = grads.pop("confidence_head")
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(head))
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(grads))
