"""DFlash 2: convolutions inside their block, a selector on K candidates, one network in training and decoding.

Nearly every call has the same shapes, LENGTH rows of LENGTH tokens with three anchors: few programs to compile.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import DFLASH2, committed, make_drafter, make_target, random_tokens

from dspark_jax import ConfigError, Drafter, SamplingParams, sharding
from dspark_jax.drafters import dflash2, dspark, registry
from dspark_jax.drafters.base import NEVER, DraftOutput, Proposal
from dspark_jax.drafters.conv import BlockConv
from dspark_jax.drafters.drafter import servable
from dspark_jax.kv_cache import LayerCache
from dspark_jax.sampling import sampling_rows

TARGET = make_target()
LENGTH, WINDOW, TOP = 12, 5, DFLASH2["selector_top_k"]
FEW_IDS = np.array([1, 4, 5, 9, 11, 17, 20, 33])
RELEASED = DFLASH2 | {"layout": "fill_in", "block_size": 5, "num_layers": 1, "layer_windows": (WINDOW,)}
DRAFTERS = {
    "fill_in": make_drafter(TARGET, **RELEASED),
    "anchor_first": make_drafter(TARGET, **DFLASH2 | {"confidence_head": True, "selector_tied": True}),
    "reduced": make_drafter(TARGET, draft_to_target=FEW_IDS, **DFLASH2 | {"selector_tied": True, "num_layers": 1}),
}
ANCHORS = np.tile([3, 0, 6], (LENGTH, 1))
CLOSE = 1e-5
_propose = jax.jit(dflash2.propose, static_argnames=("config", "greedy", "shortlist"))
_commit = jax.jit(dflash2.commit, static_argnames="config")


@pytest.fixture(params=DRAFTERS)
def drafter(request: pytest.FixtureRequest) -> Drafter:
    return DRAFTERS[request.param]


def taps_like(seed: int, rows: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, LENGTH, 2, TARGET.config.d_model)).astype(np.float32)


def context(drafter: Drafter, taps: np.ndarray) -> list[LayerCache]:
    caches = registry.init_caches(drafter.config, len(taps), LENGTH, jnp.float32)
    seen, position = committed(np.zeros(taps.shape[:2], np.int32), taps), np.tile(np.arange(LENGTH), (len(taps), 1))
    return _commit(drafter.config, drafter.params, drafter.frozen, caches, seen, position)


def propose(
    drafter: Drafter, taps: np.ndarray, first: np.ndarray, anchor: np.ndarray, greedy: bool = False, shortlist: int = 0
) -> Proposal:
    keys = jax.random.split(jax.random.key(0), (LENGTH, drafter.config.num_drafts))
    rows, caches = sampling_rows([SamplingParams(1.0)] * LENGTH), context(drafter, taps)
    given = (drafter.config, drafter.params, drafter.frozen, caches, first, anchor, keys, rows)
    return _propose(*given, greedy=greedy, shortlist=shortlist)


# -- the formula -----------------------------------------------------------------------------------------------------


def rms(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def turn(x: np.ndarray, position: np.ndarray) -> np.ndarray:
    angle = (position[:, None] * 1e4 ** (-np.arange(8) / 8))[:, None]
    first, second = x[..., :8], x[..., 8:]
    parts = [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)]
    return np.concatenate(parts, -1)


def convolve(weights: dict[str, np.ndarray], read: np.ndarray, x: np.ndarray, side: int) -> np.ndarray:
    """Rows x of one block with the coefficients of the sublayer's input, number by number."""
    out = np.zeros_like(x)
    for t in range(len(x)):
        for c in range(x.shape[1]):
            for tap in range(2):
                dynamic = weights["kernel_projection"][side, tap, c // 8] @ read[t]
                before = x[t - tap, c] if t >= tap else 0.0
                out[t, c] += (weights["base_kernel"][side, tap, c] + dynamic) * before
    return out


def formula(drafter: Drafter, text: np.ndarray, taps: np.ndarray, anchor: int) -> np.ndarray:
    """Logits [G, V] of a one-layer fill_in drafter along a text (spec, drafters 1.1 and 2), in float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), drafter.params)
    backbone, selector = params["backbone"], params["selector"]
    w, rows = backbone["layers_0"], np.arange(anchor, anchor + 5)
    seen = rms(taps[:anchor].reshape(anchor, 64) @ backbone["fc"].reshape(32, -1).T, backbone["hidden_norm"])
    x = np.asarray(drafter.frozen.embed_VD, np.float64)[[text[anchor]] + [39] * 4]
    u = rms(x, w["attn_norm"])
    y = convolve(w["attention_conv"], u, u, 0)
    q = turn(rms(np.einsum("nhd,td->tnh", w["q"], y), w["q_norm"]), rows)
    k, v = (np.einsum("khd,td->tkh", w["kv"][i], np.concatenate([seen, y])) for i in (0, 1))
    position = np.arange(anchor + 5)
    k, v = np.repeat(turn(rms(k, w["k_norm"]), position), 2, axis=1), np.repeat(v, 2, axis=1)
    scores = np.exp(np.einsum("tnh,snh->nts", q, k) / 4)
    scores *= np.abs(position[None, :] - rows[:, None])[None] < WINDOW
    out = np.einsum("nts,snh->tnh", scores / scores.sum(-1, keepdims=True), v)
    x = x + convolve(w["attention_conv"], u, np.einsum("dnh,tnh->td", w["o"], out), 1)
    u = rms(x, w["mlp_norm"])
    y = convolve(w["mlp_conv"], u, u, 0)
    gate = y @ w["gate"].T
    x = x + convolve(w["mlp_conv"], u, (gate / (1 + np.exp(-gate)) * (y @ w["up"].T)) @ w["down"].T, 1)
    hidden = rms(x, backbone["norm"])[1:]
    logits = np.full((4, 40), NEVER)
    for slot, (h, u) in enumerate(zip(hidden, hidden @ np.asarray(drafter.frozen.head_VD, np.float64).T, strict=True)):
        query = selector["predecessor"][text[anchor + slot]] * (selector["hidden_projection"] @ h)
        for token in np.argsort(-u)[:TOP]:
            logits[slot, token] = u[token] + query @ selector["successor"][token]
    return logits


def test_the_network_is_its_formula() -> None:
    drafter, tokens, taps = DRAFTERS["fill_in"], random_tokens(0, LENGTH, LENGTH), taps_like(1)
    logits = np.asarray(drafter.teacher_forced(tokens, taps, ANCHORS).logits_BAGV)
    for row in range(2):
        for block, anchor in enumerate(ANCHORS[0]):
            expected = formula(drafter, tokens[row], taps[row], anchor)
            np.testing.assert_array_equal(logits[row, block] == np.float32(NEVER), expected == NEVER)
            np.testing.assert_allclose(logits[row, block], expected, rtol=1e-4, atol=1e-4)


def test_a_convolution_stays_inside_its_block_and_looks_back_only() -> None:
    """Each row of one of three packed blocks is changed in turn: both sides together reach two rows further."""
    config = DRAFTERS["fill_in"].config
    params = DRAFTERS["fill_in"].params["backbone"]["layers_0"]["mlp_conv"]
    x = np.random.default_rng(2).normal(size=(1, 3, 5, 32)).astype(np.float32)

    @jax.jit
    def around(x: jax.Array) -> jax.Array:
        return BlockConv(config).apply({"params": params}, x, lambda rows: rows)  # type: ignore[return-value]

    before = np.asarray(around(x))
    for row in range(5):
        changed = x.copy()
        changed[0, 1, row] += 1
        moved = np.any(np.asarray(around(changed)) != before, axis=-1)[0]
        expected = np.zeros((3, 5), bool)
        expected[1, row : row + 3] = True
        np.testing.assert_array_equal(moved, expected)


# -- training and decoding are one drafter -----------------------------------------------------------------------------


def test_a_sampled_block_has_the_law_of_the_same_block_teacher_forced(drafter: Drafter) -> None:
    tokens, taps, drafts = random_tokens(3, LENGTH, LENGTH), taps_like(4), drafter.config.num_drafts
    anchor = np.arange(LENGTH) % (LENGTH - drafts)
    proposal = propose(drafter, taps, tokens[np.arange(LENGTH), anchor], anchor)
    sample = proposal.sample
    for row in range(LENGTH):
        tokens[row, anchor[row] + 1 : anchor[row] + 1 + drafts] = sample.tokens_RG[row]
    out = drafter.teacher_forced(tokens, taps, np.stack([anchor] * 3, axis=1))
    law = np.asarray(jax.nn.softmax(out.logits_BAGV[:, 1]))
    ids = np.arange(40) if drafter.frozen.draft_to_target_V is None else FEW_IDS
    assert sample.support_RGK is not None and sample.support_RGK.shape == (LENGTH, drafts, TOP)
    drawn = np.zeros((LENGTH, drafts, 40), np.float32)
    np.put_along_axis(drawn, np.asarray(sample.support_RGK), np.asarray(sample.law_RGV), axis=-1)
    np.testing.assert_allclose(drawn[..., ids], law, atol=CLOSE)
    assert ((law > 0).sum(-1) <= TOP).all()
    if drafter.config.confidence_head:
        assert proposal.confidence_RG is not None and out.confidence_BAG is not None
        np.testing.assert_allclose(proposal.confidence_RG, out.confidence_BAG[:, 1], rtol=1e-5, atol=CLOSE)
    else:
        assert proposal.confidence_RG is out.confidence_BAG is None


def test_a_greedy_block_is_the_argmax_of_the_same_block_teacher_forced() -> None:
    drafter, tokens, taps = DRAFTERS["reduced"], random_tokens(5, LENGTH, LENGTH), taps_like(6)
    anchor = np.arange(LENGTH) % 8
    sample = propose(drafter, taps, tokens[np.arange(LENGTH), anchor], anchor, greedy=True).sample
    for row in range(LENGTH):
        tokens[row, anchor[row] + 1 : anchor[row] + 5] = sample.tokens_RG[row]
    logits = np.asarray(drafter.teacher_forced(tokens, taps, np.stack([anchor] * 3, axis=1)).logits_BAGV)[:, 1]
    np.testing.assert_array_equal(sample.tokens_RG, FEW_IDS[logits.argmax(axis=-1)])


def test_a_shorter_shortlist_leaves_out_the_lowest_candidates() -> None:
    drafter, taps = DRAFTERS["fill_in"], taps_like(7)
    first, anchor = random_tokens(8, LENGTH), np.full(LENGTH, 6)
    whole, few, many = (propose(drafter, taps, first, anchor, shortlist=size).sample for size in (0, 3, 32))
    np.testing.assert_array_equal(few.support_RGK, whole.support_RGK[..., :3])
    kept = np.asarray(whole.law_RGV)[:, 0, :3]  # later slots follow other drafts
    np.testing.assert_allclose(few.law_RGV[:, 0], kept / kept.sum(-1, keepdims=True), atol=CLOSE)
    jax.tree.map(np.testing.assert_array_equal, many, whole)


def changed_slots(before: DraftOutput, after: DraftOutput) -> np.ndarray:
    """Which slots [B, A, G] differ at all, in their logits or in their confidence."""
    moved = np.any(np.asarray(before.logits_BAGV) != np.asarray(after.logits_BAGV), axis=-1)
    if before.confidence_BAG is not None:
        moved |= np.asarray(before.confidence_BAG) != np.asarray(after.confidence_BAG)
    return moved


@pytest.mark.parametrize("name", ["fill_in", "anchor_first"])
def test_a_slot_sees_the_anchor_the_token_before_it_and_features_before_the_anchor(name: str) -> None:
    """Row p of the batch has another token, then another feature, at position p: the exact map of what is seen."""
    drafter = DRAFTERS[name]
    tokens, taps = np.repeat(random_tokens(9, 1, LENGTH), LENGTH, axis=0), np.repeat(taps_like(10, 1), LENGTH, axis=0)
    plain, slots, place = drafter.teacher_forced(tokens, taps, ANCHORS), np.arange(4), np.arange(LENGTH)
    other = (tokens + np.eye(LENGTH, dtype=np.int32)) % 40
    moved = changed_slots(plain, drafter.teacher_forced(other, taps, ANCHORS))
    for block, anchor in enumerate(ANCHORS[0]):
        expected = np.zeros((LENGTH, 4), bool)
        expected[anchor], expected[anchor + slots, slots] = True, True
        np.testing.assert_array_equal(moved[:, block], expected)
    features = taps + np.eye(LENGTH, dtype=np.float32)[:, :, None, None] * taps_like(11, 1)
    moved = changed_slots(plain, drafter.teacher_forced(tokens, features, ANCHORS))
    place, anchor = place[:, None, None], ANCHORS[0][None, :, None]
    seen = place < anchor
    if drafter.config.layer_windows:
        # Three convolutions lie behind attention: a draft in row s + 1 takes up what rows s - 2 to s + 1 attended to.
        seen = seen & (place > anchor + np.maximum(slots - 2, 0) - WINDOW)
    np.testing.assert_array_equal(moved, np.broadcast_to(seen, moved.shape))


def test_blocks_of_one_sequence_do_not_see_each_other(drafter: Drafter) -> None:
    tokens, taps = random_tokens(12, LENGTH, LENGTH), taps_like(13)
    together = drafter.teacher_forced(tokens, taps, ANCHORS)
    for block, anchor in enumerate(ANCHORS[0]):
        alone = drafter.teacher_forced(tokens, taps, np.full_like(ANCHORS, anchor))
        np.testing.assert_allclose(together.logits_BAGV[:, block], alone.logits_BAGV[:, 0], atol=CLOSE)


def test_the_layers_as_one_loop_compute_the_same() -> None:
    drafter, tokens, taps = DRAFTERS["anchor_first"], random_tokens(14, 2, LENGTH), taps_like(15, 2)
    config, params, frozen = drafter.config, drafter.params, drafter.frozen

    def hidden(scan_layers: bool) -> jax.Array:
        start = jnp.zeros((2, LENGTH), jnp.int32)
        rows = dflash2.context_rows(config, params, frozen, committed(tokens, taps), start, scan_layers)
        return dflash2.teacher_forced_blocks(config, params, frozen, tokens, rows, ANCHORS[:2]).hidden_BAGD

    unrolled, looped = (jax.jit(hidden, static_argnums=0)(scan) for scan in (False, True))
    np.testing.assert_allclose(looped, unrolled, atol=CLOSE)


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_a_fresh_drafter_is_dflash_on_its_candidates(tied: bool) -> None:
    config = dataclasses.replace(DRAFTERS["anchor_first"].config, confidence_head=False, selector_tied=tied)
    params = jax.jit(dflash2.init_params, static_argnums=0)(config, jax.random.key(0))
    plain = dataclasses.replace(
        config, algorithm="dspark", conv_group_size=0, selector_rank=0, selector_top_k=0, selector_tied=False
    )
    backbone = {
        name: {part: leaf for part, leaf in node.items() if "conv" not in part} if "layers" in name else node
        for name, node in params["backbone"].items()
    }
    tokens, taps = random_tokens(16, LENGTH, LENGTH), taps_like(17)
    frozen = DRAFTERS["anchor_first"].frozen
    expected = Drafter(plain, {"backbone": backbone}, frozen).teacher_forced(tokens, taps, ANCHORS).logits_BAGV
    logits = Drafter(config, params, frozen).teacher_forced(tokens, taps, ANCHORS).logits_BAGV
    best = np.argsort(-np.asarray(expected), axis=-1)[..., :TOP]
    there = np.zeros(logits.shape, bool)
    np.put_along_axis(there, best, True, axis=-1)
    np.testing.assert_allclose(logits, np.where(there, expected, NEVER), atol=CLOSE)


@pytest.mark.parametrize("name", ["anchor_first", "reduced"])
def test_tied_codebooks_are_served_as_tables(name: str) -> None:
    drafter = DRAFTERS[name]
    served = servable(drafter.config, drafter.params, drafter.frozen)
    rows = drafter.config.head_rows
    shapes = {part: leaf.shape for part, leaf in served.params["selector"].items()}
    assert shapes == {"hidden_projection": (6, 32), "predecessor": (40, 6), "successor": (rows, 6)}
    fresh = jax.eval_shape(lambda: dflash2.init_params(served.config, jax.random.key(0)))
    assert jax.tree.map(jnp.shape, served.params) == jax.tree.map(jnp.shape, fresh)
    tokens, taps = random_tokens(18, LENGTH, LENGTH), taps_like(19)
    tied, table = (one.teacher_forced(tokens, taps, ANCHORS).logits_BAGV for one in (drafter, served))
    np.testing.assert_allclose(table, tied, rtol=1e-5, atol=CLOSE)


def test_every_weight_has_its_place_on_a_mesh() -> None:
    for drafter in DRAFTERS.values():
        for path, leaf in jax.tree_util.tree_leaves_with_path(drafter.params):
            assert len(sharding.spec(sharding.path_string(path), leaf.ndim)) == leaf.ndim


# -- what is learnt ----------------------------------------------------------------------------------------------------


def test_the_labels_cross_entropy_is_over_the_candidates_with_the_label_among_them() -> None:
    """A label that is no candidate takes the place of the last one."""
    drafter, rng = DRAFTERS["reduced"], np.random.default_rng(20)
    config, params, frozen = drafter.config, drafter.params, drafter.frozen
    hidden = rng.normal(size=(2, 3, 4, 32)).astype(np.float32)
    latent = rng.normal(size=(2, 3, 4, 6)).astype(np.float32)
    labels = rng.integers(0, len(FEW_IDS), (2, 3, 4))
    scores = jax.jit(dflash2.label_scores, static_argnums=0)
    logits, ce = (np.asarray(x) for x in scores(config, params, frozen, hidden, latent, labels))
    np.testing.assert_array_equal(logits, dflash2.draft_logits(config, params, frozen, hidden, latent))
    parallel = hidden @ np.asarray(frozen.head_VD).T
    codes = np.asarray(frozen.embed_VD)[FEW_IDS] @ np.asarray(params["selector"]["successor_projection"]).T
    outside = 0
    for place in np.ndindex(labels.shape):
        ranked = np.argsort(-parallel[place])[:TOP].tolist()
        if labels[place] not in ranked:
            ranked[-1], outside = labels[place], outside + 1
        exact = parallel[place] + codes @ latent[place]
        expected = np.log(np.exp(exact[ranked]).sum()) - exact[labels[place]]
        np.testing.assert_allclose(ce[place], expected, rtol=1e-4, atol=1e-5)
    assert 0 < outside < labels.size


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_group_size": 0}, "conv_group_size = 0: expected a divisor of d_model = 32"),
        ({"conv_group_size": 5}, "conv_group_size = 5: expected a divisor"),
        ({"selector_rank": 0}, "selector_rank = 0"),
        ({"selector_top_k": 0}, "selector_top_k = 0: expected 1 to 40"),
        ({"selector_top_k": 41}, "selector_top_k = 41: expected 1 to 40"),
        ({"markov_rank": 4}, "markov_rank = 4: not a setting of dflash2"),
        ({"family": "gemma4"}, "family = 'gemma4': dflash2 has 'qwen3' and nothing else"),
        ({"algorithm": "dspark"}, "conv_group_size = 8: not a setting of dspark"),
    ],
)
def test_settings_that_make_no_drafter_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_drafter(TARGET, **DFLASH2 | changes)


def test_a_selector_is_no_table_of_transitions() -> None:
    with pytest.raises(ConfigError, match="is not a table of transitions"):
        dspark.transition_table(DRAFTERS["fill_in"].config, DRAFTERS["fill_in"].params)
