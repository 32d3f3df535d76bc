"""Rows packed with several conversations: none sees another, in the target or in the drafter, forward or backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import block_features, committed, make_drafter, make_target, random_tokens

from dspark_jax import kv_cache
from dspark_jax.attention import Rule
from dspark_jax.drafters import dspark
from train.objective import supervised_slots, target_features

LENGTHS = (9, 4, 14)
START = np.repeat(np.cumsum((0, *LENGTHS[:-1])), LENGTHS)[None].astype(np.int32)
TARGET = make_target(num_layers=3)
DRAFTER = make_drafter(TARGET, target_layer_ids=(-1, 1), num_target_layers=3)
TOKENS = random_tokens(0, 1, sum(LENGTHS))


def features(tokens: np.ndarray, start: np.ndarray, scan_layers: bool = False):
    return jax.jit(target_features, static_argnums=(0, 1, 5))(
        TARGET.config, DRAFTER.config, TARGET.params, jnp.asarray(tokens), jnp.asarray(start), scan_layers
    )


@pytest.mark.parametrize("scan_layers", [False, True])
def test_the_target_reads_every_conversation_as_if_alone(scan_layers: bool) -> None:
    packed = features(TOKENS, START, scan_layers)
    for begin, length in zip(np.cumsum((0, *LENGTHS)), LENGTHS, strict=False):
        part = slice(int(begin), int(begin) + length)
        alone = features(TOKENS[:, part], np.zeros((1, length), np.int32))
        np.testing.assert_allclose(packed.hidden_BSD[:, part], alone.hidden_BSD, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(packed.taps_BSMD[:, part], alone.taps_BSMD, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_a_block_reads_its_own_conversation_before_the_anchor_and_nothing_else(scan_layers: bool) -> None:
    rng = np.random.default_rng(1)
    taps = jnp.asarray(rng.normal(size=(1, sum(LENGTHS), 2, TARGET.config.d_model)), jnp.float32)
    anchors = np.asarray([[0, 3, 9, 11, 13, 20, 24]])
    config, params, frozen = DRAFTER.config, DRAFTER.params, DRAFTER.frozen

    @jax.jit
    def blocks(tokens: jax.Array, taps: jax.Array, start: jax.Array, anchors: jax.Array) -> jax.Array:
        rows = dspark.context_rows(config, params, frozen, committed(tokens, taps), start, scan_layers)
        return dspark.teacher_forced_blocks(config, params, frozen, tokens, rows, anchors).hidden_BAGD

    packed = blocks(TOKENS, taps, START, anchors)

    def plain(*given: jax.Array) -> jax.Array:
        return block_features(config, params, frozen, *given).hidden_BAGD

    for begin, length in zip(np.unique(START), LENGTHS, strict=True):
        part, own = slice(begin, begin + length), START[0, anchors[0]] == begin
        alone = plain(TOKENS[:, part], taps[:, part], anchors[:, own] - begin)
        np.testing.assert_allclose(packed[:, own], alone, rtol=1e-5, atol=1e-5)
    gradient = jax.jit(jax.grad(lambda taps: blocks(TOKENS, taps, START, anchors[:, 3:4]).sum()))(taps)
    touched = np.flatnonzero(np.abs(np.asarray(gradient)).max(axis=(0, 2, 3)))
    assert touched.tolist() == [9, 10]  # the conversation begins at 9, the anchor is 11


def test_many_queries_are_worked_off_in_parts_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 32, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    start = jnp.asarray(np.repeat([0, 7, 20], [7, 13, 12])[None])
    position = jnp.arange(32)[None] - start
    rows = kv_cache.empty_rows(start, jnp.dtype("float32")).append(k, v, position)
    for rule in (Rule(), Rule(window=5)):
        whole = rows.attend(q, position, rule)
        with monkeypatch.context() as patch:
            patch.setattr(kv_cache, "_QUERIES", 7)  # the last part is shorter
            np.testing.assert_allclose(rows.attend(q, position, rule), whole, rtol=1e-6, atol=1e-6)


def test_a_block_is_supervised_inside_its_conversation_only() -> None:
    supervised = jnp.ones((1, sum(LENGTHS)), bool)
    anchors = jnp.asarray([[7, 8, 9, 12, 26]])
    slots = supervised_slots(supervised, jnp.asarray(START), anchors, jnp.ones((1, 5), bool), 3)[0]
    assert slots.astype(int).tolist() == [[1, 0, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0]]
