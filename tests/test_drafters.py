"""The drafter: what each slot may see, and that training and decoding are one network, under both layouts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import make_drafter, make_target, random_tokens

from dspark_jax import ConfigError, Drafter, SamplingParams
from dspark_jax.drafters import dspark
from dspark_jax.sampling import sampling_rows

TARGET = make_target()
LENGTH = 12
FEW_IDS = np.array([1, 4, 5, 9, 11, 17, 20, 33])
DRAFTERS = {
    "anchor_first": make_drafter(TARGET),
    "fill_in": make_drafter(TARGET, layout="fill_in", block_size=5),
    "reduced": make_drafter(TARGET, draft_to_target=FEW_IDS, confidence_with_markov=False),
    "dflash": make_drafter(TARGET, markov_rank=0, confidence_head=False, confidence_with_markov=False),
}
G = 4
CLOSE = 1e-5
_propose = jax.jit(dspark.propose, static_argnames=("config", "greedy"))
_commit = jax.jit(dspark.commit, static_argnames="config")


@pytest.fixture(params=DRAFTERS)
def drafter(request) -> Drafter:
    return DRAFTERS[request.param]


def random_taps(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(*shape, 2, TARGET.config.d_model)).astype(np.float32)


def commit(drafter: Drafter, caches: list, taps: np.ndarray, start: np.ndarray) -> list:
    position = start[:, None] + np.arange(taps.shape[1])[None, :]
    return _commit(drafter.config, drafter.params, caches, taps, position)


def empty(drafter: Drafter, batch: int = 2) -> list:
    return dspark.init_caches(drafter.config, batch, LENGTH + 4, jnp.float32)


@pytest.mark.parametrize("greedy", [True, False])
def test_a_sampled_block_has_the_logits_of_the_same_block_teacher_forced(drafter, greedy):
    """Context caches filled as in decoding, rows at unequal depths; then the whole text through the training path."""
    tokens, taps, anchor = random_tokens(0, 2, LENGTH), random_taps(1, 2, LENGTH), np.array([2, 7])
    first = tokens[np.arange(2), anchor]
    caches = commit(drafter, empty(drafter), taps, np.zeros(2, int))
    keys, rows = jax.random.split(jax.random.key(0), (2, G)), sampling_rows([SamplingParams(1.0)] * 2)
    proposal = _propose(drafter.config, drafter.params, drafter.frozen, caches, first, anchor, keys, rows, greedy)
    drafts = np.asarray(proposal.sample.tokens_RG)
    for row in range(2):
        tokens[row, anchor[row] + 1 : anchor[row] + 1 + G] = drafts[row]
    out = drafter.teacher_forced(tokens, taps, anchor[:, None])
    logits = np.asarray(out.logits_BAGV)[:, 0]
    if greedy:
        np.testing.assert_array_equal(proposal.sample.draft_ids_RG, logits.argmax(axis=-1))
        assert proposal.sample.law_RGV is None
    else:
        np.testing.assert_allclose(proposal.sample.law_RGV, jax.nn.softmax(jnp.asarray(logits)), atol=CLOSE)
    ids = np.arange(40) if drafter.frozen.draft_to_target_V is None else FEW_IDS
    assert logits.shape == (2, G, len(ids))
    np.testing.assert_array_equal(drafts, ids[proposal.sample.draft_ids_RG])
    if drafter.config.confidence_head:
        np.testing.assert_allclose(proposal.confidence_RG, out.confidence_BAG[:, 0], atol=CLOSE)
    else:
        assert proposal.confidence_RG is None
        assert out.confidence_BAG is None


def changed_slots(before: dspark.DraftOutput, after: dspark.DraftOutput) -> np.ndarray:
    """Which slots [B, G] of block 0 differ at all, in their logits or in their confidence."""
    moved = np.any(np.asarray(before.logits_BAGV != after.logits_BAGV), axis=-1)[:, 0]
    if before.confidence_BAG is not None:
        moved |= np.asarray(before.confidence_BAG != after.confidence_BAG)[:, 0]
    return moved


def test_a_slot_sees_the_anchor_and_the_token_before_it_and_no_other_token(drafter):
    """Row p of the batch has another token at position p and nothing else changed: the exact map of what is seen."""
    anchor = 3
    tokens = np.repeat(random_tokens(2, 1, LENGTH), LENGTH, axis=0)
    taps = np.repeat(random_taps(3, 1, LENGTH), LENGTH, axis=0)
    changed = (tokens + np.eye(LENGTH, dtype=np.int32)) % TARGET.config.vocab_size
    anchors = np.full((LENGTH, 1), anchor)
    moved = changed_slots(*(drafter.teacher_forced(rows, taps, anchors) for rows in (tokens, changed)))
    expected = np.zeros((LENGTH, G), bool)
    expected[anchor] = True
    if drafter.config.markov_rank:
        expected[anchor + np.arange(G), np.arange(G)] = True
    np.testing.assert_array_equal(moved, expected)


def test_a_block_sees_the_features_before_its_anchor_and_no_others(drafter):
    """The anchor's own feature does not exist when the block is drafted."""
    anchor = 3
    tokens = np.repeat(random_tokens(4, 1, LENGTH), LENGTH, axis=0)
    taps = np.repeat(random_taps(5, 1, LENGTH), LENGTH, axis=0)
    changed = taps + np.eye(LENGTH, dtype=np.float32)[:, :, None, None] * random_taps(6, 1, 1)
    anchors = np.full((LENGTH, 1), anchor)
    moved = changed_slots(*(drafter.teacher_forced(tokens, rows, anchors) for rows in (taps, changed)))
    np.testing.assert_array_equal(moved, np.repeat(np.arange(LENGTH)[:, None] < anchor, G, axis=1))


def test_gradients_reach_the_features_before_the_anchor_alone():
    drafter, anchor = DRAFTERS["anchor_first"], 5
    tokens, anchors = random_tokens(7, 1, LENGTH), jnp.array([[anchor]])

    @jax.jit
    @jax.grad
    def gradient(taps):
        out = dspark.teacher_forced(drafter.config, drafter.params, drafter.frozen, tokens, taps, anchors)
        return jnp.sum(out.logits_BAGV**2) + jnp.sum(out.confidence_BAG**2)

    size = np.abs(gradient(random_taps(8, 1, LENGTH))).max(axis=(0, 2, 3))
    assert (size[:anchor] > 0).all()
    assert (size[anchor:] == 0).all()


def test_blocks_of_one_sequence_do_not_see_each_other(drafter):
    tokens, taps = random_tokens(9, 1, LENGTH), random_taps(10, 1, LENGTH)
    together = drafter.teacher_forced(tokens, taps, np.array([[0, 4, 6]]))
    for block, anchor in enumerate((0, 4, 6)):
        alone = drafter.teacher_forced(tokens, taps, np.array([[anchor] * 3]))
        np.testing.assert_allclose(together.logits_BAGV[:, block], alone.logits_BAGV[:, 0], atol=CLOSE)


def test_fillers_change_no_other_block_and_stay_finite():
    drafter = DRAFTERS["anchor_first"]
    tokens, taps = random_tokens(11, 2, LENGTH), random_taps(12, 2, LENGTH)
    anchors, keep = np.array([[2, 5, 0], [1, 999, -7]]), np.array([[True, True, False], [True, False, False]])
    out, plain = drafter.teacher_forced(tokens, taps, anchors, keep), drafter.teacher_forced(tokens, taps, anchors)
    np.testing.assert_array_equal(out.logits_BAGV[keep], plain.logits_BAGV[keep])
    assert np.isfinite(out.logits_BAGV).all()
    assert np.isfinite(out.confidence_BAG).all()


def test_fill_in_reads_the_rows_behind_the_anchors_own():
    """The same network, rows and weights: only which row is the draft of which position differs."""
    weights = DRAFTERS["dflash"]
    drafters = [
        Drafter(dataclasses.replace(weights.config, block_size=5, layout=layout), weights.params, weights.frozen)
        for layout in ("anchor_first", "fill_in")
    ]
    tokens, taps, anchors = random_tokens(13, 1, LENGTH), random_taps(14, 1, LENGTH), np.array([[1, 6]])
    every_row, behind = (drafter.teacher_forced(tokens, taps, anchors).logits_BAGV for drafter in drafters)
    assert every_row.shape[2] == 5
    assert behind.shape[2] == G
    np.testing.assert_allclose(behind, every_row[:, :, 1:], atol=CLOSE)


def test_features_committed_in_pieces_are_features_committed_at_once():
    drafter = DRAFTERS["anchor_first"]
    taps = random_taps(15, 2, LENGTH)
    whole = commit(drafter, empty(drafter), taps, np.zeros(2, int))
    caches = empty(drafter)
    for start in range(0, LENGTH, 4):
        caches = commit(drafter, caches, taps[:, start : start + 4], np.full(2, start))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=CLOSE), caches, whole)


def test_rejected_features_are_unseen_and_then_overwritten():
    drafter = DRAFTERS["anchor_first"]
    taps, rejected = random_taps(16, 2, LENGTH), random_taps(17, 2, 4)
    start = np.array([4, 6])
    clean = commit(drafter, empty(drafter), taps, np.zeros(2, int))
    dirty = commit(drafter, clean, rejected, start)
    first, keys = np.array([3, 8]), jax.random.split(jax.random.key(0), (2, G))
    rows = sampling_rows([SamplingParams(1.0)] * 2)
    seen = [
        _propose(drafter.config, drafter.params, drafter.frozen, caches, first, start, keys, rows, False)
        for caches in (clean, dirty)
    ]
    jax.tree.map(np.testing.assert_array_equal, *seen)
    pieces = np.stack([row[s : s + 4] for row, s in zip(taps, start, strict=True)])
    repaired = commit(drafter, dirty, pieces, start)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=CLOSE), repaired, clean)


def test_fresh_weights_are_deepspecs():
    config = dataclasses.replace(DRAFTERS["anchor_first"].config, d_model=64, vocab_size=200)
    params = jax.jit(dspark.init_params, static_argnums=0)(config, jax.random.key(0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        assert leaf.dtype == jnp.float32
        if "norm" in name:
            np.testing.assert_array_equal(leaf, 1)
        elif "bias" in name:
            np.testing.assert_array_equal(leaf, 0)
        else:
            assert abs(leaf.mean()) < 0.02 * 5 / leaf.size**0.5, name
            assert abs(leaf.std() / 0.02 - 1) < 5 / (2 * leaf.size) ** 0.5, name


def test_features_of_another_shape_are_refused():
    drafter = DRAFTERS["anchor_first"]
    with pytest.raises(ConfigError, match=r"\(1, 12, 3, 32\)"):
        drafter.teacher_forced(random_tokens(0, 1, LENGTH), np.zeros((1, LENGTH, 3, 32), np.float32), np.array([[1]]))
