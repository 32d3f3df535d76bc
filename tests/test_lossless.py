"""Losslessness by exact enumeration: one round's output law against the target's, for verifiers and schedules.

Every drafted block over a tiny vocabulary is enumerated; the chance to accept n drafts and the law of the token
after them come from the library's float32 rule functions, so nothing is sampled. The output of a round is
continued with the target's own law to G + 1 tokens, and must then be the target's joint law of G + 1 tokens.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.sampling import BlockSample
from dspark_jax.schedule import (
    admit_top,
    capacity_from_stale,
    prefix_schedule,
    prefix_survival,
    threshold_lengths,
)
from dspark_jax.verify import block_acceptance, inverse_map, next_law, token_acceptance

G, V, D2T = 3, 4, np.array([3, 0, 2])  # the draft knows three of the four tokens
BLOCKS = np.array(list(itertools.product(range(len(D2T)), repeat=G)))
TOKENS = D2T[BLOCKS]
SEQUENCES = np.array(list(itertools.product(range(V), repeat=G + 1)))
VERIFIERS = ("token", "block")
CURVES = {
    "smooth": [0.0, 1.0, 0.97, 0.9, 0.8, 0.66, 0.55, 0.5, 0.45],
    "staircase": [0.0, 1.0, 1.0, 0.6, 0.45, 0.45, 0.3, 0.3, 0.3],
    "free": [1.0] * 9,
}


class Tables(NamedTuple):
    """Laws by prefix: target [j][target ids], draft and confidence [j][draft ids] for j tokens already there."""

    target: list[np.ndarray]
    draft: list[np.ndarray]
    confidence: list[np.ndarray]


def make_tables(seed: int, concentration: float = 0.7) -> Tables:
    rng = np.random.default_rng(seed)

    def laws(prefix: tuple[int, ...], size: int) -> np.ndarray:
        weight = rng.gamma(concentration, size=(*prefix, size)) + 1e-3
        weight *= rng.random(weight.shape) > 0.15  # truncated laws have zeros
        weight[..., 0] += 1e-2
        return (weight / weight.sum(-1, keepdims=True)).astype(np.float32)

    size = len(D2T)
    chosen = [rng.choice([0.0, 0.3, 0.5, 0.8, 0.95, 1.0], size=(size,) * j) for j in range(G)]  # with ties and zeros
    return Tables([laws((V,) * j, V) for j in range(G + 1)], [laws((size,) * j, size) for j in range(G)], chosen)


def by_block(tables: Tables) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Target law, draft law and confidences along every block: [N, G+1, V], [N, G, Vd], [N, G]."""
    target = np.stack([tables.target[j][tuple(TOKENS[:, :j].T)] for j in range(1, G + 1)], 1)
    first = np.broadcast_to(tables.target[0], (len(BLOCKS), 1, V))
    draft = [np.broadcast_to(tables.draft[j][tuple(BLOCKS[:, :j].T)], (len(BLOCKS), len(D2T))) for j in range(G)]
    confidence = [np.broadcast_to(tables.confidence[j][tuple(BLOCKS[:, :j].T)], len(BLOCKS)) for j in range(G)]
    return np.concatenate([first, target], 1), np.stack(draft, 1), np.stack(confidence, 1).astype(np.float32)


def block_weights(draft_law: np.ndarray) -> np.ndarray:
    chances = np.take_along_axis(draft_law.astype(np.float64), BLOCKS[:, :, None], 2)
    return chances[..., 0].prod(1)


def target_chance(tables: Tables, start: int) -> np.ndarray:
    """Chance of each sequence's tokens from `start` on, given those before."""
    chances = [tables.target[j][tuple(SEQUENCES[:, : j + 1].T)].astype(np.float64) for j in range(start, G + 1)]
    return np.prod(chances, axis=0)


@jax.jit
def token_rule(target_law, draft, lengths, t2d):
    accept, weight = token_acceptance(target_law, draft, lengths)
    return accept, [next_law(target_law, draft, lengths, jnp.full_like(lengths, n), weight, t2d) for n in range(G + 1)]


@jax.jit
def block_rule(target_law, draft, lengths, t2d):
    accept, weight = block_acceptance(target_law, draft, lengths, t2d)
    return accept, [next_law(target_law, draft, lengths, jnp.full_like(lengths, n), weight, t2d) for n in range(G + 1)]


@jax.jit
def block_rule_with_token_residual(target_law, draft, lengths, t2d):
    accept, weight = block_acceptance(target_law, draft, lengths, t2d)
    ones = jnp.ones_like(weight)
    return accept, [next_law(target_law, draft, lengths, jnp.full_like(lengths, n), ones, t2d) for n in range(G + 1)]


RULES = {"token": token_rule, "block": block_rule, "block, token-wise residual": block_rule_with_token_residual}


def accepted_chances(rule: str, accept: np.ndarray) -> np.ndarray:
    """P(n drafts accepted) [rows, G+1]: the first failure ends a token-wise run, the last success a block's."""
    ones = np.ones((len(accept), 1))
    if rule == "token":
        return np.cumprod(np.hstack([ones, accept]), 1) * np.hstack([1 - accept, ones])
    fails_after = np.cumprod(np.hstack([ones, 1 - accept[:, ::-1]]), 1)[:, ::-1]
    return np.hstack([ones, accept]) * fails_after


def round_outputs(rule: str, tables: Tables, draft_law: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """For every block and length: law over SEQUENCES [N, G+1, V^(G+1)] and expected accepted drafts [N, G+1]."""
    count = len(BLOCKS)
    target_law, tokens, ids = (np.repeat(x, G + 1, 0) for x in (by_block(tables)[0], TOKENS, BLOCKS))
    law = None if draft_law is None else jnp.asarray(np.repeat(draft_law, G + 1, 0))
    lengths = jnp.asarray(np.tile(np.arange(G + 1), count))
    draft = BlockSample(jnp.asarray(tokens), jnp.asarray(ids), law)
    accept, after = RULES[rule](jnp.asarray(target_law), draft, lengths, inverse_map(jnp.asarray(D2T), V))
    chances = accepted_chances(rule, np.asarray(accept, np.float64))
    outputs = np.zeros((len(tokens), len(SEQUENCES)))
    for n in range(G + 1):
        same = np.all(tokens[:, None, :n] == SEQUENCES[None, :, :n], axis=2)
        emitted = np.asarray(after[n], np.float64)[:, SEQUENCES[:, n]]
        outputs += chances[:, n : n + 1] * same * emitted * (target_chance(tables, n + 1) if n < G else 1.0)
    return outputs.reshape(count, G + 1, -1), (chances @ np.arange(G + 1)).reshape(count, G + 1)


def total_variation(law: np.ndarray, expected: np.ndarray) -> float:
    return 0.5 * float(np.abs(law - expected).sum())


def output_error(outputs: np.ndarray, weights: np.ndarray, lengths: np.ndarray, tables: Tables) -> float:
    law = weights @ outputs[np.arange(len(weights)), lengths]
    return total_variation(law, target_chance(tables, 0))


def expected_rate(confidence, curve):
    """Survivals and expected tokens a second for 0, 1, ... admitted drafts, largest survivals first."""
    survival = prefix_survival(confidence)
    best = jnp.concatenate([jnp.zeros(1), jnp.cumsum(-jnp.sort(-survival.reshape(-1)))])
    rows = confidence.shape[0]
    return survival, (rows + best) * jnp.asarray(curve, jnp.float32)[rows : rows + best.shape[0]]


def anticipating(curve):
    """The tempting, wrong rule: the best length by the current confidences."""

    def lengths(confidence):
        survival, rate = expected_rate(confidence, curve)
        return admit_top(survival, jnp.argmax(rate))

    return lengths


def looks_at_its_own_token(confidence):
    """Wrong: c_{k+1}, computed from draft k, gates draft k."""
    return threshold_lengths(jnp.concatenate([confidence[:, 1:], confidence[:, :1]], axis=1), 0.6)


def stale_capacity() -> int:
    stale = np.array([[0.9, 0.6, 0.2], [0.5, 0.4, 0.1]])
    return capacity_from_stale(stale, [1.0, 1.05, 1.1, 1.7], [2, 4, 5, 8])


LOSSLESS = {
    "nothing": lambda c: jnp.zeros(2, jnp.int32),
    "fixed 2, 3": lambda c: jnp.array([2, 3]),
    "fixed 3, 1": lambda c: jnp.array([3, 1]),
    "threshold": lambda c: threshold_lengths(c, 0.6),
    **{f"algorithm 1, {name}": (lambda c, curve=curve: prefix_schedule(c, curve)) for name, curve in CURVES.items()},
    "stale capacity": lambda c: admit_top(prefix_survival(c), stale_capacity()),
    **{f"capacity {n}": (lambda c, n=n: admit_top(prefix_survival(c), n)) for n in (1, 2, 4, 6)},
}
ANTICIPATING = {
    "global argmax, smooth": anticipating(CURVES["smooth"]),
    "global argmax, staircase": anticipating(CURVES["staircase"]),
    "gate sees its token": looks_at_its_own_token,
}


PAIRS = np.array(list(itertools.product(range(len(BLOCKS)), repeat=2)))
REQUESTS = [make_tables(16), make_tables(17)]


@functools.cache
def request_outputs(rule: str, r: int) -> np.ndarray:
    return round_outputs(rule, REQUESTS[r], by_block(REQUESTS[r])[1])[0]


@functools.cache
def shared_lengths(schedule) -> np.ndarray:
    """Lengths of both requests [pairs of blocks, 2]."""
    confidence = np.stack([by_block(REQUESTS[r])[2][PAIRS[:, r]] for r in range(2)], 1)
    return np.asarray(jax.jit(jax.vmap(schedule))(confidence))


def joint_error(rule: str, schedule) -> float:
    """Two requests share a schedule; the error of the joint law of both outputs."""
    lengths = shared_lengths(schedule)
    weights = np.prod([block_weights(by_block(REQUESTS[r])[1])[PAIRS[:, r]] for r in range(2)], axis=0)
    joint = np.zeros((len(SEQUENCES), len(SEQUENCES)))
    for pair in itertools.product(range(G + 1), repeat=2):  # blocks drafted with these lengths: a weight matrix
        weight = np.where(np.all(lengths == pair, axis=1), weights, 0.0).reshape(len(BLOCKS), len(BLOCKS))
        joint += request_outputs(rule, 0)[:, pair[0]].T @ weight @ request_outputs(rule, 1)[:, pair[1]]
    return total_variation(joint, np.outer(target_chance(REQUESTS[0], 0), target_chance(REQUESTS[1], 0)))


@pytest.mark.parametrize("rule", VERIFIERS)
@pytest.mark.parametrize("name", LOSSLESS)
def test_schedule_keeps_the_joint_law_of_two_requests(rule, name):
    assert joint_error(rule, LOSSLESS[name]) < 1e-6


@pytest.mark.parametrize("rule", VERIFIERS)
@pytest.mark.parametrize("name", ANTICIPATING)
def test_anticipating_schedule_is_caught(rule, name):
    assert joint_error(rule, ANTICIPATING[name]) > 1e-3


@pytest.mark.parametrize(("schedule", "chance_of_a"), [(anticipating, 0.85), (None, 0.7)])
def test_counterexample_of_the_paper(schedule, chance_of_a):
    """Appendix A: one request, two drafts, p = (.7, .3), q = (.5, .5); c_2 is .9 after A and 0 after B."""
    curve = [0.0, 1.0, 0.5, 0.45]
    tokens = jnp.array(list(itertools.product(range(2), repeat=2)))
    confidence = jnp.stack([jnp.full(4, 0.8), jnp.where(tokens[:, 0] == 0, 0.9, 0.0)], 1)[:, None]
    rule = schedule(curve) if schedule else lambda c: prefix_schedule(c, curve)
    lengths = jax.jit(jax.vmap(rule))(confidence)[:, 0]
    target_law = jnp.broadcast_to(jnp.array([0.7, 0.3]), (4, 3, 2))
    draft = BlockSample(tokens, tokens, jnp.full((4, 2, 2), 0.5))
    accept, weight = jax.jit(token_acceptance)(target_law, draft, lengths)
    after = jax.jit(next_law)(target_law, draft, lengths, jnp.zeros(4, jnp.int32), weight)[:, 0]
    emits_a = jnp.where(tokens[:, 0] == 0, accept[:, 0], 0.0) + (1 - accept[:, 0]) * after
    assert float(jnp.mean(emits_a)) == pytest.approx(chance_of_a, abs=1e-6)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2**31), st.floats(0.2, 3.0), st.lists(st.booleans(), min_size=13, max_size=13))
def test_any_stopping_rule_is_lossless_and_block_accepts_no_less(seed, concentration, gates):
    """Draft k goes under verification if a table over x_<k, any table, says so."""
    tables = make_tables(seed, concentration)
    draft_law = by_block(tables)[1]
    weights = block_weights(draft_law)
    opened = np.stack(
        [np.full(27, gates[0]), np.array(gates[1:4])[BLOCKS[:, 0]], np.array(gates[4:])[BLOCKS[:, :2] @ [3, 1]]]
    )
    lengths = np.cumprod(opened, axis=0).sum(0)
    accepted = {}
    for rule in VERIFIERS:
        outputs, expected = round_outputs(rule, tables, draft_law)
        assert output_error(outputs, weights, lengths, tables) < 1e-6
        accepted[rule] = [float(weights @ expected[np.arange(27), x]) for x in (lengths, np.full(27, 1))]
    assert accepted["block"][0] >= accepted["token"][0] - 1e-6
    assert accepted["block"][1] == pytest.approx(accepted["token"][1], abs=1e-6)


def test_block_verification_accepts_more_here():
    tables = make_tables(11)
    draft_law = by_block(tables)[1]
    token, block = (block_weights(draft_law) @ round_outputs(rule, tables, draft_law)[1][:, G] for rule in VERIFIERS)
    assert block > token + 0.005


def test_block_verification_with_the_token_wise_residual_is_caught():
    tables = make_tables(11)
    draft_law = by_block(tables)[1]
    outputs, _ = round_outputs("block, token-wise residual", tables, draft_law)
    assert output_error(outputs, block_weights(draft_law), np.full(27, G), tables) > 1e-3


@pytest.mark.parametrize("rule", VERIFIERS)
def test_greedy_drafts_at_positive_temperature(rule):
    """The law of a greedy draft is one-hot: exact with it, biased with the softmax it was the argmax of."""
    tables = make_tables(13)
    draft_law = by_block(tables)[1]
    weights = np.all(draft_law.argmax(2) == BLOCKS, axis=1).astype(np.float64)
    assert weights.sum() == 1
    for length in range(G + 1):
        lengths = np.full(27, length)
        one_hot = output_error(round_outputs(rule, tables, None)[0], weights, lengths, tables)
        softmax = output_error(round_outputs(rule, tables, draft_law)[0], weights, lengths, tables)
        assert one_hot < 1e-6
        assert length == 0 or softmax > 1e-2


@pytest.mark.parametrize("rule", VERIFIERS)
@pytest.mark.parametrize("broken", range(G))
def test_nan_draft_law_falls_back_to_the_target(rule, broken):
    tables = make_tables(14)
    draft_law = by_block(tables)[1].copy()
    drawn = draft_law.copy()
    drawn[:, broken] = [0.2, 0.5, 0.3]  # whatever token came out of the broken row
    draft_law[:, broken] = np.nan
    outputs, expected = round_outputs(rule, tables, draft_law)
    assert output_error(outputs, block_weights(drawn), np.full(27, G), tables) < 1e-6
    assert expected[:, G].max() <= broken + 1e-6
