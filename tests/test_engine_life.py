"""A long life of one engine: arrivals, cancellations, limits, drains and slot reuse in random order.

Whatever happened around it, every greedy text that was finished is plain decoding's, and no page is lost. Sampled
texts live among them, whose tokens depend on what else is drafted: of these only the ends are known.
"""

import dataclasses

import numpy as np
import pytest
from test_engine import DRAFTER, SMALL, TARGET, curves, engine, plain_texts, prompts
from tiny import random_tokens, timeless

from dspark_jax import SamplingParams, generate, load_drafter, load_target
from serve.curves import Curves
from serve.engine import Engine, EngineConfig
from serve.scheduler import Request, Scheduler, Text, positions
from serve.server import Server

KINDS, NEW, PAGES = 24, 12, 7
STOP = (3, 17, 21)


def all_prompts() -> list[tuple[int, ...]]:
    """KINDS of them, the last as long as the context lets a prompt be."""
    drafts = DRAFTER.config.num_drafts
    longest = SMALL.max_context - positions(0, NEW, drafts)
    return [*prompts(KINDS - 1), tuple(random_tokens(99, longest).tolist())]


def live(requests: int, seed: int, policy: str) -> tuple[list[tuple[int, Text]], int]:
    """Serves `requests` random requests, one in four sampled, on pages for two to three of them; returns each with the
    number of its prompt, and how many steps had a slot for somebody and no pages."""
    rng, made = np.random.default_rng(seed), engine()
    server = Server(made, policy, curves(), timeless)
    sizes = SMALL.max_requests, PAGES, SMALL.page_size, SMALL.max_context
    server.scheduler = Scheduler(*sizes, TARGET.config.vocab_size, made.num_drafts, TARGET.config.max_length)
    everything, texts, starved = all_prompts(), [], 0
    while len(texts) < requests:
        if rng.random() < 0.5:
            which = int(rng.integers(KINDS))
            new, hot = int(rng.integers(1, NEW + 1)), rng.random() < 0.25
            stop = STOP if rng.random() < 0.5 else ()
            request = Request(everything[which], new, SamplingParams(0.8 * hot), seed=which, stop_ids=stop)
            texts.append((which, server.submit(request)))
        if rng.random() < 0.05 and texts:
            recent = texts[-8:]  # older ones have ended long ago
            server.cancel(recent[int(rng.integers(len(recent)))][1])
        if rng.random() < 0.01:
            server.run()  # a drain
            assert server.idle
        server.step()
        server.scheduler.check()
        starved += bool(server.scheduler.waiting and server.scheduler._free_slots)
    server.run()
    server.scheduler.check()
    assert len(server.scheduler._free_pages) == PAGES
    assert len(server.scheduler._free_slots) == made.config.max_requests
    return texts, starved


@pytest.mark.parametrize(
    "requests", [60, pytest.param(300, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.soak)]
)
def test_a_long_life_leaks_nothing_and_changes_no_text(requests: int):
    whole = [g.tokens for g in generate(TARGET, None, [list(prompt) for prompt in all_prompts()], NEW)]
    seen = set()
    texts, starved = live(requests, requests, "scheduled")
    for which, text in texts:
        request, sampled = text.request, text.request.sampling.temperature > 0
        seen.add((text.reason, sampled))
        expected = text.tokens if sampled else whole[which][: request.max_new_tokens]
        ends = [i for i, token in enumerate(expected) if token in request.stop_ids]
        expected = expected[: ends[0] + 1] if ends else expected
        if text.reason == "cancelled":
            assert text.tokens == expected[: len(text.tokens)]
        else:
            assert text.tokens == expected
            assert text.reason == ("stop" if ends else "length")
            assert ends or len(text.tokens) == request.max_new_tokens
    assert {("length", False), ("stop", False), ("length", True), ("cancelled", False)} <= seen
    assert starved, "pages never ran out: too many for this test"


def test_few_pages_make_requests_wait_not_fail():
    """Pages for two requests, slots for four: admission by pages, in order, to the end."""
    made = Engine(TARGET, DRAFTER, dataclasses.replace(SMALL, num_pages=6))
    made._programs = {}
    made.compile([("prefill", 16), ("plain", 4)])
    server = Server(made, "off", None)
    texts = [server.submit(Request(p, NEW)) for p in prompts(8)]
    server.run()
    server.scheduler.check()
    assert [text.tokens for text in texts] == plain_texts(8, NEW)


@pytest.mark.slow
def test_opaque_identifiers_are_copied_alike_at_concurrency_12(smollm2_path):
    """40 identifiers, which a model copies token by token: one wrong neighbour's token would show at once."""
    target = load_target(smollm2_path)
    drafter = load_drafter("assets/smollm2-135m-dspark", target)
    rng = np.random.default_rng(0)
    letters = np.array(list("ABCDEFGHJKLMNPQRSTUVWXYZ0123456789"))
    ids = ["-".join("".join(rng.choice(letters, 4)) for _ in range(3)) for _ in range(40)]
    rows = [
        tuple(
            target.tokenizer.chat([{"role": "user", "content": f"Repeat exactly: {name}"}], add_generation_prompt=True)
        )
        for name in ids
    ]
    config = EngineConfig(max_requests=12, request_sizes=(12,), max_context=128, prefill_lengths=(64,))
    made = Engine(target, drafter, config)
    made.compile([("prefill", 64), ("plain", 12), ("round", 12, made.token_buckets[12][0])])
    edge = made.token_buckets[12][0]
    made.token_buckets = {12: (edge,)}
    cheap = Curves({(12, t, s): 1.0 for t in (0, edge) for s in (False, True)})
    server = Server(made, "scheduled", cheap, timeless)
    stop = target.config.eos_token_ids
    texts = [server.submit(Request(row, 24, stop_ids=stop)) for row in rows]
    server.run()
    assert server.totals.draft_rounds > 0
    plain = generate(target, None, [list(row) for row in rows], 24, eos_token_ids=stop, batch_size=40)
    assert [text.tokens for text in texts] == [generation.tokens for generation in plain]
