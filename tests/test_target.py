"""The target: one forward pass, whole or in pieces through a cache, with its taps, for every family."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import make_target, random_tokens

from dspark_jax import ConfigError, generate, load_target
from dspark_jax import target as target_lib
from dspark_jax.layers import rms_norm
from dspark_jax.target import Target, cast_params

LENGTH = 8  # of nearly every array here: few shapes to compile
TAPS = (-1, 0, 1)
CLOSE = 1e-5
FAMILIES = [
    pytest.param({"family": "llama", "tied_head": True}, id="llama, tied"),
    pytest.param({"family": "llama", "tied_head": False}, id="llama"),
    pytest.param({"family": "qwen3", "tied_head": True}, id="qwen3, tied"),
    pytest.param({"family": "qwen3", "tied_head": False}, id="qwen3"),
]
CACHED = [FAMILIES[0], FAMILIES[3]]
_features = jax.jit(target_lib.features, static_argnames=("config", "tap_layers"))
_cached_target = functools.lru_cache(lambda *changes: make_target(**dict(changes)))


def tiny(changes: dict) -> Target:
    return _cached_target(*changes.items())


def append(target: Target, caches: list, tokens: np.ndarray, start: np.ndarray) -> target_lib.Features:
    """Runs tokens [B, S] at positions start[b], start[b] + 1, ... through the cache."""
    position = start[:, None] + np.arange(tokens.shape[1])[None, :]
    return _features(target.config, target.params, tokens, position, caches, tap_layers=TAPS)


def append_padded(target: Target, caches: list, tokens: np.ndarray, start: np.ndarray) -> target_lib.Features:
    """The same in a row of LENGTH: the padding is written too, then overwritten by what comes next."""
    padding = np.full((len(tokens), LENGTH - tokens.shape[1]), 7, np.int32)
    out = append(target, caches, np.concatenate([tokens, padding], axis=1), start)
    hidden, taps = (x[:, : tokens.shape[1]] for x in (out.hidden_BSD, out.taps_BSMD))
    return target_lib.Features(hidden, taps, out.caches)


def empty(target: Target) -> list:
    return target_lib.init_caches(target.config, 2, 2 * LENGTH, jnp.float32)


def assert_rows_match(pieces: list[target_lib.Features], full: target_lib.TargetOutput) -> None:
    hidden = np.concatenate([piece.hidden_BSD for piece in pieces], axis=1)
    taps = np.concatenate([piece.taps_BSMD for piece in pieces], axis=1)
    np.testing.assert_allclose(hidden, full.hidden_BSD, atol=CLOSE)
    np.testing.assert_allclose(taps, full.taps_BSMD, atol=CLOSE)


@pytest.mark.parametrize("changes", CACHED)
def test_a_prompt_split_anywhere_gives_what_one_full_forward_gives(changes):
    target = tiny(changes)
    tokens = random_tokens(0, 2, LENGTH)
    full = target.forward(tokens, TAPS)
    for split in range(1, LENGTH + 1):
        first = append_padded(target, empty(target), tokens[:, :split], np.zeros(2, int))
        second = append_padded(target, first.caches, tokens[:, split:], np.full(2, split))
        assert_rows_match([first, second], full)


@pytest.mark.parametrize("changes", CACHED)
def test_token_by_token_decoding_gives_what_one_full_forward_gives(changes):
    target = tiny(changes)
    tokens = random_tokens(1, 2, LENGTH)
    pieces, caches = [], empty(target)
    for position in range(LENGTH):
        pieces.append(append(target, caches, tokens[:, position : position + 1], np.full(2, position)))
        caches = pieces[-1].caches
    assert_rows_match(pieces, target.forward(tokens, TAPS))


def test_rows_of_a_batch_may_stand_at_unequal_positions():
    target = tiny({})
    tokens = random_tokens(2, 2, LENGTH)
    full = target.forward(tokens, TAPS)
    lengths = np.array([1, 5])
    prompt = np.where(np.arange(5)[None, :] < lengths[:, None], tokens[:, :5], 7).astype(np.int32)
    caches = append_padded(target, empty(target), prompt, np.zeros(2, int)).caches
    block = np.stack([row[length : length + 3] for row, length in zip(tokens, lengths, strict=True)])
    new = append_padded(target, caches, block, lengths)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(new.hidden_BSD[row], full.hidden_BSD[row, length : length + 3], atol=CLOSE)
        np.testing.assert_allclose(new.taps_BSMD[row], full.taps_BSMD[row, length : length + 3], atol=CLOSE)


def test_rolling_back_is_forgetting_the_length():
    target = tiny({})
    prompt, drafts, other = random_tokens(3, 2, 3), random_tokens(4, 2, LENGTH), random_tokens(5, 2, 4)
    kept = np.array([3, 4])  # row 0 rejects all the drafts, row 1 keeps one of them
    after_prompt = append_padded(target, empty(target), prompt, np.zeros(2, int)).caches
    dirty = append(target, after_prompt, drafts, np.full(2, 3)).caches
    new = append_padded(target, dirty, other, kept)
    texts = [np.concatenate([prompt[0], other[0], drafts[0, :1]]), np.concatenate([prompt[1], drafts[1, :1], other[1]])]
    never_drafted = np.asarray(
        target.forward(np.stack([np.pad(text, (0, LENGTH - len(text))) for text in texts]), TAPS).hidden_BSD
    )
    for row, length in enumerate(kept):
        np.testing.assert_allclose(new.hidden_BSD[row], never_drafted[row, length : length + 4], atol=CLOSE)


def test_rows_past_the_end_of_the_cache_are_dropped():
    target = tiny({})
    tokens = random_tokens(6, 2, LENGTH)
    full = append(
        target, append(target, empty(target), tokens, np.zeros(2, int)).caches, tokens, np.full(2, LENGTH)
    ).caches
    beyond = append(target, full, tokens, np.full(2, 2 * LENGTH)).caches
    jax.tree.map(np.testing.assert_array_equal, full, beyond)


@pytest.mark.parametrize("changes", FAMILIES)
def test_the_head_of_the_hidden_state_is_the_logits(changes):
    target = tiny(changes)
    out = target.forward(random_tokens(7, 2, LENGTH), TAPS)
    head = target.params["embed" if changes["tied_head"] else "head"]
    assert ("head" in target.params) != changes["tied_head"]
    np.testing.assert_allclose(out.logits_BSV, np.asarray(out.hidden_BSD) @ np.asarray(head).T, atol=CLOSE)
    np.testing.assert_allclose(target_lib.logits(target.params, out.hidden_BSD), out.logits_BSV, atol=CLOSE)


@pytest.mark.parametrize("changes", FAMILIES)
def test_taps_are_raw_layer_outputs(changes):
    target = tiny(changes)
    tokens = random_tokens(8, 2, LENGTH)
    out = target.forward(tokens, TAPS)
    taps = np.asarray(out.taps_BSMD)
    np.testing.assert_array_equal(taps[:, :, 0], np.asarray(target.params["embed"])[tokens])
    normed = rms_norm(out.taps_BSMD[:, :, 2], target.params["final_norm"], target.config.norm_eps)
    np.testing.assert_allclose(normed, out.hidden_BSD, atol=CLOSE)


def test_the_tap_of_a_layer_is_the_output_of_the_model_that_ends_there():
    target = tiny({})
    tokens = random_tokens(8, 2, LENGTH)
    shorter = Target(dataclasses.replace(target.config, num_layers=1), target.params)
    tap, end = target.forward(tokens, TAPS).taps_BSMD[:, :, 1], shorter.forward(tokens, (0,)).taps_BSMD[:, :, 0]
    np.testing.assert_allclose(tap, end, atol=CLOSE)


def test_taps_come_in_the_order_asked_for_and_none_are_an_empty_axis():
    target = tiny({})
    tokens = random_tokens(9, 2, LENGTH)
    there, back = target.forward(tokens, TAPS), target.forward(tokens, TAPS[::-1])
    np.testing.assert_array_equal(there.taps_BSMD, np.asarray(back.taps_BSMD)[:, :, ::-1])
    assert target.forward(tokens).taps_BSMD.shape == (2, LENGTH, 0, target.config.d_model)


def test_right_padding_never_changes_a_rows_real_outputs():
    target = tiny({})
    tokens = random_tokens(10, 2, 5)
    padded = [np.concatenate([tokens, np.full((2, 3), filler, np.int32)], axis=1) for filler in (0, 11)]
    out, other = (target.forward(rows, TAPS) for rows in padded)
    for a, b in zip(out, other, strict=True):
        np.testing.assert_array_equal(a[:, :5], b[:, :5])
    for a, b in zip(out, target.forward(tokens, TAPS), strict=True):
        np.testing.assert_allclose(a[:, :5], b, atol=CLOSE)


def test_no_token_is_special():
    """Token 0, so often the padding id, and another trade places in the tables and in the text: only names change."""
    target = tiny({})
    swap = np.arange(target.config.vocab_size)
    swap[[0, 13]] = 13, 0
    tables = {name: target.params[name][swap] for name in ("embed", "head")}
    tokens = random_tokens(11, 2, LENGTH)
    tokens[:, ::3] = 0
    out = target.forward(tokens, TAPS)
    renamed = Target(target.config, target.params | tables).forward(swap[tokens], TAPS)
    np.testing.assert_array_equal(out.hidden_BSD, renamed.hidden_BSD)
    np.testing.assert_array_equal(out.taps_BSMD, renamed.taps_BSMD)
    np.testing.assert_allclose(out.logits_BSV[..., swap], renamed.logits_BSV, atol=CLOSE)


def test_later_tokens_do_not_change_earlier_outputs():
    target = tiny({})
    tokens = random_tokens(12, 1, LENGTH)
    changed = tokens.copy()
    changed[0, 5] += 1
    out, other = target.forward(tokens, TAPS), target.forward(changed, TAPS)
    np.testing.assert_array_equal(out.logits_BSV[:, :5], other.logits_BSV[:, :5])
    assert np.abs(np.asarray(out.logits_BSV - other.logits_BSV))[:, 5:].max(axis=-1).min() > 1e-3


def test_bfloat16_weights_leave_float32_outputs_near_the_exact_ones():
    target = tiny({})
    small = Target(target.config, cast_params(target.params, "bfloat16"))
    assert small.dtype == jnp.bfloat16
    assert small.params["final_norm"].dtype == jnp.float32
    tokens = random_tokens(13, 2, LENGTH)
    for exact, out in zip(target.forward(tokens, TAPS), small.forward(tokens, TAPS), strict=True):
        assert out.dtype == jnp.float32
        assert np.linalg.norm(out - exact) < 0.05 * np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("tokens", "taps", "message"),
    [
        ([[0, 40]], (), "token ids run from 0 to 40: the vocabulary is 0..39"),
        ([[-1, 3]], (), "token ids run from -1 to 3"),
        ([0, 1], (), r"shape \(2,\)"),
        ([[0, 1]], (2,), r"tap layer 2: this target has layers -1\.\.1"),
        ([[0, 1]], (-2,), "tap layer -2"),
    ],
)
def test_bad_ids_and_taps_are_refused(tokens, taps, message):
    with pytest.raises(ConfigError, match=message):
        tiny({}).forward(np.array(tokens), taps)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ConfigError, match="float16"):
        load_target("anywhere", dtype="float16")


@pytest.mark.slow
def test_greedy_text_of_smollm2_is_what_transformers_gives(smollm2_path):
    """The expected ids were made by tests/make_smollm2_reference.py: the same file, read and run by transformers."""
    expected = json.loads((Path(__file__).parent / "data/smollm2_greedy.json").read_text())
    prompts = [case["prompt_ids"] for case in expected["cases"]]
    target = load_target(smollm2_path)
    for case in expected["cases"]:
        assert target.tokenizer.chat([{"role": "user", "content": case["prompt"]}], True) == case["prompt_ids"]
    out = generate(target, None, prompts, expected["max_new_tokens"])
    assert [generation.tokens for generation in out] == [case["new_ids"] for case in expected["cases"]]
