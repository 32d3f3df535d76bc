"""Temperature above 0 through `generate`: thousands of short texts against the target's exact law (chi-square).

One prompt, four kinds of request mixed in each batch. The exact law of three tokens comes from `target.forward` on
every prefix, cut by a plain sorting version of top-k and top-p. The check must be able to fail, so a verifier that
accepts everything has to fail it.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2
from tiny import good_drafter, make_target

from dspark_jax import Drafter, SamplingParams, Target, generate
from dspark_jax import verify as verify_lib
from dspark_jax.verify import Acceptance

V = 12
TARGET = make_target(
    seed=3, mixing=0.5, vocab_size=V, d_model=16, d_ff=16, num_heads=2, num_kv_heads=1, head_dim=8, family="llama"
)
TARGET = dataclasses.replace(TARGET, params=TARGET.params | {"head": TARGET.params["head"] * 0.6})
DRAFTERS = {"whole": good_drafter(TARGET), "reduced": good_drafter(TARGET, np.array([0, 2, 3, 5, 6, 8, 9, 11]))}
KINDS = [
    SamplingParams(1.0),
    SamplingParams(1.0, top_k=4),
    SamplingParams(1.0, top_p=0.8),
    SamplingParams(0.7, top_k=7, top_p=0.95),
]
PROMPT = [4, 1, 7]
SAMPLES, BATCH = 24_576, 4096


def cut_law(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The law of one row of logits: softmax, the top k, then the fewest tokens with mass top_p."""
    law = np.exp((logits - logits.max()).astype(np.float64) / params.temperature)
    order = np.argsort(-law)
    if params.top_k:
        law[order[params.top_k :]] = 0
    law /= law.sum()
    before = np.cumsum(law[order]) - law[order]
    law[order[before >= params.top_p]] = 0
    return law / law.sum()


@functools.cache
def exact_laws() -> list[np.ndarray]:
    """For each kind the joint law of the first three tokens [V, V, V]."""
    pairs = np.stack(np.meshgrid(np.arange(V), np.arange(V), indexing="ij"), axis=-1).reshape(-1, 2)
    texts = np.concatenate([np.tile(PROMPT, (V * V, 1)), pairs], axis=1)
    logits = np.asarray(TARGET.forward(texts).logits_BSV)[:, len(PROMPT) - 1 :]
    laws = []
    for params in KINDS:
        first, second, third = (np.stack([cut_law(row, params) for row in logits[:, i]]) for i in range(3))
        joint = first[0][:, None] * second[::V]
        laws.append(joint[:, :, None] * third.reshape(V, V, V))
    return laws


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """Chi-square of counts against a law; cells too rare for it are joined, and impossible ones must be empty."""
    counts, expected = counts.ravel(), law.ravel() * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    often = expected >= 5
    observed = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1))


def p_values(
    target: Target, drafter: Drafter | None, verify, samples: int = SAMPLES, shortlist: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """For each kind p of the first token, of the first two and of the second two; and all accepted lengths."""
    kinds, sizes = KINDS * (samples // 4), {"batch_size": BATCH, "shortlist": shortlist}
    out = generate(target, drafter, [PROMPT] * samples, 3, kinds, 11, (), verify, **sizes)
    texts = np.array([generation.tokens for generation in out])
    values = []
    for kind, law in enumerate(exact_laws()):
        counts = np.zeros((V, V, V))
        np.add.at(counts, tuple(texts[kind::4].T), 1)
        values += [p_value(counts.sum((1, 2)), law.sum((1, 2))), p_value(counts.sum(2), law.sum(2))]
        values.append(p_value(counts.sum(0), law.sum(0)))
    return np.array(values), np.array([r.accepted for generation in out for r in generation.rounds])


@pytest.mark.slow
def test_plain_decoding_follows_the_targets_law():
    values, _ = p_values(TARGET, None, "token")
    assert values.min() > 1e-3, values


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["token", "block"])
@pytest.mark.parametrize(("drafter", "shortlist"), [("whole", 0), ("reduced", 0), ("reduced", 5)])
def test_drafted_decoding_follows_the_targets_law(drafter, shortlist, verify):
    values, accepted = p_values(TARGET, DRAFTERS[drafter], verify, shortlist=shortlist)
    assert values.min() > 1e-3, values
    assert 0.5 < accepted.mean() < 3.5, "drafts of every quality are needed for this to mean something"


@pytest.mark.slow
def test_a_verifier_that_accepts_everything_is_caught(monkeypatch):
    def accept_all(target_law_RG1V, draft, lengths_R):
        inside_RG = jnp.arange(draft.tokens_RG.shape[1])[None, :] < lengths_R[:, None]
        return Acceptance(inside_RG.astype(jnp.float32), jnp.ones(target_law_RG1V.shape[:2], jnp.float32))

    monkeypatch.setattr(verify_lib, "token_acceptance", accept_all)
    # Another name is another compiled program, so the broken one is never used elsewhere.
    broken = dataclasses.replace(TARGET, config=dataclasses.replace(TARGET.config, name="broken"))
    values, _ = p_values(broken, DRAFTERS["whole"], "token", BATCH)
    first, pairs = values[::3], values[1::3]
    assert first.min() > 1e-3, "the first token comes from the target alone"
    assert pairs.max() < 1e-6, values
