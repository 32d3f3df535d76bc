"""The training terms of a drafter (DSpark paper, training objective), as sums over slots that are divided once.

Sums and denominators are kept apart, so that chunks, accumulation steps and devices add up to exactly the loss of
the whole batch. Everything is float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.config import LossConfig
from dspark_jax.drafters.base import NEVER, DraftOutput

_EPS = 1e-6


class SlotTerms(NamedTuple):
    """Unweighted terms of each slot, [...]; `acceptance` = 1 - TV(p, q), the chance that this draft survives.

    `label_q` is the label's probability, without a gradient; `base_ce`, `base_tv` and `base_soft_ce` are those of the
    logits before the sequential part, zeros where nothing reads them.
    """

    ce: jax.Array
    soft_ce: jax.Array
    tv: jax.Array
    confidence: jax.Array
    acceptance: jax.Array
    label_q: jax.Array
    base_ce: jax.Array
    base_tv: jax.Array
    base_soft_ce: jax.Array


class Shares(NamedTuple):
    """How much weight of ce and tv has moved, at this point of a run, to the soft cross-entropy and to the base logits
    (LossConfig.soft_until and base_until)."""

    soft: jax.Array | float = 0.0
    base: jax.Array | float = 0.0


def slot_terms(
    logits: jax.Array,
    confidence: jax.Array | None,
    labels: jax.Array,
    teacher_logits: jax.Array,
    teacher_log_partition: jax.Array | None = None,
    base_logits: jax.Array | None = None,
    label_ce: jax.Array | None = None,
) -> SlotTerms:
    """Terms of slots [...] from draft and teacher logits [..., V] over the draft vocabulary.

    `labels` are draft ids; -1 marks a label outside a reduced vocabulary, whose cross-entropy is left out.
    `teacher_log_partition` [...] is the log-sum-exp over the target's whole vocabulary where `teacher_logits` covers
    a part of it: p then keeps its true mass and what lies outside counts as distance, as it does in verification.
    `base_logits` [..., V]: the draft's logits before the sequential part. `label_ce` [...]: the cross-entropy to the
    label where it is not that of the logits (see `base.LabelScores`). What the logits say is impossible is left out of
    both cross-entropies, as is what lies outside a reduced vocabulary.
    """
    logits, teacher_logits = logits.astype(jnp.float32), teacher_logits.astype(jnp.float32)
    if teacher_log_partition is None:
        teacher_log_partition = jax.nn.logsumexp(teacher_logits, axis=-1)
    ce, soft_ce, tv = _distances(logits, labels, teacher_logits, teacher_log_partition)
    label_q = jnp.where(_drawn(logits, labels), jnp.exp(-jax.lax.stop_gradient(ce)), 0.0)
    if label_ce is not None:
        ce = jnp.where(labels >= 0, label_ce, 0.0)
    acceptance = jnp.clip(1.0 - 0.5 * jax.lax.stop_gradient(tv), 0.0, 1.0)
    zero = jnp.zeros_like(ce)
    bce = zero if confidence is None else jax.nn.softplus(confidence) - acceptance * confidence
    base = (zero,) * 3
    if base_logits is not None:
        base_logits = base_logits.astype(jnp.float32)
        base_ce, base_soft, base_tv = _distances(base_logits, labels, teacher_logits, teacher_log_partition)
        base = (base_ce, base_tv, base_soft)
    return SlotTerms(ce, soft_ce, tv, bce, acceptance, label_q, *base)


def _drawn(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Whether the label of a slot could be drawn at all: it is in the vocabulary, and the logits do not exclude it."""
    picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return (labels >= 0) & (picked > 0.5 * NEVER)


_Distances = tuple[jax.Array, jax.Array, jax.Array]


@jax.custom_vjp
def _distances(logits: jax.Array, labels: jax.Array, teacher: jax.Array, log_partition: jax.Array) -> _Distances:
    """Cross-entropy to the label, cross-entropy to the teacher, and sum_v |q - p|, of slots [...]; no gradient goes to
    the teacher. Its own is in closed form: one pass over the logits, where differentiating the terms one by one keeps
    several arrays of the vocabulary's size."""
    return _distances_forward(logits, labels, teacher, log_partition)[0]


def _distances_forward(
    logits: jax.Array, labels: jax.Array, teacher: jax.Array, log_partition: jax.Array
) -> tuple[_Distances, tuple[jax.Array, ...]]:
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    log_q = logits - log_sum[..., None]
    q, p = jnp.exp(log_q), jnp.exp(teacher - log_partition[..., None])
    possible = logits > 0.5 * NEVER
    mass = jnp.sum(jnp.where(possible, p, 0.0), axis=-1)
    picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    ce = jnp.where(_drawn(logits, labels), log_sum - picked, 0.0)
    soft_ce = -jnp.sum(jnp.where(possible, p * log_q, 0.0), axis=-1)
    tv = jnp.sum(jnp.abs(q - p), axis=-1) + jnp.maximum(1.0 - jnp.sum(p, axis=-1), 0.0)
    # Not sign(q - p) * q: XLA takes a sum of products for a dot of one row each, ten times as slow on a CPU (measured).
    lean = jnp.sum(jnp.where(q > p, q, jnp.where(q < p, -q, 0.0)), axis=-1)
    return (ce, soft_ce, tv), (logits, labels, teacher, log_partition, log_sum, mass, lean)


def _distances_backward(kept: tuple[jax.Array, ...], of: _Distances) -> tuple[jax.Array, None, None, None]:
    """d ce = q - 1[label]; d soft_ce = (sum p) q - p over what is possible; d tv = q (s - sum_u s_u q_u), s the sign of
    q - p."""
    logits, labels, teacher, log_partition, log_sum, mass, lean = kept
    of_ce, of_soft, of_tv = of
    of_ce = jnp.where(_drawn(logits, labels), of_ce, 0.0)
    q, p = jnp.exp(logits - log_sum[..., None]), jnp.exp(teacher - log_partition[..., None])
    # Per slot: what multiplies q, then what the label, p and the sign add.
    of_q = of_ce + of_soft * mass - of_tv * lean
    ids_V = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1)
    of_logits = q * (of_q[..., None] + of_tv[..., None] * jnp.sign(q - p))
    of_logits -= of_soft[..., None] * jnp.where(logits > 0.5 * NEVER, p, 0.0)
    return of_logits - jnp.where(ids_V == labels[..., None], of_ce[..., None], 0.0), None, None, None


_distances.defvjp(_distances_forward, _distances_backward)


class LossSums(NamedTuple):
    """Weighted sums and what they are divided by; add two of these to join two parts of a batch."""

    terms: SlotTerms
    weight: jax.Array
    accepted: jax.Array  # sum over blocks of the expected number of accepted drafts
    blocks: jax.Array

    def __add__(self, other: "LossSums") -> "LossSums":  # type: ignore[override]
        return jax.tree.map(jnp.add, self, other)


def _slot_weights(terms_BAG: SlotTerms, mask_BAG: jax.Array, config: LossConfig) -> jax.Array:
    """What each slot weighs, 0 outside the mask (float32 [..., G])."""
    if config.dpace:
        # Unsupervised slots lie behind the supervised ones: they change no product, and have no survival to add.
        survives = (1.0 - config.dpace) * terms_BAG.label_q + config.dpace
        alive = jnp.cumprod(jnp.where(mask_BAG > 0, survives, 1.0), axis=-1)
        return jnp.flip(jnp.cumsum(jnp.flip(alive * mask_BAG, -1), axis=-1), -1) * mask_BAG
    slot_G = jnp.exp(-jnp.arange(mask_BAG.shape[-1], dtype=jnp.float32) / (config.decay or mask_BAG.shape[-1]))
    return mask_BAG * slot_G.reshape((1,) * (mask_BAG.ndim - 1) + slot_G.shape)


def loss_sums(terms_BAG: SlotTerms, mask_BAG: jax.Array, config: LossConfig) -> LossSums:
    """Sums slots that `mask` marks as supervised, weighted as LossConfig says."""
    mask_BAG = mask_BAG.astype(jnp.float32)
    weight_BAG = _slot_weights(terms_BAG, mask_BAG, config)
    survival_BAG = jnp.cumprod(terms_BAG.acceptance * mask_BAG, axis=-1)
    blocks = jnp.sum(mask_BAG[..., 0])
    return LossSums(
        terms=jax.tree.map(lambda term: jnp.sum(jnp.where(weight_BAG > 0, term * weight_BAG, 0.0)), terms_BAG),
        weight=blocks if config.dpace else jnp.sum(weight_BAG),
        accepted=jnp.sum(survival_BAG),
        blocks=blocks,
    )


def numerator(terms: SlotTerms, config: LossConfig, shares: Shares) -> jax.Array:
    """The loss before its division. It is linear in the terms: sums of it over parts of a batch, and gradients of
    those sums, are divided by the weight of the whole batch."""
    hard = config.ce * terms.ce + config.tv * terms.tv + config.soft * terms.soft_ce
    base = config.ce * terms.base_ce + config.tv * terms.base_tv + config.soft * terms.base_soft_ce
    hard = (1.0 - shares.base) * hard + shares.base * base + config.base_ce * terms.base_ce
    soft = terms.soft_ce + config.base_ce * terms.base_soft_ce
    return shares.soft * soft + (1.0 - shares.soft) * hard + config.confidence * terms.confidence


def denominator(sums: LossSums) -> jax.Array:
    """What `numerator` of a whole batch, and its gradient, are divided by."""
    return sums.weight + _EPS


def total_loss(
    sums: LossSums, config: LossConfig, shares: Shares | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss and its parts. `shares.soft` moves weight from the paper's CE and TV to the soft cross-entropy against
    the teacher's law, whose gradient does not vanish while the drafter still knows nothing."""
    means = jax.tree.map(lambda term: term / denominator(sums), sums.terms)
    reads_base = config.base_until or config.base_ce
    shown = {name: value for name, value in means._asdict().items() if reads_base or "base" not in name}
    metrics = shown | {"tau": 1.0 + sums.accepted / jnp.maximum(sums.blocks, 1.0)}
    return numerator(means, config, shares or Shares()), metrics


def drafter_loss(
    draft_output: DraftOutput,
    labels_BAG: jax.Array,
    mask_BAG: jax.Array,
    teacher_logits_BAGV: jax.Array,
    config: LossConfig,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The DSpark loss of teacher-forced drafts: ce * CE + tv * sum_v |q - p| + confidence * BCE.

    labels [B, A, G] draft ids, mask [B, A, G] supervised slots, teacher logits [B, A, G, V] of the target at the
    label's position. Returns the scalar loss and its terms; "tau" estimates tokens a round, the bonus included.
    """
    logits_BAGV, confidence_BAG = draft_output
    terms_BAG = slot_terms(logits_BAGV, confidence_BAG, labels_BAG, teacher_logits_BAGV)
    return total_loss(loss_sums(terms_BAG, mask_BAG, config), config)
