"""The training terms: by hand, in parts, over a reduced vocabulary, and with nothing to learn from."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import LossConfig
from dspark_jax.config import ConfigError
from dspark_jax.drafters.base import NEVER, DraftOutput
from dspark_jax.losses import Shares, SlotTerms, drafter_loss, loss_sums, slot_terms, total_loss

LN2, LN3, LN4 = math.log(2), math.log(3), math.log(4)
loss_of = jax.jit(drafter_loss, static_argnames="config")
terms_of = jax.jit(slot_terms)


def random_case(seed: int, blocks: int = 6, drafts: int = 4, vocab: int = 10):
    rng = np.random.default_rng(seed)
    logits, teacher = rng.normal(size=(2, 1, blocks, drafts, vocab)).astype(np.float32) * 2
    confidence = rng.normal(size=(1, blocks, drafts)).astype(np.float32)
    labels = rng.integers(0, vocab, (1, blocks, drafts))
    mask = np.arange(drafts)[None, None, :] < rng.integers(0, drafts + 1, (1, blocks, 1))
    mask[:, 0] = True
    return DraftOutput(jnp.asarray(logits), jnp.asarray(confidence)), labels, mask, teacher


def test_two_slots_by_hand():
    """q = (1/4, 3/4), p = (1/2, 1/2), label 0; then q = (1/2, 1/2), p = (9/10, 1/10), label 1."""
    logits = jnp.array([[[[0.0, LN3], [0.0, 0.0]]]])
    teacher = jnp.log(jnp.array([[[[0.5, 0.5], [0.9, 0.1]]]]))
    out = DraftOutput(logits, jnp.array([[[0.0, LN3]]]))
    labels, mask = np.array([[[0, 1]]]), np.ones((1, 1, 2), bool)
    loss, parts = loss_of(out, labels, mask, teacher, LossConfig(ce=0.3, tv=0.5, confidence=2.0, decay=2.0))
    late = math.exp(-0.5)
    ce = (LN4 + late * LN2) / (1 + late)
    tv = (0.5 + late * 0.8) / (1 + late)
    confidence = (LN2 + late * (LN4 - 0.6 * LN3)) / (1 + late)  # acceptances are 1 - tv / 2: 0.75 and 0.6
    np.testing.assert_allclose(parts["ce"], ce, rtol=1e-5)
    np.testing.assert_allclose(parts["tv"], tv, rtol=1e-5)
    np.testing.assert_allclose(parts["confidence"], confidence, rtol=1e-5)
    np.testing.assert_allclose(parts["tau"], 1 + 0.75 + 0.75 * 0.6, rtol=1e-5)
    np.testing.assert_allclose(loss, 0.3 * ce + 0.5 * tv + 2 * confidence, rtol=1e-5)


def test_slots_outside_the_mask_count_for_nothing():
    out, labels, mask, teacher = random_case(0)
    loss, parts = loss_of(out, labels, mask, teacher, LossConfig())
    rng = np.random.default_rng(1)
    noise = np.where(mask, 0, rng.normal(size=mask.shape)).astype(np.float32) * 100
    changed = DraftOutput(
        out.logits_BAGV + noise[..., None] * rng.normal(size=10).astype(np.float32)[None, None, None],
        out.confidence_BAG + noise,
    )
    other_labels = np.where(mask, labels, 0)
    again, again_parts = loss_of(changed, other_labels, mask, teacher, LossConfig())
    np.testing.assert_allclose(again, loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), again_parts, parts)


def test_an_empty_mask_is_a_loss_of_zero_with_gradients_of_zero():
    out, labels, mask, teacher = random_case(2)
    nothing = np.zeros_like(mask)
    loss, parts = loss_of(out, labels, nothing, teacher, LossConfig())
    assert loss == 0
    assert parts.pop("tau") == 1
    assert all(value == 0 for value in parts.values())
    gradients = jax.jit(jax.grad(lambda out: drafter_loss(out, labels, nothing, teacher, LossConfig())[0]))(out)
    for gradient in gradients:
        np.testing.assert_array_equal(gradient, 0)


def test_parts_of_a_batch_add_up_to_the_whole():
    out, labels, mask, teacher = random_case(3)
    config = LossConfig(decay=3.0)
    terms = terms_of(*out, labels, teacher)
    parts = [slice(0, 1), slice(1, 4), slice(4, 6)]
    sums = [loss_sums(jax.tree.map(lambda x, part=part: x[:, part], terms), mask[:, part], config) for part in parts]
    added, added_metrics = total_loss(sums[0] + sums[1] + sums[2], config)
    whole, metrics = loss_of(out, labels, mask, teacher, config)
    np.testing.assert_allclose(added, whole, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), added_metrics, metrics)


def test_a_reduced_vocabulary_is_the_whole_one_with_no_draft_outside():
    out, labels, _, teacher = random_case(4)
    ids = np.array([0, 2, 3, 7, 9])
    inside = np.isin(np.arange(10), ids)[None, None, None]
    whole_logits = jnp.where(inside, out.logits_BAGV, -1e9)
    whole = terms_of(whole_logits, out.confidence_BAG, labels, teacher)
    draft_labels = np.where(np.isin(labels, ids), np.searchsorted(ids, labels), -1)
    partition = jax.nn.logsumexp(jnp.asarray(teacher), axis=-1)
    reduced = terms_of(out.logits_BAGV[..., ids], out.confidence_BAG, draft_labels, teacher[..., ids], partition)
    for name in ("tv", "confidence", "acceptance"):
        np.testing.assert_allclose(getattr(reduced, name), getattr(whole, name), atol=1e-5, err_msg=name)
    np.testing.assert_allclose(reduced.ce, np.where(draft_labels >= 0, whole.ce, 0), atol=1e-5)
    assert (draft_labels < 0).any()
    assert (draft_labels >= 0).any()


@pytest.mark.parametrize("drafts", [1, 4])
def test_tau_is_one_plus_the_mean_chain_of_acceptances(drafts):
    rng = np.random.default_rng(drafts)
    acceptance = rng.uniform(size=(1, 5, drafts)).astype(np.float32)
    supervised = np.array([drafts, 1, drafts // 2, 0, drafts])  # slots a block; a block without any is no block
    mask = np.arange(drafts)[None, None, :] < supervised[None, :, None]
    zero = jnp.zeros(acceptance.shape)
    _, metrics = total_loss(
        loss_sums(SlotTerms(*[zero] * 4, acceptance, *[zero] * 4), mask, LossConfig()), LossConfig()
    )
    chains = [np.cumprod(row[:count]).sum() for row, count in zip(acceptance[0], supervised, strict=True) if count]
    np.testing.assert_allclose(metrics["tau"], 1 + np.mean(chains), rtol=1e-6)


def test_acceptance_is_the_overlap_of_the_two_laws():
    out, labels, _, teacher = random_case(5)
    q, p = jax.nn.softmax(out.logits_BAGV), jax.nn.softmax(jnp.asarray(teacher))
    terms = terms_of(*out, labels, teacher)
    np.testing.assert_allclose(terms.acceptance, jnp.minimum(p, q).sum(axis=-1), atol=1e-5)
    np.testing.assert_allclose(terms_of(teacher, None, labels, teacher).acceptance, 1, atol=1e-5)


def plain_terms(logits, labels, teacher, partition):
    """The definitions, to be differentiated by JAX."""
    q, p = jax.nn.softmax(logits), jnp.exp(teacher - partition[..., None])
    log_q = jax.nn.log_softmax(logits)
    ce = -jnp.sum(jnp.where(jnp.arange(logits.shape[-1])[None, None, None] == labels[..., None], log_q, 0.0), axis=-1)
    tv = jnp.sum(jnp.abs(q - p), axis=-1) + jnp.maximum(1.0 - jnp.sum(p, axis=-1), 0.0)
    return ce, -jnp.sum(p * log_q, axis=-1), tv


@pytest.mark.parametrize("reduced", [False, True])
def test_gradients_in_closed_form_are_those_of_the_definitions(reduced):
    """Whatever each term of each slot weighs, over the whole vocabulary and over a part that some labels are not in."""
    out, labels, _, teacher = random_case(14, blocks=20, vocab=30)
    logits, partition = out.logits_BAGV, jax.nn.logsumexp(jnp.asarray(teacher), axis=-1)
    if reduced:
        logits, teacher = logits[..., :12], teacher[..., :12]
        labels = np.where(labels < 12, labels, -1)
    pull = np.random.default_rng(15).normal(size=(3, *labels.shape)).astype(np.float32)

    def ours(logits):
        terms = slot_terms(logits, None, labels, teacher, partition)
        return sum(jnp.sum(w * t) for w, t in zip(pull, (terms.ce, terms.soft_ce, terms.tv), strict=True))

    def plain(logits):
        return sum(jnp.sum(w * t) for w, t in zip(pull, plain_terms(logits, labels, teacher, partition), strict=True))

    value, gradient = jax.jit(jax.value_and_grad(ours))(logits)
    wanted_value, wanted = jax.jit(jax.value_and_grad(plain))(logits)
    np.testing.assert_allclose(value, wanted_value, rtol=1e-5)
    np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-6)


def test_the_confidence_term_teaches_the_confidence_alone():
    out, labels, mask, teacher = random_case(6)
    config = LossConfig(ce=0.0, tv=0.0, confidence=1.0)
    gradient = jax.jit(jax.grad(lambda out: drafter_loss(out, labels, mask, teacher, config)[0]))(out)
    np.testing.assert_array_equal(gradient.logits_BAGV, 0)
    assert np.all((np.asarray(gradient.confidence_BAG) != 0) == mask)


def test_the_confidence_term_is_least_at_the_acceptance():
    out, labels, mask, teacher = random_case(7)
    acceptance = np.clip(terms_of(*out, labels, teacher).acceptance, 1e-6, 1 - 1e-6)
    config = LossConfig(ce=0.0, tv=0.0, confidence=1.0)
    exact = jnp.asarray(np.log(acceptance / (1 - acceptance)))
    best = loss_of(out._replace(confidence_BAG=exact), labels, mask, teacher, config)[0]
    for shift in (-0.3, 0.3):
        assert loss_of(out._replace(confidence_BAG=exact + shift), labels, mask, teacher, config)[0] > best


def test_without_a_confidence_head_there_is_no_such_term():
    out, labels, mask, teacher = random_case(8)
    bare = out._replace(confidence_BAG=None)
    loss, parts = loss_of(bare, labels, mask, teacher, LossConfig())
    assert parts["confidence"] == 0
    np.testing.assert_allclose(loss, loss_of(out, labels, mask, teacher, LossConfig(confidence=0.0))[0], rtol=1e-6)


def test_soft_moves_the_weight_of_ce_and_tv_to_the_teachers_law():
    out, labels, mask, teacher = random_case(9)
    config = LossConfig()
    sums = loss_sums(terms_of(*out, labels, teacher), mask, config)
    hard, parts = total_loss(sums, config)
    np.testing.assert_allclose(hard, 0.1 * parts["ce"] + 0.9 * parts["tv"] + parts["confidence"], rtol=1e-6)
    soft, _ = total_loss(sums, config, Shares(soft=1.0))
    np.testing.assert_allclose(soft, parts["soft_ce"] + parts["confidence"], rtol=1e-6)
    between, _ = total_loss(sums, config, Shares(soft=0.25))
    np.testing.assert_allclose(between, 0.75 * hard + 0.25 * soft, rtol=1e-5)


def test_bfloat16_logits_are_reduced_in_float32():
    out, labels, mask, teacher = random_case(10)
    half = out.logits_BAGV.astype(jnp.bfloat16)
    loss, parts = loss_of(out._replace(logits_BAGV=half), labels, mask, teacher, LossConfig())
    exact, _ = loss_of(out._replace(logits_BAGV=half.astype(jnp.float32)), labels, mask, teacher, LossConfig())
    assert loss.dtype == jnp.float32
    assert all(value.dtype == jnp.float32 for value in parts.values())
    assert loss == exact


def test_decay_zero_is_the_block_size():
    out, labels, mask, teacher = random_case(11)
    named, zero = (loss_of(out, labels, mask, teacher, LossConfig(decay=decay))[0] for decay in (4.0, 0.0))
    assert mask.shape[-1] == 4
    assert named == zero


def test_dpace_weighs_a_slot_by_the_survivors_behind_it():
    """q(label) = 1/4, 1/2, 1/2, floor 1/2: chances 5/8, 3/4 and, unsupervised, nothing."""
    logits = jnp.log(jnp.array([[[[0.25, 0.75], [0.5, 0.5], [0.5, 0.5]]]]))
    labels, mask = np.array([[[0, 0, 0]]]), np.array([[[True, True, False]]])
    teacher = jnp.zeros((1, 1, 3, 2))
    config = LossConfig(ce=1.0, tv=0.0, confidence=0.0, dpace=0.5)
    loss, _ = loss_of(DraftOutput(logits, None), labels, mask, teacher, config)
    first, second = 5 / 8, 5 / 8 * 3 / 4
    np.testing.assert_allclose(loss, (first + second) * LN4 + second * LN2, rtol=1e-5)  # one block divides it

    def value(logits):
        return drafter_loss(DraftOutput(logits, None), labels, mask, teacher, config)[0]

    gradient = jax.jit(jax.grad(value))(logits)
    expected = np.array([(first + second) * np.array([0.25 - 1, 0.75]), second * np.array([0.5 - 1, 0.5]), [0, 0]])
    np.testing.assert_allclose(gradient[0, 0], expected, rtol=1e-5, atol=1e-7)  # weights have no gradient


def test_base_moves_ce_and_tv_to_the_logits_before_the_sequential_head():
    out, labels, mask, teacher = random_case(12)
    base = random_case(13)[0].logits_BAGV
    config = LossConfig(base_until=0.5)
    terms = terms_of(*out, labels, teacher, base_logits=base)
    whole, parts = total_loss(loss_sums(terms, mask, config), config, Shares(base=1.0))
    of_base, base_parts = loss_of(DraftOutput(base, out.confidence_BAG), labels, mask, teacher, config)
    np.testing.assert_allclose(parts["base_ce"], base_parts["ce"], rtol=1e-6)
    np.testing.assert_allclose(parts["base_tv"], base_parts["tv"], rtol=1e-6)
    np.testing.assert_allclose(whole - parts["confidence"], of_base - base_parts["confidence"], rtol=1e-5)
    final, _ = total_loss(loss_sums(terms, mask, config), config, Shares(base=0.0))
    np.testing.assert_allclose(final, loss_of(out, labels, mask, teacher, LossConfig())[0], rtol=1e-6)


def test_base_ce_adds_the_parallel_logits_cross_entropy_hard_and_soft():
    out, labels, mask, teacher = random_case(14)
    base = random_case(15)[0].logits_BAGV
    config = LossConfig(ce=1.0, tv=0.0, base_ce=0.5)
    sums = loss_sums(terms_of(*out, labels, teacher, base_logits=base), mask, config)
    loss, parts = total_loss(sums, config)
    np.testing.assert_allclose(loss, parts["ce"] + 0.5 * parts["base_ce"] + parts["confidence"], rtol=1e-6)
    of_base, base_parts = loss_of(DraftOutput(base, None), labels, mask, teacher, config)
    np.testing.assert_allclose((parts["base_ce"], parts["base_soft_ce"]), (base_parts["ce"], base_parts["soft_ce"]))
    soft, _ = total_loss(sums, config, Shares(soft=1.0))
    expected = parts["soft_ce"] + 0.5 * base_parts["soft_ce"] + parts["confidence"]
    np.testing.assert_allclose(soft, expected, rtol=1e-6)
    np.testing.assert_allclose(of_base, base_parts["ce"], rtol=1e-6)


def test_what_a_law_cannot_draw_is_distance_and_no_cross_entropy():
    out, labels, _, teacher = random_case(16)
    possible = np.random.default_rng(17).random(out.logits_BAGV.shape) < 0.6
    possible[..., 0] = True
    logits = np.where(possible, out.logits_BAGV, NEVER)
    terms = terms_of(logits, None, labels, teacher)
    q = np.where(possible, np.exp(out.logits_BAGV), 0.0)
    q /= q.sum(-1, keepdims=True)
    p = np.asarray(jax.nn.softmax(jnp.asarray(teacher)))
    of_label = np.take_along_axis(q, labels[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(terms.label_q, of_label, atol=1e-6)
    np.testing.assert_allclose(terms.ce, np.where(of_label > 0, -np.log(np.maximum(of_label, 1e-30)), 0), atol=1e-5)
    np.testing.assert_allclose(terms.tv, np.abs(p - q).sum(-1), atol=1e-5)
    soft = -np.sum(np.where(possible, p * np.log(np.where(possible, q, 1.0)), 0.0), axis=-1)
    np.testing.assert_allclose(terms.soft_ce, soft, rtol=1e-5)
    assert 0 < (of_label == 0).sum() < of_label.size
    given = terms_of(logits, None, np.where(labels == 1, -1, labels), teacher, label_ce=jnp.full(labels.shape, 7.0))
    np.testing.assert_array_equal(given.ce, np.where(labels == 1, 0.0, 7.0))

    gradient = jax.jit(jax.grad(lambda x: sum(jnp.sum(t) for t in terms_of(x, None, labels, teacher)[:3])))(logits)
    assert np.isfinite(gradient).all()
    assert not np.asarray(gradient)[~possible].any()


@pytest.mark.parametrize(
    "settings",
    [{"base_ce": -1.0}, {"decay": -1.0}, {"dpace": 1.0}, {"base_until": 1.5}, {"soft_until": -0.1}, {"ce": -1.0}],
)
def test_loss_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ConfigError, match=f"loss {next(iter(settings))} = "):
        LossConfig(**settings)
