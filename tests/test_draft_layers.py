"""Draft layers with windows and in-block causality, scaled embeddings and capped logits, in training and decoding."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import block_features, committed, make_drafter, make_target, random_tokens

from dspark_jax import ConfigError, Drafter, SamplingParams
from dspark_jax.config import DraftSettings, RopeScaling, drafter_config
from dspark_jax.drafters import dspark, registry
from dspark_jax.drafters.backbone import layer_rules
from dspark_jax.sampling import sampling_rows
from dspark_jax.weights.drafter_files import check_writable, native_format

TARGET = make_target()
LENGTH, ANCHOR, WINDOW = 12, 7, 5
PLAIN = {"num_layers": 1, "markov_rank": 0, "confidence_head": False, "confidence_with_markov": False}
KINDS = {
    "causal": {"layer_causal": (True,)},
    "both": {"layer_windows": (WINDOW,), "layer_causal": (True,)},
    "narrow": {"layer_windows": (2,)},
}
DRAFTERS = {name: make_drafter(TARGET, **PLAIN, **changes) for name, changes in KINDS.items()}
_propose = jax.jit(dspark.propose, static_argnames=("config", "greedy"))
_commit = jax.jit(dspark.commit, static_argnames="config")


def taps_like(seed: int, rows: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, LENGTH, 2, TARGET.config.d_model)).astype(np.float32)


def law(drafter: Drafter, first: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """What decoding samples a block at ANCHOR from."""
    rows = len(taps)
    caches = registry.init_caches(drafter.config, rows, LENGTH, jnp.float32)
    seen, position = committed(np.zeros((rows, LENGTH), np.int32), taps), np.tile(np.arange(LENGTH), (rows, 1))
    caches = _commit(drafter.config, drafter.params, drafter.frozen, caches, seen, position)
    keys = jax.random.split(jax.random.key(0), (rows, drafter.config.num_drafts))
    anchor, requests = np.full(rows, ANCHOR), sampling_rows([SamplingParams(1.0)] * rows)
    sample = _propose(
        drafter.config, drafter.params, drafter.frozen, caches, first, anchor, keys, requests, False
    ).sample
    return np.asarray(sample.law_RGV)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_sees_its_window_of_the_context(kind):
    """Row p of the batch has another feature at position p; no layer passes anything on, so what moves was seen."""
    drafter = DRAFTERS[kind]
    taps = np.repeat(taps_like(0, 1), LENGTH, axis=0)
    changed = taps + np.eye(LENGTH, dtype=np.float32)[:, :, None, None] * taps_like(1, 1)
    tokens, anchors = np.repeat(random_tokens(2, 1, LENGTH), LENGTH, axis=0), np.full((LENGTH, 1), ANCHOR)
    before, after = (np.asarray(drafter.teacher_forced(tokens, x, anchors).logits_BAGV)[:, 0] for x in (taps, changed))
    position, slot = np.arange(LENGTH)[:, None], np.arange(4)[None, :]
    window = (drafter.config.layer_windows or (0,))[0]
    expected = (position < ANCHOR) & ((position > ANCHOR + slot - window) if window else True)
    np.testing.assert_array_equal(np.any(before != after, axis=-1), np.broadcast_to(expected, (LENGTH, 4)))
    if kind == "both":
        np.testing.assert_allclose(
            law(drafter, tokens[:, ANCHOR], taps), jax.nn.softmax(jnp.asarray(before)), atol=1e-5
        )


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_sees_its_block_as_far_as_the_rule_goes(kind):
    """Every row's own embedding is changed in turn: which rows move."""
    drafter = DRAFTERS[kind]
    taps = jnp.asarray(taps_like(3, 1))
    embedded = np.random.default_rng(4).normal(size=(1, 1, 4, TARGET.config.d_model)).astype(np.float32)

    @jax.jit
    def hidden(rows: jax.Array) -> jax.Array:
        model = dspark.DSparkModel(drafter.config)
        previous = jnp.zeros((1, 1, 4), int)
        out = model.apply({"params": drafter.params}, taps, rows, jnp.array([[ANCHOR]]), previous, None)
        return out[0][0, 0]

    before = np.asarray(hidden(embedded))
    moved = np.stack(
        [np.any(np.asarray(hidden(embedded + np.eye(4)[i][None, None, :, None])) != before, -1) for i in range(4)]
    )
    changed, row = np.arange(4)[:, None], np.arange(4)[None, :]
    expected = changed <= row if drafter.config.layer_causal else np.ones((4, 4), bool)
    window = (drafter.config.layer_windows or (0,))[0]
    if window:
        expected = expected & (np.abs(row - changed) < window)
    np.testing.assert_array_equal(moved, expected)


def test_each_layer_has_its_own_rule():
    rules = layer_rules(make_drafter(TARGET, layer_windows=(3, 0), layer_causal=(True, False)).config)
    assert [(rule.window, rule.causal_block) for rule in rules] == [(3, True), (0, False)]


def test_the_embedding_is_scaled_and_the_head_scaled_and_capped_before_the_markov_bias():
    scaled = make_drafter(TARGET, embed_scale=3.0, logit_scale=0.25, logit_softcap=0.5)
    tokens, taps, anchors = random_tokens(7, 1, LENGTH), taps_like(8, 1), np.array([[ANCHOR]])
    by_hand = scaled.frozen._replace(embed_VD=scaled.frozen.embed_VD * 3.0)
    plain = make_drafter(TARGET)
    features = block_features(plain.config, plain.params, by_hand, tokens, taps, anchors)
    bias = np.asarray(features.latent_BAGR) @ np.asarray(scaled.params["markov"]["w2"]).T
    head = np.asarray(features.hidden_BAGD) @ np.asarray(scaled.frozen.head_VD).T
    logits = scaled.teacher_forced(tokens, taps, anchors).logits_BAGV
    np.testing.assert_allclose(logits, np.tanh(0.25 * head / 0.5) * 0.5 + bias, atol=1e-4)
    assert np.abs(np.asarray(logits) - head - bias).max() > 0.1


GEMMA = {
    "family": "gemma4",
    "value_is_key": True,
    "embed_scale": 32**0.5,
    "logit_softcap": 3.0,
    "rope_theta": 1e3,
    "rope_scaling": RopeScaling("proportional", fraction=0.5),
}


def rms(x: np.ndarray, scale: np.ndarray | float = 1.0) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def turn(x: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Rotary embedding of x [rows, heads, 16]: of its 8 pairs the first 4 turn."""
    frequency = np.where(np.arange(8) < 4, 1e3 ** (-np.arange(8) / 8), 0)
    angle = (position[:, None] * frequency)[:, None]
    first, second = x[..., :8], x[..., 8:]
    return np.concatenate(
        [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)], -1
    )


def gemma_logits(drafter: Drafter, token: int, taps: np.ndarray) -> np.ndarray:
    """A one-layer Gemma drafter's parallel logits after `token` at ANCHOR (spec, drafters 1.1), written out."""
    backbone = jax.tree.map(lambda x: np.asarray(x, np.float64), drafter.params["backbone"])
    w, rows = backbone["layers_0"], np.arange(ANCHOR, ANCHOR + 4)
    context = rms(taps[:ANCHOR].reshape(ANCHOR, -1) @ backbone["fc"].reshape(32, -1).T, backbone["hidden_norm"])
    x = np.asarray(drafter.frozen.embed_VD, np.float64)[[token] + [39] * 3] * np.float32(32**0.5)
    u = rms(x, w["attn_norm"])
    q = turn(rms(np.einsum("nhd,td->tnh", w["q"], u), w["q_norm"]), rows)
    both = np.einsum("khd,td->tkh", w["kv"][0], np.concatenate([context, u]))
    k, v = turn(rms(both, w["k_norm"]), np.arange(ANCHOR + 4)), rms(both)
    k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
    scores = np.exp(np.einsum("tnh,snh->nts", q, k))
    out = np.einsum("nts,snh->tnh", scores / scores.sum(-1, keepdims=True), v)
    x = x + rms(np.einsum("dnh,tnh->td", w["o"], out), w["post_attn_norm"])
    normed = rms(x, w["mlp_norm"])
    gate = normed @ w["gate"].T
    gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    x = x + rms((gate * (normed @ w["up"].T)) @ w["down"].T, w["post_mlp_norm"])
    logits = rms(x * w["layer_scalar"], backbone["norm"]) @ np.asarray(drafter.frozen.head_VD, np.float64).T
    return 3 * np.tanh(logits / 3)


def test_gemma_layers_are_their_formula_in_training_and_decoding():
    drafter = make_drafter(TARGET, **PLAIN, **GEMMA)
    tokens, taps = random_tokens(9, 2, LENGTH), taps_like(10, 2)
    logits = np.asarray(drafter.teacher_forced(tokens, taps, np.full((2, 1), ANCHOR)).logits_BAGV)[:, 0]
    for row in range(2):
        np.testing.assert_allclose(logits[row], gemma_logits(drafter, tokens[row, ANCHOR], taps[row]), atol=2e-4)
    np.testing.assert_allclose(law(drafter, tokens[:, ANCHOR], taps), jax.nn.softmax(jnp.asarray(logits)), atol=1e-5)


def test_a_run_may_say_the_rules_of_each_layer():
    settings = DraftSettings(
        mask_token_id=39, num_layers=2, target_layer_ids=(0,), markov_rank=4, layer_windows=(3, 0),
        layer_causal=(True, False),
    )  # fmt: skip
    made = drafter_config(settings, TARGET.config)
    assert [(rule.window, rule.causal_block) for rule in layer_rules(made)] == [(3, True), (0, False)]
    check_writable(native_format(made), dataclasses.replace(made, layer_causal=(True, True)))
    with pytest.raises(ConfigError, match="only some are causal"):  # before it is trained
        check_writable(native_format(made), made)


@pytest.mark.parametrize("changes", [{"layer_windows": (3,)}, {"layer_causal": (True,)}, {"layer_windows": (3, -1)}])
def test_rules_that_do_not_fit_the_layers_are_refused(changes):
    with pytest.raises(ConfigError, match=next(iter(changes))):
        make_drafter(TARGET, **changes)
