"""Decoding through `generate`: exact texts, exact lengths, ends of sequence, independence, no new compilation."""

import importlib
import re

import numpy as np
import pytest
from tiny import good_drafter, make_drafter, make_target, random_tokens

from dspark_jax import ConfigError, Generation, SamplingParams, generate

# The package's attribute of this name is the function.
module = importlib.import_module("dspark_jax.generate")

LENGTHS = (1, 3, 7, 2, 12, 5, 20, 9)
NEW = 24
# The longest text fills the context to its last position.
TARGET = make_target(mixing=0.4, max_length=max(LENGTHS) + NEW)
GOOD, RANDOM = good_drafter(TARGET), make_drafter(TARGET, num_layers=1)
PROMPTS = [random_tokens(i, length).tolist() for i, length in enumerate(LENGTHS)]
MIXED = [
    SamplingParams(0.0),
    SamplingParams(1.0),
    SamplingParams(1.0, top_k=5),
    SamplingParams(0.0),
    SamplingParams(0.8, top_p=0.7),
    SamplingParams(1.3, top_k=20, top_p=0.9),
    SamplingParams(0.0, top_k=3),
    SamplingParams(1.0),
]


def tokens_of(generations: list[Generation]) -> list[list[int]]:
    return [generation.tokens for generation in generations]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """Greedy text without a drafter."""
    return tokens_of(generate(TARGET, None, PROMPTS, NEW))


@pytest.fixture(scope="module")
def drafted() -> list[Generation]:
    return generate(TARGET, GOOD, PROMPTS, NEW)


@pytest.fixture(scope="module")
def sampled() -> list[Generation]:
    return generate(TARGET, GOOD, PROMPTS, NEW, MIXED, seed=5)


def test_greedy_text_is_the_targets_argmax_step_by_step(plain):
    for prompt, text in list(zip(PROMPTS, plain, strict=True))[:3]:
        row = np.zeros((1, 32), np.int32)
        whole = prompt + text
        row[0, : len(whole)] = whole
        best = np.asarray(TARGET.forward(row).logits_BSV)[0].argmax(axis=-1)
        assert text == best[len(prompt) - 1 : len(whole) - 1].tolist()


def test_drafting_does_not_change_greedy_text(plain, drafted):
    assert tokens_of(drafted) == plain
    assert tokens_of(generate(TARGET, RANDOM, PROMPTS, NEW)) == plain
    assert tokens_of(generate(TARGET, GOOD, PROMPTS, NEW, shortlist=2)) == plain
    accepted = np.array([r.accepted for generation in drafted for r in generation.rounds])
    assert set(accepted) >= {0, 2, 4}, "drafts of every quality are needed for this to mean something"


@pytest.mark.parametrize("verify", ["token", pytest.param("block", marks=pytest.mark.slow)])
def test_greedy_rows_of_a_mixed_batch_keep_the_greedy_text(plain, verify):
    out = generate(TARGET, GOOD, PROMPTS, NEW, MIXED, verify=verify)
    for text, generation, params in zip(plain, out, MIXED, strict=True):
        assert len(generation.tokens) == NEW
        if params.temperature == 0:
            assert generation.tokens == text


def test_rounds_tell_how_the_text_came_about(drafted, sampled):
    for generation in drafted + sampled:
        position = 1  # the first token comes from the prompt's own forward pass
        for r in generation.rounds:
            assert len(r.draft) == GOOD.config.num_drafts == len(r.confidence)
            room = NEW - position
            assert room > 0
            assert generation.tokens[position:][: r.accepted] == r.draft[: r.accepted][:room]
            position += r.accepted + 1
        assert position >= NEW


def test_a_text_depends_neither_on_its_neighbours_nor_on_the_batch_size(sampled):
    assert tokens_of(generate(TARGET, GOOD, PROMPTS, NEW, MIXED, seed=5, batch_size=1)) == tokens_of(sampled)
    for first in (1, 5):  # alone, a prompt has index 0 and its stream
        order = [first, *(i for i in range(8) if i != first)]
        prompts, params = [PROMPTS[i] for i in order], [MIXED[i] for i in order]
        alone = generate(TARGET, GOOD, prompts[:1], NEW, params[:1], seed=5)
        assert alone[0].tokens == generate(TARGET, GOOD, prompts, NEW, params, seed=5)[0].tokens


def test_greedy_texts_follow_their_prompts_in_any_order(plain):
    order = np.random.default_rng(0).permutation(len(PROMPTS)).tolist()
    shuffled = tokens_of(generate(TARGET, GOOD, [PROMPTS[i] for i in order], NEW))
    assert shuffled == [plain[i] for i in order]


def test_seeds_and_prompts_have_streams_of_their_own(sampled):
    assert tokens_of(generate(TARGET, GOOD, PROMPTS, NEW, MIXED, seed=5)) == tokens_of(sampled)
    other = tokens_of(generate(TARGET, GOOD, PROMPTS, NEW, MIXED, seed=6))
    twins = tokens_of(generate(TARGET, GOOD, PROMPTS[:1] * 8, NEW, SamplingParams(1.0)))
    assert len({tuple(text) for text in twins}) == 8
    for params, text, new_text in zip(MIXED, tokens_of(sampled), other, strict=True):
        assert (text == new_text) == (params.temperature == 0)


@pytest.mark.parametrize("max_new_tokens", range(1, 8))
def test_exactly_as_many_tokens_as_asked_for(plain, max_new_tokens):
    out = generate(TARGET, GOOD, PROMPTS, max_new_tokens)
    assert tokens_of(out) == [text[:max_new_tokens] for text in plain]


def test_a_text_ends_with_its_first_end_of_sequence_token_wherever_it_falls(plain, drafted):
    inside = 0
    for eos in [(token,) for token in sorted({token for text in plain for token in text})[:12]] + [(3, 17, 30), (99,)]:
        out = generate(TARGET, GOOD, PROMPTS, NEW, eos_token_ids=eos)
        for text, generation, whole in zip(plain, out, drafted, strict=True):
            ends = [i for i, token in enumerate(text) if token in eos]
            assert generation.tokens == (text[: ends[0] + 1] if ends else text)
            starts = 1 + np.cumsum([0] + [r.accepted + 1 for r in whole.rounds])
            if ends and ends[0] + 1 not in starts and ends[0]:
                inside += 1  # an accepted block went on behind it
    assert inside > 3


def test_progress_counts_every_token(plain):
    counts: list[int] = []
    generate(TARGET, GOOD, PROMPTS, NEW, on_progress=counts.append)
    assert sum(counts) == sum(map(len, plain))


def test_lengths_grow_without_a_new_trace(monkeypatch):
    """Two requests, a batch no other test here has: one prefill and one round are traced, whatever the lengths."""
    traces = []
    features = module.target_lib.features

    def counted(*args):
        traces.append(args[2].shape)
        return features(*args)

    monkeypatch.setattr(module.target_lib, "features", counted)
    for length, new_tokens in ((1, 3), (2, 20), (17, 5), (31, 13)):
        generate(TARGET, GOOD, [random_tokens(length, length).tolist(), [4, 2]], new_tokens)
        assert len(traces) == 2, traces


def test_no_prompts_give_no_texts():
    assert generate(TARGET, GOOD, [], 4) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1, 40]]}, "prompt 0 has ids from 1 to 40: the vocabulary is 40"),
        ({"prompts": [[-1]]}, "prompt 0 has ids from -1"),
        ({"prompts": [[1] * 21], "max_new_tokens": NEW}, "with 24 new ones it exceeds the target's context of 44"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"verify": "tree"}, "verify = 'tree'"),
        ({"shortlist": -1}, "shortlist = -1"),
        ({"sampling": [SamplingParams()] * 2}, "2 sampling settings for 1 prompts"),
        ({"drafter": make_drafter(make_target(vocab_size=39))}, "made for a vocabulary of 39, this target has 40"),
    ],
)
def test_bad_requests_are_refused_in_one_line(changes, message):
    request = {"target": TARGET, "drafter": GOOD, "prompts": [[1, 2]], "max_new_tokens": 4} | changes
    with pytest.raises(ConfigError, match=re.escape(message)) as refusal:
        generate(**request)
    assert "\n" not in str(refusal.value)
