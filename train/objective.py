"""The loss of a batch: target features, teacher-forced drafts and the vocabulary work, over chunks of anchors.

`sums_and_gradients` reads top to bottom. Everything that grows with anchors or with the vocabulary happens inside one
chunk of blocks, forward and backward, so memory follows the chunk and not the number of anchors.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax import kv_cache, layers, losses, scanned_target, sharding
from dspark_jax import target as target_lib
from dspark_jax.config import DrafterConfig, LossConfig, OptimizerSettings, TargetConfig, TrainSettings
from dspark_jax.drafters import base
from dspark_jax.drafters.base import Committed, Frozen
from dspark_jax.drafters.registry import algorithm, label_scores

Params = dict[str, Any]
_POSITIONS = 64  # of every row, whose logits over the whole vocabulary exist at a time


class TargetFeatures(NamedTuple):
    """What training needs of the target at every token: tapped layers, post-norm hidden state, and the log-sum-exp of
    its logits over the whole vocabulary (read only with a reduced draft vocabulary)."""

    taps_BSMD: jax.Array
    hidden_BSD: jax.Array
    log_partition_BS: jax.Array


class Batch(NamedTuple):
    """Rows of one or more conversations with the anchors drawn for them. `supervised` marks the assistant's own tokens;
    `start` is the place in the row where a token's conversation begins. Blocks where `keep` is False fill the row up.
    `features` None: the target runs inside the step."""

    tokens_BS: jax.Array
    supervised_BS: jax.Array
    start_BS: jax.Array
    anchors_BA: jax.Array
    keep_BA: jax.Array
    features: TargetFeatures | None = None


class StepModels(NamedTuple):
    """Everything static about a step: its compile key. `scan_layers`: the target's layers are one loop over stacked
    weights where all of them are alike, which compiles far sooner on a TPU and runs several times slower on a CPU."""

    target: TargetConfig
    drafter: DrafterConfig
    loss: LossConfig
    optimizer: OptimizerSettings
    train: TrainSettings
    scan_layers: bool = False


class StepWeights(NamedTuple):
    """Frozen weights. `target_to_draft` maps target ids into a reduced draft vocabulary, -1 outside; None: all ids."""

    target_params: Params
    frozen: Frozen
    target_to_draft_V: jax.Array | None


class BatchSums(NamedTuple):
    """Loss sums, and the summed acceptance and count of every slot [2, G]; two of these add up."""

    loss: losses.LossSums
    by_slot_2G: jax.Array


def target_shapes(target: TargetConfig) -> Params:
    """The target's parameters as shapes."""
    ids = jnp.zeros((1, 1), jnp.int32)
    return jax.eval_shape(lambda: target_lib.TargetModel(target).init(jax.random.key(0), ids, ids))["params"]


def target_features(
    target: TargetConfig,
    drafter: DrafterConfig,
    params: Params,
    tokens_BS: jax.Array,
    start_BS: jax.Array,
    scan_layers: bool = False,
) -> TargetFeatures:
    """One forward pass of the frozen target. The log-partition is left out (zeros) where nothing reads it."""
    rows, taps = kv_cache.empty_rows(start_BS, params["embed"].dtype), drafter.target_layer_ids
    position_BS = jnp.arange(start_BS.shape[1])[None, :] - start_BS
    if scan_layers and scanned_target.alike(target):
        stacked = scanned_target.stack(target, params)
        features = scanned_target.features(target, stacked, tokens_BS, position_BS, rows, taps, split_rows=True)
    else:
        features = target_lib.features(target, params, tokens_BS, position_BS, [rows] * target.num_layers, taps)
    hidden_BSD, taps_BSMD, _ = features
    if drafter.draft_vocab_size:
        log_partition_BS = _log_partition(target, params, hidden_BSD)
    else:
        log_partition_BS = jnp.zeros(tokens_BS.shape, jnp.float32)
    return jax.lax.stop_gradient(TargetFeatures(taps_BSMD, hidden_BSD, log_partition_BS))


def _log_partition(target: TargetConfig, params: Params, hidden_BSD: jax.Array) -> jax.Array:
    """The log-sum-exp of the target's logits, [B, S]; a piece of all rows at a time, so that [S, V] is never whole and
    rows stay on the devices that have them."""
    batch, length, width = hidden_BSD.shape
    head_VD = sharding.constrain(target_lib.head_table(params), "tensor", None)
    count = -(-length // _POSITIONS)
    padded = jnp.pad(hidden_BSD, ((0, 0), (0, count * _POSITIONS - length), (0, 0)))

    def piece(hidden_BPD: jax.Array) -> jax.Array:
        return jax.nn.logsumexp(layers.soft_cap(layers.linear(hidden_BPD, head_VD), target.logit_softcap), axis=-1)

    pieces = padded.reshape(batch, count, _POSITIONS, width).swapaxes(0, 1)
    return jax.lax.map(piece, pieces).swapaxes(0, 1).reshape(batch, -1)[:, :length]


class _Anchors(NamedTuple):
    """Anchors of every row; a chunk is a part of each row's."""

    anchors_BA: jax.Array
    keep_BA: jax.Array


def supervised_slots(
    supervised_BS: jax.Array, start_BS: jax.Array, anchors_BA: jax.Array, keep_BA: jax.Array, num_drafts: int
) -> jax.Array:
    """Slot i counts while it and all slots before it predict the assistant's own tokens, inside the row and inside the
    anchor's conversation: [B, A, G]."""
    index_BAG = anchors_BA[:, :, None] + 1 + jnp.arange(num_drafts)[None, None, :]
    inside_BAG = index_BAG < supervised_BS.shape[1]
    start_BA = jnp.take_along_axis(start_BS, anchors_BA, axis=1)
    same_BAG = base.gather_positions(start_BS, index_BAG) == start_BA[:, :, None]
    own_BAG = base.gather_positions(supervised_BS, index_BAG) & inside_BAG & same_BAG & keep_BA[:, :, None]
    return jnp.cumprod(own_BAG.astype(jnp.int32), axis=-1) > 0


class _Whole(NamedTuple):
    """What the rows of a batch share: whole on every device, but for `tensor`."""

    params: Params
    frozen: Frozen
    target_to_draft_V: jax.Array | None
    shares: losses.Shares


def batch_sums(models: StepModels, params: Params, weights: StepWeights, batch: Batch) -> BatchSums:
    """The sums that the loss of a batch, or of a part of it, is made of."""
    nothing = jnp.float32(0.0)
    whole, batch = _prepared(models, params, weights, batch, losses.Shares(nothing, nothing))
    return sharding.sum_over_rows(functools.partial(_own_sums, models), whole, batch, {})[0]


def sums_and_gradients(
    models: StepModels, params: Params, weights: StepWeights, batch: Batch, shares: losses.Shares
) -> tuple[BatchSums, Params]:
    """`batch_sums`, and the float32 gradients of the loss's numerator, split as the table of dspark_jax.sharding says.

    Each chunk of blocks is differentiated where it is computed, so nothing of it is kept, and nothing but the scores of
    draft attention is computed again; devices add their gradients up once, behind the last chunk.
    """
    whole, batch = _prepared(models, params, weights, batch, shares)
    return sharding.sum_over_rows(functools.partial(_own_gradients, models), whole, batch, params)


def _prepared(
    models: StepModels, params: Params, weights: StepWeights, batch: Batch, shares: losses.Shares
) -> tuple[_Whole, Batch]:
    """The frozen tables gathered once, not in every chunk, and the batch with its features."""
    frozen = weights.frozen._replace(
        embed_VD=sharding.constrain(weights.frozen.embed_VD, "tensor", None),
        head_VD=sharding.constrain(weights.frozen.head_VD, "tensor", None),
    )
    if batch.features is None:
        target = models.target, models.drafter, weights.target_params, batch.tokens_BS, batch.start_BS
        batch = batch._replace(features=target_features(*target, models.scan_layers))
    return _Whole(params, frozen, weights.target_to_draft_V, shares), batch


def _context(models: StepModels, whole: _Whole, batch: Batch) -> Any:
    """What all blocks of a row share of its context."""
    assert batch.features is not None
    drafter, committed = models.drafter, Committed(batch.tokens_BS, batch.features.taps_BSMD, batch.features.hidden_BSD)
    context = algorithm(drafter).context_rows
    return context(drafter, whole.params, whole.frozen, committed, batch.start_BS, models.scan_layers)


def _own_sums(models: StepModels, whole: _Whole, batch: Batch) -> tuple[BatchSums, Params]:
    rows = _context(models, whole, batch)
    return _add_over_chunks(lambda part: _chunk_sums(models, whole, batch, rows, part), models, batch), {}


def _own_gradients(models: StepModels, whole: _Whole, batch: Batch) -> tuple[BatchSums, Params]:
    def context(params: Params) -> tuple[list[jax.Array], Any]:
        rows = _context(models, whole._replace(params=params), batch)
        return _real(rows), rows

    arrays, pull_back, rows = jax.vjp(context, whole.params, has_aux=True)

    def chunk(part: _Anchors) -> tuple[BatchSums, tuple[Params, list[jax.Array]]]:
        def value(params: Params, arrays: list[jax.Array]) -> tuple[jax.Array, BatchSums]:
            sums = _chunk_sums(models, whole._replace(params=params), batch, _with_real(rows, arrays), part)
            return losses.numerator(sums.loss.terms, models.loss, whole.shares), sums

        (_, sums), grads = jax.value_and_grad(value, (0, 1), has_aux=True)(whole.params, arrays)
        return sums, jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)

    sums, (own, of_arrays) = _add_over_chunks(chunk, models, batch)
    (through_context,) = pull_back([grad.astype(x.dtype) for grad, x in zip(of_arrays, arrays, strict=True)])
    return sums, jax.tree.map(lambda one, other: one + other.astype(jnp.float32), own, through_context)


def _is_real(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _real(tree: Any) -> list[jax.Array]:
    """The arrays of a tree that have gradients."""
    return [x for x in jax.tree.leaves(tree) if _is_real(x)]


def _with_real(tree: Any, arrays: list[jax.Array]) -> Any:
    """The tree with these in place of its own."""
    new = iter(arrays)
    return jax.tree.map(lambda x: next(new) if _is_real(x) else x, tree)


def _chunk_sums(models: StepModels, whole: _Whole, batch: Batch, rows: Any, part: _Anchors) -> BatchSums:
    """The sums of some blocks of every row."""
    drafter, (params, frozen, target_to_draft_V, _), (anchors_BA, keep_BA) = models.drafter, whole, part
    features = batch.features
    assert features is not None

    blocks = algorithm(drafter).teacher_forced_blocks(
        drafter, params, frozen, batch.tokens_BS, rows, anchors_BA, models.loss.detach_confidence
    )
    # The target's logits after token t predict t + 1: slot i's teacher is the hidden state at anchor + i.
    teacher_BAG = anchors_BA[:, :, None] + jnp.arange(drafter.num_drafts)[None, None, :]
    labels_BAG = base.gather_positions(batch.tokens_BS, teacher_BAG + 1)
    if target_to_draft_V is not None:
        labels_BAG = target_to_draft_V[labels_BAG]
    partition_BAG = base_BAGV = None
    if drafter.draft_vocab_size:
        partition_BAG = base.gather_positions(features.log_partition_BS, teacher_BAG)
    teacher_BAGD = base.gather_positions(features.hidden_BSD, teacher_BAG)
    teacher_BAGV = layers.soft_cap(layers.linear(teacher_BAGD, frozen.head_VD), models.target.logit_softcap)
    logits_BAGV, label_ce_BAG = label_scores(drafter, params, frozen, blocks, labels_BAG)
    if models.loss.base_until or models.loss.base_ce:
        base_BAGV = base.parallel_logits(drafter, frozen, blocks.hidden_BAGD)
    terms = losses.slot_terms(
        logits_BAGV, blocks.confidence_BAG, labels_BAG, teacher_BAGV, partition_BAG, base_BAGV, label_ce_BAG
    )
    mask_BAG = supervised_slots(batch.supervised_BS, batch.start_BS, anchors_BA, keep_BA, drafter.num_drafts)
    counted_BAG = mask_BAG.astype(jnp.float32)
    by_slot_2G = jnp.stack([jnp.sum(x, axis=(0, 1)) for x in (terms.acceptance * counted_BAG, counted_BAG)])
    return BatchSums(losses.loss_sums(terms, mask_BAG, models.loss), by_slot_2G)


def _add_over_chunks(chunk_of: Callable[[_Anchors], Any], models: StepModels, batch: Batch) -> Any:
    """Adds up what `chunk_of` gives for the anchors of every row, `blocks_per_chunk` of all rows at a time."""
    num_rows, num_anchors = batch.anchors_BA.shape
    chunk = max(1, models.train.blocks_per_chunk // num_rows)
    anchors = _Anchors(batch.anchors_BA, batch.keep_BA)
    if num_anchors <= chunk:
        return chunk_of(anchors)
    num_chunks = -(-num_anchors // chunk)
    # Fillers at anchor 0 that are not kept.
    padding = ((0, 0), (0, num_chunks * chunk - num_anchors))
    parts = jax.tree.map(lambda x: jnp.pad(x, padding).reshape(num_rows, num_chunks, chunk).swapaxes(0, 1), anchors)
    shapes = jax.eval_shape(chunk_of, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    total, _ = jax.lax.scan(lambda total, part: (jax.tree.map(jnp.add, total, chunk_of(part)), None), zeros, parts)
    return total
