"""EAGLE-3's training-time test against the public PyTorch implementation (../shared/golden/qwen3_eagle3).

Its steps are blocks at every position: row i of the reference is the block whose anchor is i + 1.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_golden import GRADIENT, LOSS, Golden, load, taps_of
from tiny import committed

from dspark_jax import losses as losses_lib
from dspark_jax import target as target_lib
from dspark_jax.config import LossConfig
from dspark_jax.drafters import registry
from dspark_jax.weights import deepspec_eagle3
from dspark_jax.weights.drafter_format import name_table

STEPS, DECAY = 7, 0.8


@pytest.fixture
def golden(shared: Path) -> Golden:
    return load(shared / "golden" / "qwen3_eagle3")


def step_losses(params: Any, golden: Golden) -> jax.Array:
    """Soft cross-entropy to the target's law in every step, over B S: what a mask that lost its last column and moves
    a place to the left each step lets through."""
    drafter, t = golden.drafter, golden.training
    batch, length = t["input_ids"].shape
    anchors = np.tile(np.arange(1, length), (batch, 1))
    seen = committed(t["input_ids"], taps_of(golden))
    logits = registry.teacher_forced(drafter.config, params, drafter.frozen, seen, anchors).logits_BAGV
    teacher = target_lib.logits(golden.target.params, jnp.asarray(t["target_last_hidden_states"]))
    labels = jnp.zeros(logits.shape[:-1], jnp.int32)  # the cross-entropy to them is not read
    mask = np.concatenate([t["loss_mask"][:, :-1], np.zeros((batch, STEPS + 1))], axis=1)
    losses = []
    for step in range(STEPS):
        counted = mask[:, step : step + length - 1 - step]  # rows whose target is in the sequence
        rows = slice(None), slice(length - 1 - step), step
        terms = losses_lib.slot_terms(logits[rows], None, labels[rows], teacher[:, 1 + step :])
        losses.append(jnp.sum(terms.soft_ce * jnp.asarray(counted, jnp.float32)) / (batch * length))
    return jnp.stack(losses)


def test_the_settings_of_its_objective_weigh_steps_as_it_does() -> None:
    settings = LossConfig(ce=0.0, tv=0.0, soft=1.0, confidence=0.0, decay=4.48)
    soft_BAG = jnp.asarray(np.random.default_rng(0).uniform(size=(2, 3, STEPS)), jnp.float32)
    zero = jnp.zeros_like(soft_BAG)
    terms = losses_lib.SlotTerms(*(soft_BAG if name == "soft_ce" else zero for name in losses_lib.SlotTerms._fields))
    sums = losses_lib.loss_sums(terms, jnp.ones(soft_BAG.shape), settings)
    expected = np.sum(np.asarray(soft_BAG, np.float64) * DECAY ** np.arange(STEPS))
    np.testing.assert_allclose(losses_lib.numerator(sums.terms, settings, losses_lib.Shares()), expected, rtol=1e-3)


def loss(params: Any, golden: Golden) -> tuple[jax.Array, jax.Array]:
    losses = step_losses(params, golden)
    return jnp.sum(losses * jnp.asarray(DECAY ** np.arange(STEPS), jnp.float32)), losses


@functools.cache
def value_and_gradient(golden: Golden) -> Any:
    run = jax.jit(jax.value_and_grad(functools.partial(loss, golden=golden), has_aux=True))
    return jax.device_get(run(golden.drafter.params))


def test_the_loss_of_every_step(golden: Golden) -> None:
    (total, losses), _ = value_and_gradient(golden)
    np.testing.assert_allclose(losses, golden.training["step_losses"], atol=LOSS)
    np.testing.assert_allclose(total, golden.training["loss"], atol=LOSS)


def test_gradients_of_every_trained_tensor(golden: Golden) -> None:
    _, gradients = value_and_gradient(golden)
    expected = {name.removeprefix("grad/"): x for name, x in golden.training.items() if name.startswith("grad/")}
    table = name_table(deepspec_eagle3.TABLE, golden.drafter.config)
    assert table.keys() == expected.keys()
    for name, entry in table.items():
        ours = functools.reduce(lambda tree, key: tree[key], entry.path.split("/"), gradients)
        ours = ours if entry.index is None else ours[entry.index]
        theirs = expected[name].reshape(ours.shape)
        assert np.linalg.norm(ours - theirs) <= GRADIENT * np.linalg.norm(theirs), name
