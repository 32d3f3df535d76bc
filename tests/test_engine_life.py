"""A long life of one engine: arrivals, cancellations, limits, drains and slot reuse in random order.

Whatever happened around it, every greedy text that was finished is plain decoding's, and no page is lost.
"""

import dataclasses

import numpy as np
import pytest
from test_engine import DRAFTER, SMALL, TARGET, curves, engine, plain_texts, prompts
from tiny import timeless

from dspark_jax import generate, load_drafter, load_target
from serve.curves import Curves
from serve.engine import Engine, EngineConfig
from serve.scheduler import Request, Text
from serve.server import Server

KINDS, NEW = 24, 12


def live(requests: int, seed: int, policy: str) -> list[tuple[int, Text]]:
    """Serves `requests` random requests on 12 pages for 4 slots; returns each with the number of its prompt."""
    rng, made = np.random.default_rng(seed), engine()
    server = Server(made, policy, curves(), timeless)
    everything, texts = prompts(KINDS), []
    while len(texts) < requests:
        if rng.random() < 0.5:
            which = int(rng.integers(KINDS))
            new = int(rng.integers(1, NEW + 1))
            texts.append((which, server.submit(Request(everything[which], new, seed=which))))
        if rng.random() < 0.05 and texts:
            recent = texts[-8:]  # older ones have ended long ago
            server.cancel(recent[int(rng.integers(len(recent)))][1])
        if rng.random() < 0.01:
            server.run()  # a drain
            assert server.idle
        server.step()
        server.scheduler.check()
    server.run()
    server.scheduler.check()
    assert len(server.scheduler._free_pages) == made.config.pages
    assert len(server.scheduler._free_slots) == made.config.max_requests
    return texts


@pytest.mark.parametrize(
    "requests", [60, pytest.param(300, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.soak)]
)
def test_a_long_life_leaks_nothing_and_changes_no_text(requests: int):
    whole = plain_texts(KINDS, NEW)
    reasons = set()
    for which, text in live(requests, requests, "scheduled"):
        reasons.add(text.reason)
        if text.reason == "cancelled":
            assert text.tokens == whole[which][: len(text.tokens)]
        else:
            assert text.tokens == whole[which][: text.request.max_new_tokens]
    assert reasons == {"length", "cancelled"}


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
