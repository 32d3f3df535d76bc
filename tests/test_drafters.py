"""The drafter: what each slot may see, and that training and decoding are one network, under both layouts.

Nearly every call has the same shapes, LENGTH rows of LENGTH tokens with three anchors: few programs to compile.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import committed, make_drafter, make_target, random_tokens

from dspark_jax import ConfigError, Drafter, SamplingParams
from dspark_jax.drafters import dspark, registry
from dspark_jax.drafters.base import DraftOutput, Proposal
from dspark_jax.kv_cache import LayerCache
from dspark_jax.sampling import sampling_rows

TARGET = make_target()
LENGTH = 12
FEW_IDS = np.array([1, 4, 5, 9, 11, 17, 20, 33])
DRAFTERS = {
    "anchor_first": make_drafter(TARGET),
    "fill_in": make_drafter(TARGET, layout="fill_in", block_size=5, num_layers=1),
    "reduced": make_drafter(TARGET, draft_to_target=FEW_IDS, confidence_with_markov=False, num_layers=1),
    "dflash": make_drafter(TARGET, markov_rank=0, confidence_head=False, confidence_with_markov=False, num_layers=1),
}
ANCHORS = np.tile([3, 0, 6], (LENGTH, 1))
CLOSE = 1e-5
_propose = jax.jit(dspark.propose, static_argnames=("config", "greedy"))
_commit = jax.jit(dspark.commit, static_argnames="config")


@pytest.fixture(params=DRAFTERS)
def drafter(request) -> Drafter:
    return DRAFTERS[request.param]


def taps_like(seed: int, rows: int = LENGTH, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, length, 2, TARGET.config.d_model)).astype(np.float32)


def commit(drafter: Drafter, caches: list[LayerCache], taps: np.ndarray, start: np.ndarray) -> list[LayerCache]:
    position = start[:, None] + np.arange(taps.shape[1])[None, :]
    seen = committed(np.zeros(taps.shape[:2], np.int32), taps)
    return _commit(drafter.config, drafter.params, drafter.frozen, caches, seen, position)


def empty(drafter: Drafter) -> list[LayerCache]:
    return registry.init_caches(drafter.config, LENGTH, LENGTH + 4, jnp.float32)


def propose(
    drafter: Drafter, caches: list[LayerCache], first: np.ndarray, anchor: np.ndarray, greedy: bool = False
) -> Proposal:
    keys = jax.random.split(jax.random.key(0), (LENGTH, drafter.config.num_drafts))
    rows = sampling_rows([SamplingParams(1.0)] * LENGTH)
    return _propose(drafter.config, drafter.params, drafter.frozen, caches, first, anchor, keys, rows, greedy)


def assert_teacher_forcing_gives(drafter: Drafter, greedy: bool) -> None:
    """Context caches filled as in decoding, rows at every depth; then the whole text through the training path."""
    tokens, taps, drafts = random_tokens(0, LENGTH, LENGTH), taps_like(1), drafter.config.num_drafts
    anchor = np.arange(LENGTH) % (LENGTH - drafts)
    caches = commit(drafter, empty(drafter), taps, np.zeros(LENGTH, int))
    proposal = propose(drafter, caches, tokens[np.arange(LENGTH), anchor], anchor, greedy)
    sample = proposal.sample
    for row in range(LENGTH):
        tokens[row, anchor[row] + 1 : anchor[row] + 1 + drafts] = sample.tokens_RG[row]
    out = drafter.teacher_forced(tokens, taps, np.stack([anchor] * 3, axis=1))
    logits = np.asarray(out.logits_BAGV)[:, 1]
    if greedy:
        np.testing.assert_array_equal(sample.draft_ids_RG, logits.argmax(axis=-1))
        assert sample.law_RGV is None
    else:
        np.testing.assert_allclose(sample.law_RGV, jax.nn.softmax(jnp.asarray(logits)), atol=CLOSE)
    ids = np.arange(40) if drafter.frozen.draft_to_target_V is None else FEW_IDS
    assert logits.shape == (LENGTH, drafts, len(ids))
    np.testing.assert_array_equal(sample.tokens_RG, ids[sample.draft_ids_RG])
    if drafter.config.confidence_head:
        assert proposal.confidence_RG is not None
        assert out.confidence_BAG is not None
        np.testing.assert_allclose(proposal.confidence_RG, out.confidence_BAG[:, 1], atol=CLOSE)
    else:
        assert proposal.confidence_RG is out.confidence_BAG is None


def test_a_sampled_block_has_the_law_of_the_same_block_teacher_forced(drafter):
    assert_teacher_forcing_gives(drafter, greedy=False)


def test_a_greedy_block_is_the_argmax_of_the_same_block_teacher_forced():
    assert_teacher_forcing_gives(DRAFTERS["reduced"], greedy=True)


def changed_slots(before: DraftOutput, after: DraftOutput) -> np.ndarray:
    """Which slots [B, A, G] differ at all, in their logits or in their confidence."""
    moved = np.any(np.asarray(before.logits_BAGV) != np.asarray(after.logits_BAGV), axis=-1)
    if before.confidence_BAG is not None:
        moved |= np.asarray(before.confidence_BAG) != np.asarray(after.confidence_BAG)
    return moved


def test_a_slot_sees_the_anchor_and_the_token_before_it_and_no_other_token(drafter):
    """Row p of the batch has another token at position p and nothing else changed: the exact map of what is seen."""
    tokens = np.repeat(random_tokens(2, 1, LENGTH), LENGTH, axis=0)
    taps = np.repeat(taps_like(3, 1), LENGTH, axis=0)
    changed = (tokens + np.eye(LENGTH, dtype=np.int32)) % TARGET.config.vocab_size
    moved = changed_slots(*(drafter.teacher_forced(rows, taps, ANCHORS) for rows in (tokens, changed)))
    slots = np.arange(drafter.config.num_drafts)
    for block, anchor in enumerate(ANCHORS[0]):
        expected = np.zeros((LENGTH, len(slots)), bool)
        expected[anchor] = True
        if drafter.config.markov_rank:
            expected[anchor + slots, slots] = True
        np.testing.assert_array_equal(moved[:, block], expected)


def test_a_block_sees_the_features_before_its_anchor_and_no_others(drafter):
    """The anchor's own feature does not exist when the block is drafted."""
    tokens = np.repeat(random_tokens(4, 1, LENGTH), LENGTH, axis=0)
    taps = np.repeat(taps_like(5, 1), LENGTH, axis=0)
    changed = taps + np.eye(LENGTH, dtype=np.float32)[:, :, None, None] * taps_like(6, 1, 1)
    moved = changed_slots(*(drafter.teacher_forced(tokens, rows, ANCHORS) for rows in (taps, changed)))
    seen = np.arange(LENGTH)[:, None, None] < ANCHORS[0][None, :, None]
    np.testing.assert_array_equal(moved, np.broadcast_to(seen, moved.shape))


def test_gradients_reach_the_features_before_the_anchor_alone():
    drafter, anchor = DRAFTERS["reduced"], 5
    tokens, anchors = random_tokens(7, 1, LENGTH), jnp.array([[anchor]])

    @jax.jit
    @jax.grad
    def gradient(taps: jax.Array) -> jax.Array:
        out = registry.teacher_forced(drafter.config, drafter.params, drafter.frozen, committed(tokens, taps), anchors)
        assert out.confidence_BAG is not None
        return jnp.sum(out.logits_BAGV**2) + jnp.sum(out.confidence_BAG**2)

    size = np.abs(gradient(jnp.asarray(taps_like(8, 1)))).max(axis=(0, 2, 3))
    assert (size[:anchor] > 0).all()
    assert (size[anchor:] == 0).all()


def test_blocks_of_one_sequence_do_not_see_each_other(drafter):
    tokens, taps = random_tokens(9, LENGTH, LENGTH), taps_like(10)
    together = drafter.teacher_forced(tokens, taps, ANCHORS)
    for block, anchor in enumerate(ANCHORS[0]):
        alone = drafter.teacher_forced(tokens, taps, np.full_like(ANCHORS, anchor))
        np.testing.assert_allclose(together.logits_BAGV[:, block], alone.logits_BAGV[:, 0], atol=CLOSE)


def test_fillers_change_no_other_block_and_stay_finite():
    drafter, tokens, taps = DRAFTERS["reduced"], random_tokens(11, LENGTH, LENGTH), taps_like(12)
    keep = np.random.default_rng(0).random(ANCHORS.shape) < 0.6
    out = drafter.teacher_forced(tokens, taps, np.where(keep, ANCHORS, 999), keep)
    plain = drafter.teacher_forced(tokens, taps, ANCHORS)
    np.testing.assert_array_equal(np.asarray(out.logits_BAGV)[keep], np.asarray(plain.logits_BAGV)[keep])
    assert np.isfinite(out.logits_BAGV).all()
    assert out.confidence_BAG is not None
    assert np.isfinite(out.confidence_BAG).all()


def test_fill_in_reads_the_rows_behind_the_anchors_own():
    """The same network, rows and weights: only which row is the draft of which position differs."""
    tokens, taps = random_tokens(13, LENGTH, LENGTH), taps_like(14)
    plain = {"markov_rank": 0, "confidence_head": False, "confidence_with_markov": False, "num_layers": 1}
    every_row, behind = (
        make_drafter(TARGET, layout=layout, **plain).teacher_forced(tokens, taps, ANCHORS).logits_BAGV
        for layout in ("anchor_first", "fill_in")
    )
    assert (every_row.shape[2], behind.shape[2]) == (4, 3)
    np.testing.assert_allclose(behind, every_row[:, :, 1:], atol=CLOSE)


def test_features_committed_in_pieces_are_features_committed_at_once():
    drafter, taps = DRAFTERS["anchor_first"], taps_like(15)
    whole = commit(drafter, empty(drafter), taps, np.zeros(LENGTH, int))
    caches = empty(drafter)
    for start in range(0, LENGTH, 4):
        caches = commit(drafter, caches, taps[:, start : start + 4], np.full(LENGTH, start))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=CLOSE), caches, whole)


def test_rejected_features_are_unseen_and_then_overwritten():
    drafter, taps = DRAFTERS["anchor_first"], taps_like(16)
    start = np.arange(LENGTH) % 8
    clean = commit(drafter, empty(drafter), taps, np.zeros(LENGTH, int))
    dirty = commit(drafter, clean, taps_like(17, LENGTH, 4), start)
    first = random_tokens(18, LENGTH)
    jax.tree.map(np.testing.assert_array_equal, *(propose(drafter, caches, first, start) for caches in (clean, dirty)))
    pieces = np.stack([row[s : s + 4] for row, s in zip(taps, start, strict=True)])
    repaired = commit(drafter, dirty, pieces, start)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=CLOSE), repaired, clean)


def test_fresh_weights_are_deepspecs():
    params = jax.jit(dspark.init_params, static_argnums=0)(DRAFTERS["fill_in"].config, jax.random.key(0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        assert leaf.dtype == jnp.float32
        if "norm" in name:
            np.testing.assert_array_equal(leaf, 1)
        elif "bias" in name:
            np.testing.assert_array_equal(leaf, 0)
        else:
            leaf = np.asarray(leaf)
            assert abs(leaf.mean()) < 0.02 * 4 / leaf.size**0.5, name
            assert abs(leaf.std() / 0.02 - 1) < 4 / (2 * leaf.size) ** 0.5, name


def test_features_of_another_shape_are_refused():
    with pytest.raises(ConfigError, match=r"\(1, 12, 3, 32\)"):
        DRAFTERS["reduced"].teacher_forced(
            random_tokens(0, 1, LENGTH), np.zeros((1, LENGTH, 3, 32), np.float32), np.array([[1]])
        )
