"""One training step: gradients of the batch's sums, accumulated and divided once, then AdamW, on a mesh.

All state is explicit and donated. Its shardings are pinned on the way out: left to itself, the compiler was seen to
drop the split of gradients and state over `fsdp`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax import losses, sharding
from dspark_jax.config import Config, DrafterConfig, OptimizerSettings
from dspark_jax.drafters.registry import algorithm
from train.objective import Batch, BatchSums, Params, StepModels, StepWeights, batch_sums, sums_and_gradients

Metrics = dict[str, jax.Array]


class TrainState(NamedTuple):
    params: Params
    opt_state: Any
    step: jax.Array


def learning_rate_schedule(settings: OptimizerSettings, max_steps: int) -> optax.Schedule:
    warmup = max(1, round(settings.warmup_fraction * max_steps))
    peak = settings.learning_rate
    return optax.warmup_cosine_decay_schedule(
        0.0, peak, warmup, max(max_steps, warmup + 1), peak * settings.final_fraction
    )


def make_optimizer(settings: OptimizerSettings, max_steps: int) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(
            learning_rate_schedule(settings, max_steps), b1=settings.b1, b2=settings.b2,
            weight_decay=settings.weight_decay,
        ),
    )  # fmt: skip


def init_state(drafter: DrafterConfig, config: Config) -> TrainState:
    """Fresh float32 weights and optimiser state from the run's seed."""
    params = algorithm(drafter).init_params(drafter, jax.random.key(config.train.seed))
    with jax.numpy_dtype_promotion("standard"):
        opt_state = make_optimizer(config.optimizer, config.train.max_steps).init(params)
    return TrainState(params, opt_state, jnp.int32(0))


def state_shardings(models: StepModels, mesh: Mesh) -> TrainState:
    """Where each array of the state lies, by the table of dspark_jax.sharding."""

    def shapes() -> TrainState:
        params = algorithm(models.drafter).init_params(models.drafter, jax.random.key(0))
        return TrainState(params, make_optimizer(models.optimizer, 1).init(params), jnp.int32(0))

    with jax.numpy_dtype_promotion("standard"):
        return sharding.shardings(jax.eval_shape(shapes), mesh)


def _shares(models: StepModels, step: jax.Array) -> losses.Shares:
    """What is left, at a step, of the terms that open a run: 1 falling linearly to 0 (see LossConfig)."""

    def left(until: float) -> jax.Array:
        steps = until * models.train.max_steps
        return jnp.maximum(0.0, 1.0 - step.astype(jnp.float32) / steps) if steps else jnp.float32(0.0)

    return losses.Shares(left(models.loss.soft_until), left(models.loss.base_until))


def _compute_params(models: StepModels, params: Params) -> Params:
    """The drafter's weights in the compute dtype, whole over `fsdp`."""
    return sharding.gather_tree(jax.tree.map(lambda x: x.astype(models.train.dtype) if x.ndim > 1 else x, params))


def _metrics(models: StepModels, sums: BatchSums, shares: losses.Shares) -> Metrics:
    loss, metrics = losses.total_loss(sums.loss, models.loss, shares)
    by_slot_G = sums.by_slot_2G[0] / jnp.maximum(sums.by_slot_2G[1], 1.0)
    counts = {"blocks": sums.loss.blocks, "slots": sums.by_slot_2G[1]}
    return metrics | counts | {"loss": loss, "acceptance_by_slot": by_slot_G}


def loss_and_gradients(
    models: StepModels, params: Params, weights: StepWeights, batch: Batch, shares: losses.Shares
) -> tuple[Metrics, Params]:
    """Metrics of a batch, "loss" among them, and the loss's gradients in float32.

    With accumulation steps every array of the batch has a leading axis of parts, [parts, B, ...]. Parts and devices add
    sums and gradients of sums, and the weight of the whole batch divides them once: how a batch is cut changes nothing.
    """
    computed = _compute_params(models, params)

    def part(part: Batch) -> tuple[BatchSums, Params]:
        sums, grads = sums_and_gradients(models, computed, weights, part, shares)
        return sums, sharding.constrain_tree(grads)

    if models.train.accumulation_steps == 1:
        sums, grads = part(batch)
    else:
        shapes = jax.eval_shape(part, jax.tree.map(lambda x: x[0], batch))
        zeros: Any = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        zeros = zeros[0], sharding.constrain_tree(zeros[1])
        (sums, grads), _ = jax.lax.scan(lambda total, x: (jax.tree.map(jnp.add, total, part(x)), None), zeros, batch)
    divisor = losses.denominator(sums.loss)
    return _metrics(models, sums, shares), jax.tree.map(lambda grad: grad / divisor, grads)


def _train_step(
    models: StepModels, state: TrainState, weights: StepWeights, batch: Batch
) -> tuple[TrainState, Metrics]:
    metrics, grads = loss_and_gradients(models, state.params, weights, batch, _shares(models, state.step))
    grad_norm = optax.tree.norm(grads)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        optimizer = make_optimizer(models.optimizer, models.train.max_steps)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        # Skipped batches do not count for the optimiser: its own number says which rate this update has.
        updated = optax.tree.get_all_with_path(state.opt_state, "count")[0][1]
        learning_rate = learning_rate_schedule(models.optimizer, models.train.max_steps)(updated)
    finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(grad_norm)
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old), (params, opt_state), (state.params, state.opt_state)
    )
    metrics |= {
        "grad_norm": grad_norm,
        "update_norm": optax.tree.norm(updates),
        "learning_rate": jnp.asarray(learning_rate, jnp.float32),
        "skipped": 1.0 - finite.astype(jnp.float32),
    }
    return TrainState(params, opt_state, state.step + 1), metrics


def _eval_step(models: StepModels, params: Params, weights: StepWeights, batch: Batch) -> Metrics:
    sums = batch_sums(models, _compute_params(models, params), weights, batch)
    return _metrics(models, sums, losses.Shares(jnp.float32(0.0), jnp.float32(0.0)))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


@functools.cache
def jitted_step(models: StepModels, mesh: Mesh) -> Callable[..., tuple[TrainState, Metrics]]:
    """The compiled form of a step on a mesh; call and lower it under `jax.set_mesh(mesh)`."""
    return jax.jit(
        functools.partial(_train_step, models),
        donate_argnums=0,
        out_shardings=(state_shardings(models, mesh), replicated(mesh)),
    )


@functools.cache
def jitted_eval(models: StepModels, mesh: Mesh) -> Callable[..., Metrics]:
    """The compiled form of `eval_step`."""
    return jax.jit(functools.partial(_eval_step, models), out_shardings=replicated(mesh))


def train_step(
    models: StepModels, mesh: Mesh, state: TrainState, weights: StepWeights, batch: Batch
) -> tuple[TrainState, Metrics]:
    """One update. A loss or gradient that is not finite leaves weights and optimiser untouched ("skipped" = 1)."""
    with jax.set_mesh(mesh):
        return jitted_step(models, mesh)(state, weights, batch)


def eval_step(models: StepModels, mesh: Mesh, params: Params, weights: StepWeights, batch: Batch) -> Metrics:
    """The loss and its terms on a batch, without an update."""
    with jax.set_mesh(mesh):
        return jitted_eval(models, mesh)(params, weights, batch)
