"""EAGLE-3 and MTP: what each slot may see, and that training and decoding are one network.

Nearly every call has the same shapes, LENGTH rows of LENGTH tokens with three anchors: few programs to compile.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import (
    check_a_rule_splits_every_weight,
    forced_outputs,
    make_chain,
    make_drafter,
    make_target,
    random_tokens,
)

from dspark_jax import ConfigError, Drafter, SamplingParams, sharding
from dspark_jax.drafters import chain, registry
from dspark_jax.drafters.base import Committed, Proposal
from dspark_jax.kv_cache import LayerCache
from dspark_jax.sampling import sampling_rows

TARGET = make_target()
LENGTH = 12
FEW_IDS = np.array([1, 4, 5, 9, 11, 17, 20, 33])
PUBLIC: dict[str, Any] = {  # as public drafters for Llama have it; features that do not divide over the key/value heads
    "qk_norm": False, "norm_before_residual": True, "own_head": True, "num_heads": 6, "num_kv_heads": 3,
    "draft_to_target": FEW_IDS, "confidence_head": False, "logit_softcap": 5.0, "embed_scale": 2.0,
}  # fmt: skip
FEW = "eagle3, public"
DRAFTERS = {
    "eagle3": make_chain(TARGET, "eagle3"),
    FEW: make_chain(TARGET, "eagle3", **PUBLIC),
    "mtp": make_chain(TARGET, "mtp"),
}
ANCHORS = np.tile([3, 0, 6], (LENGTH, 1))
CLOSE = 1e-5
_propose = jax.jit(chain.propose, static_argnames=("config", "greedy", "shortlist"))
_commit = jax.jit(chain.commit, static_argnames="config")


@pytest.fixture(params=DRAFTERS)
def drafter(request) -> Drafter:
    return DRAFTERS[request.param]


def features_like(drafter: Drafter, tokens: np.ndarray, seed: int) -> Committed:
    """Tokens with random features."""
    rng, shape = np.random.default_rng(seed), (*tokens.shape, TARGET.config.d_model)
    taps = rng.normal(size=(*shape[:2], len(drafter.config.target_layer_ids), shape[2]))
    return Committed(tokens, taps.astype(np.float32), rng.normal(size=shape).astype(np.float32))


def repeated(seen: Committed) -> Committed:
    return jax.tree.map(lambda x: np.repeat(x[:1], LENGTH, axis=0), seen)


def part(seen: Committed, start: int, stop: int) -> Committed:
    return jax.tree.map(lambda x: x[:, start:stop], seen)


def commit(drafter: Drafter, caches: list[LayerCache], seen: Committed, start: np.ndarray) -> list[LayerCache]:
    position = start[:, None] + np.arange(seen.tokens_BS.shape[1])[None, :]
    return _commit(drafter.config, drafter.params, drafter.frozen, caches, seen, position)


def empty(drafter: Drafter) -> list[LayerCache]:
    return registry.init_caches(drafter.config, LENGTH, LENGTH + 4, jnp.float32)


def propose(
    drafter: Drafter, caches: list[LayerCache], first: np.ndarray, anchor: np.ndarray, **changes: Any
) -> Proposal:
    keys = jax.random.split(jax.random.key(0), (LENGTH, drafter.config.num_drafts))
    rows = sampling_rows([SamplingParams(1.0)] * LENGTH)
    return _propose(drafter.config, drafter.params, drafter.frozen, caches, first, anchor, keys, rows, **changes)


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "sampled") for name in DRAFTERS), *((FEW, kind) for kind in ("greedy", "shortlist"))]
)
def test_a_block_has_the_law_of_the_same_block_teacher_forced(name: str, kind: str) -> None:
    """Caches filled as in decoding, the tokens from the anchor on among them; then the drafts as if they were text."""
    drafter = DRAFTERS[name]
    tokens, drafts = random_tokens(0, LENGTH, LENGTH), drafter.config.num_drafts
    seen, anchor = features_like(drafter, tokens, 1), np.arange(LENGTH) % (LENGTH - drafts)
    caches = commit(drafter, empty(drafter), seen, np.zeros(LENGTH, int))
    changes = {"sampled": {}, "greedy": {"greedy": True}, "shortlist": {"shortlist": 3}}[kind]
    proposal = propose(drafter, caches, tokens[np.arange(LENGTH), anchor], anchor, **changes)
    sample, tokens = proposal.sample, tokens.copy()
    for row in range(LENGTH):
        tokens[row, anchor[row] + 1 : anchor[row] + 1 + drafts] = sample.tokens_RG[row]
    forced = forced_outputs(drafter, seen._replace(tokens_BS=tokens), np.stack([anchor] * 3, axis=1))
    logits = forced["logits"][:, 1]
    ids = np.arange(40) if drafter.frozen.draft_to_target_V is None else FEW_IDS
    assert logits.shape == (LENGTH, drafts, len(ids))
    if kind == "shortlist":
        best = np.argsort(-logits, axis=-1)[..., :3]
        np.testing.assert_array_equal(sample.support_RGK, ids[best])
        np.testing.assert_array_equal(
            sample.tokens_RG, np.take_along_axis(ids[best], np.asarray(sample.draft_ids_RG)[..., None], -1)[..., 0]
        )
        logits = np.take_along_axis(logits, best, -1)
    else:
        assert sample.support_RGK is None
        np.testing.assert_array_equal(sample.tokens_RG, ids[sample.draft_ids_RG])
    if kind == "greedy":
        np.testing.assert_array_equal(sample.draft_ids_RG, logits.argmax(axis=-1))
        assert sample.law_RGV is None
    else:
        np.testing.assert_allclose(sample.law_RGV, jax.nn.softmax(jnp.asarray(logits)), atol=CLOSE)
    if drafter.config.confidence_head:
        np.testing.assert_allclose(proposal.confidence_RG, forced["confidence"][:, 1, :, 0], atol=CLOSE)
    else:
        assert proposal.confidence_RG is None


def moved(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> np.ndarray:
    """Which slots [B, A, G] differ at all, in their logits or in their confidence."""
    return np.any([np.any(before[name] != after[name], axis=-1) for name in before], axis=0)


def test_a_slot_sees_the_tokens_up_to_the_one_before_it(drafter: Drafter) -> None:
    """Row p of the batch has another token at position p and nothing else changed: the exact map of what is seen. The
    first token of a text is in no row, except that a draft right after it is fed it."""
    seen = repeated(features_like(drafter, random_tokens(2, LENGTH, LENGTH), 3))
    changed = seen._replace(tokens_BS=(seen.tokens_BS + np.eye(LENGTH, dtype=np.int32)) % TARGET.config.vocab_size)
    found = moved(*(forced_outputs(drafter, text, ANCHORS) for text in (seen, changed)))
    position, slot = np.arange(LENGTH)[:, None], np.arange(drafter.config.num_drafts)[None, :]
    for block, anchor in enumerate(ANCHORS[0]):
        expected = (position <= anchor + slot) & (position >= min(anchor, 1))
        np.testing.assert_array_equal(found[:, block], expected)


def test_a_block_sees_the_features_before_its_anchor_and_no_others(drafter: Drafter) -> None:
    """The anchor's own feature does not exist when the block is drafted."""
    seen = repeated(features_like(drafter, random_tokens(4, LENGTH, LENGTH), 5))
    there = np.eye(LENGTH, dtype=np.float32)
    changed = seen._replace(
        taps_BSMD=seen.taps_BSMD + there[:, :, None, None], hidden_BSD=seen.hidden_BSD + there[:, :, None]
    )
    found = moved(*(forced_outputs(drafter, text, ANCHORS) for text in (seen, changed)))
    expected = np.arange(LENGTH)[:, None, None] < ANCHORS[0][None, :, None]
    np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


def test_tokens_committed_in_pieces_are_tokens_committed_at_once(drafter: Drafter) -> None:
    seen = features_like(drafter, random_tokens(9, LENGTH, LENGTH), 10)
    whole = commit(drafter, empty(drafter), seen, np.zeros(LENGTH, int))
    caches = empty(drafter)
    for start in range(0, LENGTH, 4):
        caches = commit(drafter, caches, part(seen, start, start + 4), np.full(LENGTH, start))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=CLOSE), caches, whole)


def test_rejected_tokens_are_unseen_and_then_overwritten(drafter: Drafter) -> None:
    tokens, start = random_tokens(11, LENGTH, LENGTH), np.arange(LENGTH) % 8
    seen = features_like(drafter, tokens, 12)
    clean = commit(drafter, empty(drafter), seen, np.zeros(LENGTH, int))
    rejected = features_like(drafter, random_tokens(13, LENGTH, 4), 14)
    dirty = commit(drafter, clean, rejected, start)
    first = random_tokens(15, LENGTH)
    jax.tree.map(np.testing.assert_array_equal, *(propose(drafter, caches, first, start) for caches in (clean, dirty)))
    index = start[:, None] + np.arange(4)[None, :]
    pieces = jax.tree.map(lambda x: x[np.arange(LENGTH)[:, None], index], seen)
    repaired = commit(drafter, dirty, pieces, start)
    # The row after the last piece was completed with a rejected feature; it waits for its own token.
    known = [np.arange(LENGTH + 4)[None, :] <= start[:, None] + last for last in (2, 3)]
    for ours, theirs, there in zip(repaired, clean, known, strict=True):
        for a, b in ((ours.k_BKHT, theirs.k_BKHT), (ours.v_BKTH.swapaxes(2, 3), theirs.v_BKTH.swapaxes(2, 3))):
            a, b = (np.asarray(x) * there[:, None, None] for x in (a, b))
            np.testing.assert_allclose(a, b, atol=CLOSE)


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_a_block_reads_its_own_conversation_before_the_anchor_and_nothing_else(name: str) -> None:
    drafter, anchors = DRAFTERS[name], np.array([[1, 3, 4, 6, 8, 10]])
    start = np.repeat([0, 4, 8], 4)[None].astype(np.int32)
    seen = features_like(drafter, random_tokens(16, 1, LENGTH), 17)

    @jax.jit
    def blocks(seen: Committed, start: jax.Array, anchors: jax.Array) -> jax.Array:
        arguments = drafter.config, drafter.params, drafter.frozen
        rows = chain.context_rows(*arguments, seen, start)
        return chain.teacher_forced_blocks(*arguments, seen.tokens_BS, rows, anchors).hidden_BAGD

    packed = np.asarray(blocks(seen, start, anchors))
    for begin in (0, 4, 8):
        own = start[0, anchors[0]] == begin
        alone = blocks(part(seen, begin, begin + 4), np.zeros((1, 4), np.int32), anchors[:, own] - begin)
        inside = anchors[0, own, None] + np.arange(drafter.config.num_drafts) < begin + 4
        np.testing.assert_allclose(packed[:, own][:, inside], np.asarray(alone)[:, inside], atol=CLOSE)


def test_a_rule_says_how_every_weight_is_split(drafter: Drafter) -> None:
    check_a_rule_splits_every_weight(drafter.params)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAFTERS)
def test_fresh_weights_are_deepspecs(name: str) -> None:
    params = jax.jit(chain.init_params, static_argnums=0)(DRAFTERS[name].config, jax.random.key(0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        place, leaf = sharding.path_string(path), np.asarray(leaf)
        if place.endswith("norm"):
            np.testing.assert_array_equal(leaf, 1)
        elif place.endswith("bias"):
            np.testing.assert_array_equal(leaf, 0)
        else:
            assert abs(leaf.std() / 0.02 - 1) < 4 / (2 * leaf.size) ** 0.5, place


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        ("eagle3", {"num_layers": 2}, "num_layers = 2: eagle3 has 1 and nothing else"),
        ("eagle3", {"markov_rank": 8}, "markov_rank = 8: not a setting of eagle3"),
        ("eagle3", {"layout": "fill_in"}, "layout = 'fill_in': eagle3 has 'anchor_first'"),
        ("eagle3", {"mask_token_id": 3}, "mask_token_id = 3: eagle3 has -1"),
        ("eagle3", {"layer_windows": (4,)}, r"layer_windows = \(4,\): eagle3 has \(\)"),
        ("eagle3", {"target_layer_ids": ()}, "target_layer_ids is empty"),
        ("mtp", {"target_layer_ids": (0,)}, r"target_layer_ids = \(0,\): mtp taps no layer"),
        ("mtp", {"own_head": True}, "own_head = True: not a setting of mtp"),
        ("dspark", {"qk_norm": False}, "qk_norm = False: not a setting of dspark"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(algorithm: str, changes: dict[str, Any], message: str) -> None:
    make = make_drafter if algorithm == "dspark" else make_chain
    with pytest.raises(ConfigError, match=message):
        make(TARGET, **({"algorithm": algorithm} | changes))


def test_mtp_without_hidden_states_is_refused() -> None:
    tokens = random_tokens(0, 1, LENGTH)
    with pytest.raises(ConfigError, match="give hidden_BSD"):
        DRAFTERS["mtp"].teacher_forced(tokens, np.zeros((1, LENGTH, 0, 32), np.float32), np.array([[1]]))
