"""Numbers that are none: they end the request whose text they would change, and nothing else."""

import dataclasses

import jax.numpy as jnp
from test_engine import DRAFTER, SMALL, TARGET, curves, engine, prompts
from tiny import timeless

from dspark_jax import kv_cache
from dspark_jax.kv_cache import Packing, PagedLayer
from serve.engine import Engine
from serve.scheduler import Request
from serve.server import Server


def test_what_is_not_finite_never_reaches_a_page():
    packing = Packing(*(jnp.zeros(shape, jnp.int32) for shape in ((4,), (4,), (1, 4), (1, 1))))
    pages = kv_cache.empty_pages(2, 2, 16, 8, jnp.dtype(jnp.float32))
    k_1TKH = jnp.full((1, 4, 2, 8), jnp.nan)
    written = PagedLayer(*pages, packing).append(k_1TKH, k_1TKH / 0, jnp.arange(4)[None])
    assert not jnp.any(written.k_PKHp) and not jnp.any(written.v_PKpH)


def with_nan(token: int) -> Engine:
    """Of a target whose embedding of one token is not a number."""
    params = TARGET.params | {"embed": TARGET.params["embed"].at[token].set(jnp.nan)}
    made = Engine(dataclasses.replace(TARGET, params=params), DRAFTER, SMALL)
    made.compile()
    return made


def test_a_prompt_with_nan_in_its_middle_ends_with_an_error():
    """The last row's own logits are finite: what the cache stores of the row before it is."""
    server = Server(with_nan(7), "off", None)
    texts = [server.submit(Request(p, 8)) for p in ((1, 2, 3, 7, 5, 6), (1, 2, 3, 4, 5, 6))]
    server.run()
    assert [text.reason for text in texts] == ["error", "length"]


def test_a_draft_that_falls_harms_nobody():
    """Its row may be not a number: plain decoding does not compute it."""
    healthy = Server(engine(), "fixed:4", curves(), timeless)
    text = healthy.submit(Request(prompts(4)[0], 12))
    healthy.run()
    fallen = [round_.draft[round_.accepted] for round_ in text.rounds if round_.accepted < len(round_.draft)]
    token = next(token for token in fallen if token not in (*text.request.prompt, *text.tokens))
    server = Server(with_nan(token), "fixed:4", curves(), timeless)
    again = server.submit(Request(prompts(4)[0], 12))
    server.run()
    assert (again.reason, again.tokens) == ("length", text.tokens)
