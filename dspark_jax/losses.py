"""The training terms of a drafter (DSpark paper, training objective), as sums over slots that are divided once.

Sums and denominators are kept apart, so that chunks, accumulation steps and devices add up to exactly the loss of
the whole batch. Everything is float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.config import LossConfig
from dspark_jax.drafters.base import DraftOutput

_EPS = 1e-6


class SlotTerms(NamedTuple):
    """Unweighted terms of each slot, [...]; `acceptance` = 1 - TV(p, q), the chance that this draft survives."""

    ce: jax.Array
    soft_ce: jax.Array
    tv: jax.Array
    confidence: jax.Array
    acceptance: jax.Array


def slot_terms(
    logits: jax.Array,
    confidence: jax.Array | None,
    labels: jax.Array,
    teacher_logits: jax.Array,
    teacher_log_partition: jax.Array | None = None,
) -> SlotTerms:
    """Terms of slots [...] from draft and teacher logits [..., V] over the draft vocabulary.

    `labels` are draft ids; -1 marks a label outside a reduced vocabulary, whose cross-entropy is left out.
    `teacher_log_partition` [...] is the log-sum-exp over the target's whole vocabulary where `teacher_logits` covers
    a part of it: p then keeps its true mass and what lies outside counts as distance, as it does in verification.
    """
    logits, teacher_logits = logits.astype(jnp.float32), teacher_logits.astype(jnp.float32)
    log_q = jax.nn.log_softmax(logits, axis=-1)
    if teacher_log_partition is None:
        teacher_log_partition = jax.nn.logsumexp(teacher_logits, axis=-1)
    p = jnp.exp(teacher_logits - teacher_log_partition[..., None])
    outside = 1.0 - jnp.sum(p, axis=-1)
    tv = jnp.sum(jnp.abs(jnp.exp(log_q) - p), axis=-1) + jnp.maximum(outside, 0.0)
    acceptance = jnp.clip(1.0 - 0.5 * jax.lax.stop_gradient(tv), 0.0, 1.0)
    picked = jnp.take_along_axis(log_q, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    ce = jnp.where(labels >= 0, -picked, 0.0)
    soft_ce = -jnp.sum(p * log_q, axis=-1)
    if confidence is None:
        bce = jnp.zeros_like(ce)
    else:
        bce = jax.nn.softplus(confidence) - acceptance * confidence
    return SlotTerms(ce, soft_ce, tv, bce, acceptance)


class LossSums(NamedTuple):
    """Weighted sums and what they are divided by; add two of these to join two parts of a batch."""

    terms: SlotTerms
    weight: jax.Array
    accepted: jax.Array  # sum over blocks of the expected number of accepted drafts
    blocks: jax.Array

    def __add__(self, other: "LossSums") -> "LossSums":  # type: ignore[override]
        return jax.tree.map(jnp.add, self, other)


def loss_sums(terms_BAG: SlotTerms, mask_BAG: jax.Array, config: LossConfig) -> LossSums:
    """Sums slots that `mask` marks as supervised; slot i weighs exp(-i / decay)."""
    mask_BAG = mask_BAG.astype(jnp.float32)
    slot_G = jnp.exp(-jnp.arange(mask_BAG.shape[-1], dtype=jnp.float32) / config.decay)
    weight_BAG = mask_BAG * slot_G.reshape((1,) * (mask_BAG.ndim - 1) + slot_G.shape)
    survival_BAG = jnp.cumprod(terms_BAG.acceptance * mask_BAG, axis=-1)
    return LossSums(
        terms=jax.tree.map(lambda term: jnp.sum(jnp.where(weight_BAG > 0, term * weight_BAG, 0.0)), terms_BAG),
        weight=jnp.sum(weight_BAG),
        accepted=jnp.sum(survival_BAG),
        blocks=jnp.sum(mask_BAG[..., 0]),
    )


def total_loss(
    sums: LossSums, config: LossConfig, soft: jax.Array | float = 0.0
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss and its parts. `soft` in [0, 1] moves weight from the paper's CE and TV to the soft cross-entropy
    against the teacher's law, whose gradient does not vanish while the drafter still knows nothing."""
    denominator = sums.weight + _EPS
    ce, soft_ce, tv, confidence, acceptance = (term / denominator for term in sums.terms)
    hard = config.ce * ce + config.tv * tv
    loss = soft * soft_ce + (1.0 - soft) * hard + config.confidence * confidence
    tau = 1.0 + sums.accepted / jnp.maximum(sums.blocks, 1.0)
    metrics = {
        "ce": ce, "soft_ce": soft_ce, "tv": tv, "confidence": confidence, "acceptance": acceptance, "tau": tau
    }  # fmt: skip
    return loss, metrics


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
