"""The threshold sweep from records is decoding at that threshold; places of sampled tokens in the law are uniform."""

import functools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import good_drafter, make_target, random_tokens

from dspark_jax import Generation, Round, SamplingParams, generate
from serve import law, measure, sweep
from serve.engine import Engine, EngineConfig
from serve.scheduler import Request
from serve.server import Server

TOKENS, G, EOS = 24, 4, 7
LIMIT = TOKENS - G + 1
TARGET = make_target(mixing=0.3, eos_token_ids=(EOS,))
DRAFTER = good_drafter(TARGET)
TEMPERATURES_G = np.array([0.5, 1.0, 2.0, 1.5], np.float32)
PROMPTS = [row.tolist() for row in random_tokens(5, 8, 5)]


@functools.cache
def texts() -> list[Generation]:
    return generate(TARGET, DRAFTER, PROMPTS, TOKENS, eos_token_ids=(EOS,))


@functools.cache
def blocks() -> list[list[Round]]:
    return sweep.blocks_everywhere(TARGET, DRAFTER, PROMPTS, [text.tokens for text in texts()], LIMIT)


def threshold_at(quantile: float) -> float:
    """A threshold that this share of all drafts falls below: between two confidences, for 0 below all."""
    logits = np.array([block.confidence for mine in blocks() for block in mine])
    return float(np.quantile(1 / (1 + np.exp(-logits / TEMPERATURES_G)), quantile)) if quantile else 1e-9


def replayed(threshold: float) -> list[Generation]:
    return [
        Generation([], sweep.replay(text.tokens, mine, LIMIT, TEMPERATURES_G, threshold))
        for text, mine in zip(texts(), blocks(), strict=True)
    ]


def numbers(generations: list[Generation]) -> list[list[list[int]]]:
    return [[x.tolist() for x in measure.count_rounds([g], (EOS,))] for g in generations]


@pytest.fixture(scope="module")
def engine() -> Engine:
    config = EngineConfig(max_requests=1, max_context=128, prefill_lengths=(8,), shortlist=0)
    engine = Engine(TARGET, DRAFTER, config, TEMPERATURES_G)
    engine.compile([("prefill", 8), ("round", 1, G + 1)])
    engine.token_buckets = {1: (G + 1,)}
    return engine


def rerun(engine: Engine, threshold: float) -> list[Generation]:
    """Decoding with that threshold, with room for every draft in each round: the only size of this engine."""
    server = Server(engine, f"threshold:{threshold}")
    done = [server.submit(Request(tuple(prompt), LIMIT, stop_ids=(EOS,))) for prompt in PROMPTS]
    server.run()
    return [Generation(text.tokens, [Round(r.draft, r.accepted, None) for r in text.rounds]) for text in done]


@pytest.mark.parametrize("quantile", [0.0, 0.05, 0.2])
def test_replay_is_decoding_at_that_threshold(quantile: float, engine: Engine):
    threshold = threshold_at(quantile)
    decoded = rerun(engine, threshold)
    assert numbers(replayed(threshold)) == numbers(decoded)
    lengths = [len(round_.draft) for text in decoded for round_ in text.rounds]
    assert max(lengths) == G, "some blocks must be whole"
    assert quantile == 0 or min(lengths) < G, "some blocks must be cut"


def test_cutting_the_rounds_of_another_run_would_not_be():
    """Why every position needs a block: a shorter round moves all later ones."""
    threshold = threshold_at(0.2)
    cut = [Generation([], [sweep.shorten(r, TEMPERATURES_G, threshold) for r in text.rounds]) for text in texts()]
    one, other = (measure.accepted_length(measure.count_rounds(g, (EOS,))) for g in (cut, replayed(threshold)))
    assert one != other


def test_no_threshold_gives_the_recorded_rounds():
    for text, mine in zip(texts(), replayed(0.0), strict=True):
        recorded = [(r.draft, r.accepted) for r in text.rounds]
        got = [(r.draft, r.accepted) for r in mine.rounds]
        # Where the text ends in an accepted end of sequence, nobody knows what was accepted behind it.
        assert [d for d, _ in got] == [d for d, _ in recorded[: len(got)]]
        assert got[:-1] == recorded[: len(got) - 1]


def test_places_by_hand():
    logits = np.log([[0.2, 0.5, 0.3], [0.25, 0.25, 0.5]])
    rows = np.concatenate([np.zeros((1, 3)), logits, np.zeros((1, 3))])
    target = SimpleNamespace(forward=lambda tokens: SimpleNamespace(logits_BSV=jnp.asarray(rows, jnp.float32)[None]))
    places = law.places(target, [0, 0], [2, 1], 4, np.array([0.5, 0.5]), (1.0,))
    # Token 2 comes behind 1; token 1 behind 2 and, by its id, behind 0, which is as likely.
    np.testing.assert_allclose(places, [[0.5 + 0.15, 0.75 + 0.125]], rtol=1e-6)


@pytest.mark.slow
def test_sampled_texts_are_uniform_in_their_own_law_only():
    prompts = [PROMPTS[0]] * 96
    done = generate(TARGET, None, prompts, 12, SamplingParams(1.0), seed=3, batch_size=96)
    rng = np.random.default_rng(0)
    found = np.concatenate(
        [law.places(TARGET, prompts[0], g.tokens, 32, rng.random(12), (1.0, 0.6)) for g in done], axis=1
    )
    right, wrong = law.uniform_test(found[0]), law.uniform_test(found[1])
    assert right is not None and right[1] > 1e-3
    assert wrong is not None and wrong[1] < 1e-6
    assert law.uniform_test(found[0][: law.LEAST - 1]) is None
