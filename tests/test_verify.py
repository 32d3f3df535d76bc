"""The rules by hand-computed numbers, and the sampled functions, drafting included, by chi-square.

The proof that the rules are lossless is the enumeration in test_lossless.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from dspark_jax import verify
from dspark_jax.sampling import BlockSample, SamplingRows, request_law, sample_block
from dspark_jax.schedule import threshold_lengths
from dspark_jax.verify import inverse_map

VERIFY = {"token": jax.jit(verify.verify_tokens), "block": jax.jit(verify.verify_block)}
token_acceptance, block_acceptance, next_law, verify_greedy = map(
    jax.jit, (verify.token_acceptance, verify.block_acceptance, verify.next_law, verify.verify_greedy)
)
V, G, ROWS = 4, 3, 20_000
D2T = np.array([2, 0, 3])


def example() -> tuple[jax.Array, BlockSample]:
    """One row, two drafts (tokens 0 then 1), three tokens."""
    target = jnp.array([[[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]]])
    tokens = jnp.array([[0, 1]])
    return target, BlockSample(tokens, tokens, jnp.array([[[0.8, 0.1, 0.1], [0.3, 0.4, 0.3]]]))


def test_token_rule_by_hand():
    target, draft = example()
    accept, weight = token_acceptance(target, draft, jnp.array([2]))
    np.testing.assert_allclose(accept, [[0.5 / 0.8, 1.0]], rtol=1e-6)
    law = next_law(target, draft, jnp.array([2]), jnp.array([0]), weight)
    np.testing.assert_allclose(law, [[0.0, 2 / 3, 1 / 3]], rtol=1e-6)


def test_block_rule_by_hand():
    target, draft = example()
    accept, weight = block_acceptance(target, draft, jnp.array([2]))
    m1 = 0.625
    mass = max(m1 * 0.6 - 0.4, 0)  # -0.025, and the other tokens are below q too: no residual
    m2 = m1 * 1.5
    np.testing.assert_allclose(weight, [[1.0, m1, m2]], rtol=1e-6)
    np.testing.assert_allclose(accept, [[mass / (mass + 1 - m1), m2]], rtol=1e-6)
    np.testing.assert_allclose(next_law(target, draft, jnp.array([2]), jnp.array([2]), weight), target[:, 2], rtol=1e-6)


def test_block_rule_at_length_one_is_the_token_rule():
    target, draft = example()
    for length in (0, 1):
        token = token_acceptance(target, draft, jnp.array([length]))
        block = block_acceptance(target, draft, jnp.array([length]))
        np.testing.assert_allclose(token.accept_RG, block.accept_RG, rtol=1e-6)


def test_vanishing_residual_draws_from_the_target():
    law = jnp.array([[[0.25, 0.75], [0.5, 0.5]]])
    draft = BlockSample(jnp.array([[0]]), jnp.array([[0]]), law[:, :1])
    emitted = next_law(law, draft, jnp.array([1]), jnp.array([0]), jnp.ones((1, 2)))
    np.testing.assert_array_equal(emitted, law[:, 0])


def test_reduced_vocabulary_equals_the_scattered_law():
    rng = np.random.default_rng(0)
    target = jnp.asarray(rng.dirichlet(np.ones(V), (5, G + 1)).astype(np.float32))
    law = rng.dirichlet(np.ones(3), (5, G)).astype(np.float32)
    ids = rng.integers(0, 3, (5, G))
    dense = np.zeros((5, G, V), np.float32)
    dense[:, :, D2T] = law
    lengths, accepted = jnp.array([0, 1, 2, 3, 3]), jnp.array([0, 0, 1, 1, 2])
    reduced = BlockSample(jnp.asarray(D2T[ids]), jnp.asarray(ids), jnp.asarray(law))
    scattered = BlockSample(jnp.asarray(D2T[ids]), jnp.asarray(D2T[ids]), jnp.asarray(dense))
    t2d = inverse_map(jnp.asarray(D2T), V)
    np.testing.assert_array_equal(t2d, [1, -1, 0, 2])
    one = block_acceptance(target, reduced, lengths, t2d)
    other = block_acceptance(target, scattered, lengths)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), one, other)
    np.testing.assert_allclose(
        next_law(target, reduced, lengths, accepted, one.weight_RG1, t2d),
        next_law(target, scattered, lengths, accepted, other.weight_RG1),
        rtol=1e-5,
        atol=1e-7,
    )


@pytest.mark.parametrize("verifier", VERIFY)
def test_rows_past_a_length_and_broken_rows_touch_nothing_else(verifier):
    rng = np.random.default_rng(1)
    target = rng.dirichlet(np.ones(V), (4, G + 1)).astype(np.float32)
    law = rng.dirichlet(np.ones(V), (4, G)).astype(np.float32)
    ids = rng.integers(0, V, (4, G))
    lengths = jnp.array([0, 1, 2, 3])
    keys = jax.random.split(jax.random.key(0), (2, 4))
    run = VERIFY[verifier]
    clean = run(keys[0], keys[1], target, BlockSample(jnp.asarray(ids), jnp.asarray(ids), jnp.asarray(law)), lengths)
    for row in range(3):
        target[row, row + 1 :] = np.nan
        law[row, row:] = np.nan
    target[3] = np.nan  # a request whose target law broke is its own problem
    dirty = run(keys[0], keys[1], target, BlockSample(jnp.asarray(ids), jnp.asarray(ids), jnp.asarray(law)), lengths)
    np.testing.assert_array_equal(clean.accepted_R[:3], dirty.accepted_R[:3])
    np.testing.assert_array_equal(clean.next_token_R[:3], dirty.next_token_R[:3])
    assert int(dirty.accepted_R[3]) == 0
    assert 0 <= int(dirty.next_token_R[3]) < V


@given(st.integers(0, 2**31), st.booleans())
def test_all_three_rules_agree_at_temperature_zero(seed, implied):
    rng = np.random.default_rng(seed)
    argmax, ids = rng.integers(0, V, (4, G + 1)), rng.integers(0, V, (4, G))
    ids[::2] = argmax[::2, :G]
    lengths = jnp.asarray(rng.integers(0, G + 1, 4))
    expected = verify_greedy(jnp.asarray(argmax), jnp.asarray(ids), lengths)
    law = None if implied else jnp.asarray(np.eye(V, dtype=np.float32)[ids])
    draft = BlockSample(jnp.asarray(ids), jnp.asarray(ids), law)
    keys = jax.random.split(jax.random.key(seed), (2, 4))
    for rule in VERIFY.values():
        got = rule(keys[0], keys[1], jnp.asarray(np.eye(V, dtype=np.float32)[argmax]), draft, lengths)
        np.testing.assert_array_equal(got.accepted_R, expected.accepted_R)
        np.testing.assert_array_equal(got.next_token_R, expected.next_token_R)
    for row in range(4):
        n = 0
        while n < lengths[row] and argmax[row, n] == ids[row, n]:
            n += 1
        assert (int(expected.accepted_R[row]), int(expected.next_token_R[row])) == (n, argmax[row, n])


KINDS = [(1.0, 0, 1.0), (0.7, 2, 1.0), (1.4, 0, 0.7), (0.0, 0, 1.0)]  # temperature, top_k, top_p, mixed in one batch


@functools.cache
def decode_two(greedy_with_softmax: bool = False) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, np.ndarray]]:
    """Drafts ROWS blocks from random tables and verifies them: by verifier the first two tokens [ROWS, 2], the
    target's law of them by kind [4, V, V], by verifier the accepted counts. A round that emits one token is
    completed from the target.
    """
    rng = np.random.default_rng(7)
    target_logits = [jnp.asarray(rng.normal(0, 1.2, (V,) * j + (V,)).astype(np.float32)) for j in range(G + 1)]
    bias = jnp.asarray(rng.normal(0, 1.2, (V, 3)).astype(np.float32))
    confidence = jnp.asarray(rng.choice([0.3, 0.9], V, p=[0.3, 0.7]).astype(np.float32))
    temperature, top_k, top_p = (np.tile([kind[i] for kind in KINDS], ROWS // 4) for i in range(3))
    rows = SamplingRows(temperature.astype(np.float32), top_k.astype(np.int32), top_p.astype(np.float32))
    anchor = jnp.zeros(ROWS, jnp.int32)

    @jax.jit
    def run(key, rows):
        draft_key, *keys = jax.random.split(key, 3)
        draft = sample_block(
            lambda state, previous, _: (state, bias[previous]),
            None,
            anchor,
            jnp.zeros((ROWS, G, 3)),
            None,
            jax.random.split(draft_key, (ROWS, G)),
            rows,
            d2t_V=jnp.asarray(D2T),
            greedy=greedy_with_softmax,
        )
        before = jnp.concatenate([anchor[:, None], draft.tokens_RG[:, :-1]], 1)
        if greedy_with_softmax:
            draft = draft._replace(law_RGV=request_law(bias[before], *rows))
        logits = [jnp.broadcast_to(target_logits[0], (ROWS, V))]
        logits += [target_logits[j][tuple(draft.tokens_RG[:, i] for i in range(j))] for j in range(1, G + 1)]
        law = request_law(jnp.stack(logits, 1), *rows)
        lengths = threshold_lengths(confidence[before], 0.5)
        accept_key, next_key = (jax.random.split(key, ROWS) for key in keys)
        t2d = inverse_map(jnp.asarray(D2T), V)
        return draft.tokens_RG, {
            name: rule(accept_key, next_key, law, draft, lengths, t2d) for name, rule in VERIFY.items()
        }

    drafts, verdicts = run(jax.random.key(3), rows)
    first_law, second_law = (
        np.asarray(request_law(jnp.broadcast_to(target_logits[j], (4, *(V,) * (j + 1))), *(x[:4] for x in rows)))
        for j in range(2)
    )
    tokens = {}
    for name, (accepted, emitted) in verdicts.items():
        first = np.where(accepted > 0, drafts[:, 0], emitted)
        cumulative = np.cumsum(second_law[np.arange(ROWS) % 4, first], axis=1)
        spare = np.argmax(cumulative > rng.random((ROWS, 1)) * cumulative[:, -1:], axis=1)
        second = np.where(accepted > 1, drafts[:, 1], np.where(accepted == 1, emitted, spare))
        tokens[name] = np.stack([first, second], 1)
    accepted = {name: np.asarray(verdict.accepted_R) for name, verdict in verdicts.items()}
    return tokens, first_law[:, :, None] * second_law, accepted


def p_value(tokens: np.ndarray, law: np.ndarray) -> float:
    counts = np.bincount(tokens @ [V, 1], minlength=V * V)
    possible = law.reshape(-1) > 0
    if counts[~possible].any():
        return 0.0
    expected = law.reshape(-1)[possible].astype(np.float64)
    return (
        float(chisquare(counts[possible], expected / expected.sum() * counts.sum()).pvalue)
        if possible.sum() > 1
        else 1.0
    )


@pytest.mark.slow
@pytest.mark.parametrize("verifier", VERIFY)
def test_sampled_token_pairs_follow_the_target(verifier):
    tokens, law, accepted = decode_two()
    assert set(np.unique(accepted[verifier])) == set(range(G + 1))
    for kind in range(4):
        assert p_value(tokens[verifier][kind::4], law[kind]) > 1e-3, KINDS[kind]


def test_block_verification_accepts_no_less_when_sampled():
    accepted = decode_two()[2]
    assert accepted["block"].mean() >= accepted["token"].mean()


@pytest.mark.slow
def test_the_sampled_check_has_the_power_to_fail():
    tokens, law, _ = decode_two(greedy_with_softmax=True)
    assert all(p_value(tokens[name][0::4], law[0]) < 1e-9 for name in VERIFY)
