"""Markov heads: the scan of a block and its teacher-forced form are one thing, and each type is its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import block_features, committed, make_drafter, make_target, random_tokens

from dspark_jax import ConfigError, SamplingParams
from dspark_jax.drafters import dspark, registry
from dspark_jax.sampling import sampling_rows

TARGET = make_target()
KINDS = ["vanilla", "gated", "rnn"]
LENGTH, RANK, WIDTH = 10, 6, TARGET.config.d_model
PLAIN = {"num_layers": 1, "markov_rank": RANK}
DRAFTERS = {kind: make_drafter(TARGET, markov_head_type=kind, **PLAIN) for kind in KINDS}
_propose = jax.jit(dspark.propose, static_argnames=("config", "greedy"))
_commit = jax.jit(dspark.commit, static_argnames="config")


def taps_like(seed: int, rows: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, LENGTH, 2, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_a_sampled_block_has_the_law_of_the_same_block_teacher_forced(kind):
    drafter, rows = DRAFTERS[kind], 3
    tokens, taps, anchor = random_tokens(0, rows, LENGTH), taps_like(1, rows), np.array([2, 5, 4])
    caches = registry.init_caches(drafter.config, rows, LENGTH, jnp.float32)
    seen, position = committed(np.zeros((rows, LENGTH), np.int32), taps), np.tile(np.arange(LENGTH), (rows, 1))
    caches = _commit(drafter.config, drafter.params, drafter.frozen, caches, seen, position)
    keys = jax.random.split(jax.random.key(0), (rows, 4))
    first, requests = tokens[np.arange(rows), anchor], sampling_rows([SamplingParams(1.0)] * rows)
    proposal = _propose(drafter.config, drafter.params, drafter.frozen, caches, first, anchor, keys, requests, False)
    for row in range(rows):
        tokens[row, anchor[row] + 1 : anchor[row] + 5] = proposal.sample.tokens_RG[row]
    out = drafter.teacher_forced(tokens, taps, anchor[:, None])
    np.testing.assert_allclose(proposal.sample.law_RGV, jax.nn.softmax(out.logits_BAGV[:, 0]), atol=1e-5)
    assert proposal.confidence_RG is not None
    assert out.confidence_BAG is not None
    np.testing.assert_allclose(proposal.confidence_RG, out.confidence_BAG[:, 0], atol=1e-5)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def biases(kind: str, weights: dict[str, np.ndarray], hidden_GD: np.ndarray, previous_G: np.ndarray) -> np.ndarray:
    """The published formulas, slot by slot (spec, drafters 1.9)."""
    rows, state = [], np.zeros(RANK)
    for h, token in zip(hidden_GD, previous_G, strict=True):
        e = weights["w1"][token]
        if kind == "vanilla":
            latent = e
        elif kind == "gated":
            latent = sigmoid(weights["gate"] @ np.concatenate([h, e]) + weights["gate_bias"]) * e
        else:
            joint = weights["joint"] @ np.concatenate([state, e, h]) + weights["joint_bias"]
            gate, candidate, out = joint[:RANK], joint[RANK : 2 * RANK], joint[2 * RANK :]
            latent = np.tanh(out)  # from the old state
            state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
        rows.append(weights["w2"] @ latent)
    return np.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_each_type_is_its_formula(kind):
    drafter = DRAFTERS[kind]
    tokens, taps, anchors = random_tokens(2, 1, LENGTH), taps_like(3, 1), np.array([[3]])
    features = block_features(drafter.config, drafter.params, drafter.frozen, tokens, taps, anchors)
    hidden = np.asarray(features.hidden_BAGD)[0, 0]
    weights = {name: np.asarray(x, np.float64) for name, x in drafter.params["markov"].items()}
    expected = hidden @ np.asarray(drafter.frozen.head_VD).T + biases(kind, weights, hidden, tokens[0, 3:7])
    np.testing.assert_allclose(drafter.teacher_forced(tokens, taps, anchors).logits_BAGV[0, 0], expected, atol=1e-4)


def test_what_a_slot_knows_of_the_block():
    """Another token at one place of the block: the rnn carries it to every later slot, the others to the next one."""
    tokens, taps = np.repeat(random_tokens(4, 1, LENGTH), 4, axis=0), np.repeat(taps_like(5, 1), 4, axis=0)
    changed = tokens.copy()
    for row in range(1, 4):
        changed[row, 2 + row] = (changed[row, 2 + row] + 1) % 40
    anchors = np.full((4, 1), 2)
    for kind in KINDS:
        before, after = (
            np.asarray(DRAFTERS[kind].teacher_forced(x, taps, anchors).logits_BAGV) for x in (tokens, changed)
        )
        moved = np.any(before != after, axis=-1)[:, 0]
        slots, place = np.arange(4)[None, :], np.arange(4)[:, None]
        expected = (slots >= place) if kind == "rnn" else (slots == place)
        np.testing.assert_array_equal(moved, expected & (place > 0))


def test_the_gates_weights_have_the_published_shapes():
    for kind, names in (
        ("gated", {"gate": (6, 38), "gate_bias": (6,)}),
        ("rnn", {"joint": (18, 44), "joint_bias": (18,)}),
    ):
        shapes = {name: leaf.shape for name, leaf in DRAFTERS[kind].params["markov"].items()}
        assert shapes == names | {"w1": (40, 6), "w2": (40, 6)}


@pytest.mark.parametrize("changes", [{"markov_head_type": "lstm"}, {"markov_rank": 0, "markov_head_type": "rnn"}])
def test_settings_of_no_head_are_refused(changes):
    plain = {"confidence_with_markov": False}
    with pytest.raises(ConfigError, match="markov_head_type"):
        make_drafter(TARGET, **(plain | changes))
