"""Temperature above 0 through the engine: thousands of short texts against the target's exact law (chi-square).

As test_generate_law, with what only the engine has: shortlists, packed verification, capacities taken from earlier
rounds, four kinds of request in one batch. A schedule that looks at the token it decides about has to fail.
"""

import functools
from typing import Literal

import jax.numpy as jnp
import numpy as np
import pytest
from test_generate_law import DRAFTERS, KINDS, PROMPT, TARGET, V, exact_laws, p_value

from serve import rounds
from serve.curves import Curves
from serve.engine import Engine, EngineConfig
from serve.scheduler import Request
from serve.server import Server

pytestmark = pytest.mark.slow  # half a minute each
REQUESTS = 8


@functools.cache
def engine(drafter: str, verify: Literal["token", "block"], shortlist: int) -> Engine:
    return Engine(
        TARGET,
        DRAFTERS[drafter],
        EngineConfig(
            max_requests=REQUESTS, request_sizes=(REQUESTS,), max_context=16, page_size=8, prefill_lengths=(4,),
            verify=verify, shortlist=shortlist,
        ),
    )  # fmt: skip


def p_values(made: Engine, samples: int, policy: str = "scheduled") -> tuple[np.ndarray, float]:
    """For each kind p of the first token, of the first two and of the second two; and drafts verified a round."""
    tokens = made.token_buckets[REQUESTS][0]
    made.compile([("prefill", 4), ("plain", REQUESTS), *[("round", REQUESTS, t) for t in made.token_buckets[REQUESTS]]])
    # Time jumps after the first bucket, so that capacity is always scarce.
    seconds = {
        (REQUESTS, t, s): 1e-3 if t <= tokens else 1.0
        for t in (0, *made.token_buckets[REQUESTS])
        for s in (False, True)
    }
    server = Server(made, policy, Curves(seconds))
    texts = [server.submit(Request(tuple(PROMPT), 3, KINDS[i % 4], seed=1000 + i)) for i in range(samples)]
    server.run()
    everything = np.array([text.tokens for text in texts])
    values = []
    for kind, law in enumerate(exact_laws()):
        counts = np.zeros((V, V, V))
        np.add.at(counts, tuple(everything[kind::4].T), 1)
        values += [p_value(counts.sum((1, 2)), law.sum((1, 2))), p_value(counts.sum(2), law.sum(2))]
        values.append(p_value(counts.sum(0), law.sum(0)))
    return np.array(values), server.totals.verified / server.totals.rounds


@pytest.mark.parametrize(
    ("drafter", "verify", "shortlist", "samples"),
    [
        ("whole", "token", 6, 20_480),
        ("reduced", "block", 4, 20_480),
    ],
)
def test_scheduled_serving_follows_the_targets_law(
    drafter: str, verify: Literal["token", "block"], shortlist: int, samples: int
):
    values, verified = p_values(engine(drafter, verify, shortlist), samples)
    assert values.min() > 1e-3, values
    assert verified > 2, "nothing was at stake"


def test_a_schedule_that_looks_at_its_own_token_is_caught(monkeypatch: pytest.MonkeyPatch):
    """It verifies a draft only if it likes the token: legal for speed, fatal for the law."""

    def anticipating(drafted, slot_R, num_slots, knobs, num_tokens):
        likes_RG = (drafted.sample.tokens_RG % 2).astype(jnp.int32)
        lengths_R = jnp.sum(jnp.cumprod(likes_RG, axis=1), axis=1, dtype=jnp.int32)
        return jnp.minimum(lengths_R, num_tokens // slot_R.shape[0] - 1)

    monkeypatch.setattr(rounds, "choose", anticipating)
    values, _ = p_values(engine.__wrapped__("whole", "token", 5), 4096)
    first, pairs = values[::3], values[1::3]
    assert first.min() > 1e-3, "the first token comes from the target alone"
    assert pairs.max() < 1e-6, values
