"""One training step: target features, teacher-forced drafts, the vocabulary work in chunks, AdamW.

The loss reads top to bottom in `_loss_sums`; `train_step` adds gradients and the update. All state is explicit, so the
step is one donated `jax.jit`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from dspark_jax import losses
from dspark_jax import target as target_lib
from dspark_jax.config import Config, DrafterConfig, LossConfig, OptimizerSettings, TargetConfig, TrainSettings
from dspark_jax.drafters import base, dspark
from dspark_jax.drafters.base import Frozen
from dspark_jax.layers import linear

Params = dict[str, Any]
Metrics = dict[str, jax.Array]


class TargetFeatures(NamedTuple):
    """What training needs of the target at every token: tapped layers, post-norm hidden state, and the log-sum-exp of
    its logits over the whole vocabulary (read only with a reduced draft vocabulary)."""

    taps_BSMD: jax.Array
    hidden_BSD: jax.Array
    log_partition_BS: jax.Array


class Batch(NamedTuple):
    """Conversations with the anchors drawn for them. `supervised` marks the assistant's own tokens; blocks where
    `keep` is False fill the row up. `features` None: the target runs inside the step."""

    tokens_BS: jax.Array
    supervised_BS: jax.Array
    anchors_BA: jax.Array
    keep_BA: jax.Array
    features: TargetFeatures | None = None


class TrainState(NamedTuple):
    params: Params
    opt_state: Any
    step: jax.Array


class StepModels(NamedTuple):
    """Everything static about a step: its compile key."""

    target: TargetConfig
    drafter: DrafterConfig
    loss: LossConfig
    optimizer: OptimizerSettings
    train: TrainSettings


class StepWeights(NamedTuple):
    """Frozen weights. `target_to_draft` maps target ids into a reduced draft vocabulary, -1 outside; None: all ids."""

    target_params: Params
    frozen: Frozen
    target_to_draft_V: jax.Array | None


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
    params = dspark.init_params(drafter, jax.random.key(config.train.seed))
    with jax.numpy_dtype_promotion("standard"):
        opt_state = make_optimizer(config.optimizer, config.train.max_steps).init(params)
    return TrainState(params, opt_state, jnp.int32(0))


def target_features(
    target: TargetConfig, drafter: DrafterConfig, params: Params, tokens_BS: jax.Array
) -> TargetFeatures:
    """One forward pass of the frozen target. The log-partition is left out (zeros) where nothing reads it."""
    hidden_BSD, taps_BSMD, _ = target_lib.features(target, params, tokens_BS, tap_layers=drafter.target_layer_ids)
    if drafter.draft_vocab_size:
        # One sequence at a time: [S, V] logits are the largest array of a step.
        log_partition_BS = jax.lax.map(
            lambda hidden_SD: jax.nn.logsumexp(target_lib.logits(params, hidden_SD), axis=-1), hidden_BSD
        )
    else:
        log_partition_BS = jnp.zeros(tokens_BS.shape, jnp.float32)
    return jax.lax.stop_gradient(TargetFeatures(taps_BSMD, hidden_BSD, log_partition_BS))


class _Slots(NamedTuple):
    """One block's slots before the vocabulary work, with leading axes [blocks, G]."""

    hidden: jax.Array
    embedded: jax.Array | None
    confidence: jax.Array | None
    labels: jax.Array
    mask: jax.Array
    teacher_hidden: jax.Array
    log_partition: jax.Array


def supervised_slots(supervised_BS: jax.Array, anchors_BA: jax.Array, keep_BA: jax.Array, num_drafts: int) -> jax.Array:
    """Slot i counts while it and all slots before it predict the assistant's own tokens inside the row: [B, A, G]."""
    index_BAG = anchors_BA[:, :, None] + 1 + jnp.arange(num_drafts)[None, None, :]
    inside_BAG = index_BAG < supervised_BS.shape[1]
    own_BAG = base.gather_positions(supervised_BS, index_BAG) & inside_BAG & keep_BA[:, :, None]
    return jnp.cumprod(own_BAG.astype(jnp.int32), axis=-1) > 0


def _loss_sums(models: StepModels, params: Params, weights: StepWeights, batch: Batch) -> tuple[Any, jax.Array]:
    """Loss sums of a batch and the summed acceptance and count of every slot [2, G]."""
    drafter, frozen = models.drafter, weights.frozen
    features = batch.features
    if features is None:
        features = target_features(models.target, drafter, weights.target_params, batch.tokens_BS)
    features = jax.tree.map(lambda x: x.astype(jnp.float32), features)
    tokens_BS, anchors_BA = batch.tokens_BS, batch.anchors_BA
    blocks = dspark.teacher_forced_features(drafter, params, frozen, tokens_BS, features.taps_BSMD, anchors_BA)
    # The target's logits after token t predict t + 1: slot i's teacher is the hidden state at anchor + i.
    teacher_BAG = anchors_BA[:, :, None] + jnp.arange(drafter.num_drafts)[None, None, :]
    labels_BAG = base.gather_positions(tokens_BS, teacher_BAG + 1)
    if weights.target_to_draft_V is not None:
        labels_BAG = weights.target_to_draft_V[labels_BAG]
    slots = _Slots(
        *blocks,
        labels=labels_BAG,
        mask=supervised_slots(batch.supervised_BS, anchors_BA, batch.keep_BA, drafter.num_drafts),
        teacher_hidden=base.gather_positions(features.hidden_BSD, teacher_BAG),
        log_partition=base.gather_positions(features.log_partition_BS, teacher_BAG),
    )

    def chunk_sums(slots: _Slots) -> tuple[Any, jax.Array]:
        logits = dspark.draft_logits(drafter, params, frozen, slots.hidden, slots.embedded)
        teacher_logits = jax.lax.stop_gradient(linear(slots.teacher_hidden, frozen.head_VD))
        partition = slots.log_partition if drafter.draft_vocab_size else None
        terms = losses.slot_terms(logits, slots.confidence, slots.labels, teacher_logits, partition)
        counted = slots.mask.astype(jnp.float32)
        by_slot = jnp.stack([jnp.sum(terms.acceptance * counted, axis=0), jnp.sum(counted, axis=0)])
        return losses.loss_sums(terms, slots.mask, models.loss), by_slot

    return _sum_over_chunks(chunk_sums, slots, anchors_BA.size, models.train.blocks_per_chunk)


def _sum_over_chunks(chunk_sums: Any, slots: _Slots, num_blocks: int, chunk: int) -> Any:
    """Adds `chunk_sums` over chunks of blocks. Each is recomputed in the backward pass, so only one chunk's
    [blocks, G, V] arrays exist at a time."""
    slots = jax.tree.map(lambda x: x.reshape(num_blocks, *x.shape[2:]), slots)
    if num_blocks <= chunk:
        return chunk_sums(slots)
    num_chunks = -(-num_blocks // chunk)
    padding = num_chunks * chunk - num_blocks  # zero rows: their mask is False
    slots = jax.tree.map(
        lambda x: jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)).reshape(num_chunks, chunk, *x.shape[1:]), slots
    )
    first = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(chunk_sums, jax.tree.map(lambda x: x[0], slots))
    )
    body = jax.checkpoint(chunk_sums)
    total, _ = jax.lax.scan(lambda total, part: (jax.tree.map(jnp.add, total, body(part)), None), first, slots)
    return total


def _soft_share(models: StepModels, step: jax.Array) -> jax.Array:
    """How much of the soft cross-entropy is left at a step: 1 falling linearly to 0 (see LossConfig.soft_until)."""
    steps = models.loss.soft_until * models.train.max_steps
    return jnp.maximum(0.0, 1.0 - step.astype(jnp.float32) / steps) if steps else jnp.float32(0.0)


def _loss(
    models: StepModels, params: Params, weights: StepWeights, batch: Batch, soft: jax.Array
) -> tuple[jax.Array, Metrics]:
    compute_params = jax.tree.map(lambda x: x.astype(models.train.dtype) if x.ndim > 1 else x, params)
    sums, by_slot_2G = _loss_sums(models, compute_params, weights, batch)
    loss, metrics = losses.total_loss(sums, models.loss, soft)
    by_slot_G = by_slot_2G[0] / jnp.maximum(by_slot_2G[1], 1.0)
    return loss, metrics | {"loss": loss, "acceptance_by_slot": by_slot_G, "blocks": sums.blocks}


@functools.partial(jax.jit, static_argnames=("models",), donate_argnames=("state",))
def train_step(models: StepModels, state: TrainState, weights: StepWeights, batch: Batch) -> tuple[TrainState, Metrics]:
    """One update. A loss or gradient that is not finite leaves weights and optimiser untouched ("skipped" = 1)."""
    soft = _soft_share(models, state.step)
    (loss, metrics), grads = jax.value_and_grad(lambda p: _loss(models, p, weights, batch, soft), has_aux=True)(
        state.params
    )
    grad_norm = optax.tree.norm(grads)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        optimizer = make_optimizer(models.optimizer, models.train.max_steps)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        learning_rate = learning_rate_schedule(models.optimizer, models.train.max_steps)(state.step)
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
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


@functools.partial(jax.jit, static_argnames=("models",))
def eval_step(models: StepModels, params: Params, weights: StepWeights, batch: Batch) -> Metrics:
    """The loss and its terms on a batch, without an update."""
    return _loss(models, params, weights, batch, jnp.float32(0.0))[1]
