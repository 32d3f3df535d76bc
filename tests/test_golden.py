"""Numbers of the public PyTorch implementation (../shared/golden): forward, losses, gradients, greedy decoding.

Tolerances are those the golden files were made for: logits 2e-4, losses 1e-4, gradients 1e-3 of a tensor's norm,
tokens and lengths exact.
"""

import dataclasses
import functools
import math
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from tiny import committed

from dspark_jax import Drafter, LossConfig, Target, generate, load_drafter, load_target
from dspark_jax import target as target_lib
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import registry
from dspark_jax.drafters.base import Frozen
from dspark_jax.losses import drafter_loss
from dspark_jax.weights import deepspec
from dspark_jax.weights.drafter_format import name_table

LOGITS, LOSS, GRADIENT = 2e-4, 1e-4, 1e-3
NEW_TOKENS = 40
BY_ROUND = ("acceptance_lengths", "proposals", "starts", "confidence_logits")


@dataclasses.dataclass(frozen=True, eq=False)
class Golden:
    target: Target
    drafter: Drafter
    training: dict[str, np.ndarray]
    decoding: dict[str, np.ndarray]

    @property
    def prompts(self) -> list[list[int]]:
        return [self.decoding[f"p{i}_prompt"].tolist() for i in range(3)]


@functools.cache
def load(folder: Path) -> Golden:
    target = load_target(folder / "target")
    arrays = (dict(np.load(folder / f"{part}.npz")) for part in ("training", "decoding"))
    return Golden(target, load_drafter(folder / "draft", target), *arrays)


@pytest.fixture(params=["qwen3_markov", "qwen3_dflash"])
def golden(request, shared) -> Golden:
    return load(shared / "golden" / request.param)


@pytest.fixture(params=["qwen3_markov", "qwen3_dflash", "qwen3_eagle3"])
def every_golden(request, shared) -> Golden:
    """Those whose drafters are trained in blocks, and the one of test_golden_eagle3.py."""
    return load(shared / "golden" / request.param)


def taps_of(golden: Golden) -> np.ndarray:
    flat = golden.training["target_hidden_states"]
    return flat.reshape(*flat.shape[:2], len(golden.drafter.config.target_layer_ids), -1)


def test_target_features(every_golden):
    training, ids = every_golden.training, every_golden.drafter.config.target_layer_ids
    out = every_golden.target.forward(training["input_ids"], ids)
    np.testing.assert_allclose(out.taps_BSMD, taps_of(every_golden), atol=LOGITS)
    np.testing.assert_allclose(out.hidden_BSD, training["target_last_hidden_states"], atol=LOGITS)


def test_teacher_forced_logits_and_confidence(golden):
    expected, keep = golden.training, golden.training["block_keep_mask"]
    out = golden.drafter.teacher_forced(expected["input_ids"], taps_of(golden), expected["anchor_positions"], keep)
    np.testing.assert_allclose(np.asarray(out.logits_BAGV)[keep], expected["draft_logits"][keep], atol=LOGITS)
    if "confidence_logits" in expected:
        confidence = np.asarray(out.confidence_BAG)[keep]
        np.testing.assert_allclose(confidence, expected["confidence_logits"][keep], atol=LOGITS)
    else:
        assert out.confidence_BAG is None


class Batch(NamedTuple):
    tokens_BS: np.ndarray
    taps_BSMD: np.ndarray
    anchors_BA: np.ndarray
    labels_BAG: np.ndarray
    mask_BAG: np.ndarray
    teacher_BAGV: np.ndarray


def batch_of(golden: Golden) -> Batch:
    t = golden.training
    anchors = np.where(t["block_keep_mask"], t["anchor_positions"], 0)
    # The target's law of a label comes from the position before it: of slot i, from anchor + i.
    before = np.minimum(anchors[..., None] + np.arange(golden.drafter.config.num_drafts), t["input_ids"].shape[1] - 1)
    hidden = t["target_last_hidden_states"][np.arange(len(before))[:, None, None], before]
    teacher = hidden @ np.asarray(target_lib.head_table(golden.target.params)).T
    return Batch(t["input_ids"], taps_of(golden), anchors, t["target_ids"], t["eval_mask"], teacher)


LOSSES = {
    "loss_default": LossConfig(),
    "loss_ce": LossConfig(ce=1.0, tv=0.0, confidence=0.0),
    "loss_l1": LossConfig(ce=0.0, tv=1.0, confidence=0.0),
    "loss_conf": LossConfig(ce=0.0, tv=0.0, confidence=1.0, decay=math.inf),
}


loss_jit = jax.jit(drafter_loss, static_argnames="config")


@functools.partial(jax.jit, static_argnames="config")
@jax.grad
def loss_gradient(params: dict, config: DrafterConfig, frozen: Frozen, batch: Batch) -> jax.Array:
    out = registry.teacher_forced(config, params, frozen, committed(*batch[:2]), batch[2])
    return drafter_loss(out, batch.labels_BAG, batch.mask_BAG, batch.teacher_BAGV, LossConfig())[0]


def test_losses(golden):
    batch = batch_of(golden)
    out = golden.drafter.teacher_forced(*batch[:3], golden.training["block_keep_mask"])
    for name, config in LOSSES.items():
        if name in golden.training:
            loss, _ = loss_jit(out, batch.labels_BAG, batch.mask_BAG, batch.teacher_BAGV, config)
            np.testing.assert_allclose(loss, golden.training[name], atol=LOSS, err_msg=name)


def test_gradients_of_every_trained_tensor(golden):
    drafter = golden.drafter
    gradients = loss_gradient(drafter.params, drafter.config, drafter.frozen, batch_of(golden))
    expected = {name.removeprefix("grad/"): x for name, x in golden.training.items() if name.startswith("grad/")}
    table = name_table(deepspec.TABLE, golden.drafter.config)
    assert table.keys() == expected.keys()
    for name, entry in table.items():
        ours = functools.reduce(lambda tree, key: tree[key], entry.path.split("/"), gradients)
        ours = np.asarray(ours if entry.index is None else ours[entry.index])
        theirs = expected[name].reshape(ours.shape)
        assert np.linalg.norm(ours - theirs) <= GRADIENT * np.linalg.norm(theirs), name


@functools.cache
def decoded(golden: Golden):
    return generate(golden.target, golden.drafter, golden.prompts, NEW_TOKENS)


def test_greedy_decoding_is_exact_round_by_round(every_golden):
    reference = every_golden.decoding
    for i, generation in enumerate(decoded(every_golden)):
        prompt = every_golden.prompts[i]
        expected = {name.removeprefix(f"p{i}_"): x for name, x in reference.items() if name.startswith(f"p{i}_")}
        # The reference still drafts when the last token it needs is there but has not been through the target.
        count = np.sum(expected["starts"] < len(prompt) + NEW_TOKENS - 1)
        expected = expected | {name: x[:count] for name, x in expected.items() if name in BY_ROUND}
        text = prompt + generation.tokens
        assert text == expected["output"][: len(prompt) + NEW_TOKENS].tolist()
        assert [r.draft for r in generation.rounds] == expected["proposals"][:, 1:].tolist()
        emitted = [r.accepted + 1 for r in generation.rounds]
        assert emitted == expected["acceptance_lengths"].tolist()
        starts = len(prompt) + np.cumsum([0, *emitted[:-1]])
        assert starts.tolist() == expected["starts"].tolist()
        assert [text[start] for start in starts] == expected["proposals"][:, 0].tolist()
        if "confidence_logits" in expected:
            confidence = [r.confidence for r in generation.rounds]
            np.testing.assert_allclose(confidence, expected["confidence_logits"], atol=LOGITS)
        else:
            assert all(r.confidence is None for r in generation.rounds)


def references(golden: Golden) -> list[list[int]]:
    """Plain greedy decoding by the reference."""
    texts = [golden.decoding[f"p{i}_greedy_reference"].tolist() for i in range(3)]
    return [text[len(prompt) :][:NEW_TOKENS] for text, prompt in zip(texts, golden.prompts, strict=True)]


def test_drafted_text_is_the_references_plain_text(every_golden):
    assert [generation.tokens for generation in decoded(every_golden)] == references(every_golden)


@pytest.mark.slow
def test_plain_text_is_the_references_plain_text(golden):
    plain = generate(golden.target, None, golden.prompts, NEW_TOKENS)
    assert [generation.tokens for generation in plain] == references(golden)
    assert all(generation.rounds == [] for generation in plain)
