"""Training with other sequential heads, and the start of W1 and W2 from a corpus."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dspark_jax import ConfigError
from dspark_jax.config import TrainSettings
from dspark_jax.config_files import load_config
from train import bigrams, data, setup
from train.conversations import Record
from train.evaluate import to_batch
from train.step import train_step

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "tiny.py"
KDA = {"markov_head_type": "kda", "cell_heads": 2, "cell_size": 4}
DOMINO = {"markov_head_type": "domino", "cell_size": 8}


def run_of(start: str = "random", **draft: Any) -> setup.Run:
    config = load_config(CONFIG)
    train = dataclasses.replace(config.train, markov_init=start, accumulation_steps=1)
    return setup.build(dataclasses.replace(config, train=train, draft=dataclasses.replace(config.draft, **draft)), None)


@pytest.mark.slow
@pytest.mark.parametrize("draft", [KDA, DOMINO], ids=["kda", "domino"])
def test_training_lowers_the_loss_and_moves_the_head(draft: dict[str, Any]) -> None:
    run = run_of(**draft)
    rows = [data.element((record,), run.shapes[0], np.random.default_rng(3)) for record in run.train[:4]]
    batch = to_batch(jax.tree.map(lambda *leaves: np.stack(leaves), *rows))
    state, losses = run.first_state(), []
    before = {key: np.asarray(x) for key, x in state.params["markov"].items()}
    for _ in range(8):
        state, metrics = train_step(run.models, run.mesh, state, run.weights, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.97 * losses[1]
    assert all(np.any(np.asarray(x) != before[key]) for key, x in state.params["markov"].items())


def record(tokens: list[int], supervised_from: int) -> Record:
    own = np.arange(len(tokens)) >= supervised_from
    return Record(np.asarray(tokens, np.int32), own, 0, 0.5, True, False, 0)


def test_factors_of_a_corpus_are_its_smoothed_bigram_law() -> None:
    rng = np.random.default_rng(11)
    records = [record(rng.integers(2, 9, 50).tolist(), 5) for _ in range(20)]
    chosen = np.asarray([0, 2, 3, 4, 5, 7, 8, *range(10, 20)], np.int32)  # 6 is outside, most are never seen
    w1, w2 = bigrams.bigram_factors(records, 14, 40, chosen, seed=0)
    pairs = [(r.tokens[i - 1], r.tokens[i]) for r in records for i in range(5, 50) if r.tokens[i] != 6]
    counts = np.zeros((40, len(chosen)))
    for a, b in pairs:
        counts[a, np.flatnonzero(chosen == b)[0]] += 1
    unigram = counts.sum(axis=0) / counts.sum()
    wanted = (counts + 10 * unigram) / (counts.sum(axis=1, keepdims=True) + 10)
    seen = unigram > 0
    law = unigram[seen] * np.exp(w1 @ w2.T)[:, seen]
    np.testing.assert_allclose(law / law.sum(axis=1, keepdims=True), wanted[:, seen], atol=1e-2)
    again = bigrams.bigram_factors(records, 14, 40, chosen, seed=0)
    np.testing.assert_array_equal(w1, again[0])
    np.testing.assert_array_equal(w2, again[1])


@pytest.mark.slow
def test_a_run_starts_from_its_corpus() -> None:
    run = run_of("corpus")
    markov = run.first_state().params["markov"]
    w1, w2 = bigrams.bigram_factors(run.train, 8, 512, run.draft_vocabulary, run.config.train.seed)
    np.testing.assert_array_equal(markov["w1"], w1)
    np.testing.assert_array_equal(markov["w2"], w2)
    assert np.any(np.asarray(run.first_state(resumed=True).params["markov"]["w1"]) != w1)


@pytest.mark.parametrize("draft", [{"markov_rank": 0}, {"markov_tied": True}, {"markov_head_type": "domino"}])
def test_a_corpus_cannot_start_what_has_no_two_factors(draft: dict[str, Any]) -> None:
    config = load_config(CONFIG)
    with pytest.raises(ConfigError, match="markov_init = 'corpus' fills W1 and W2"):
        dataclasses.replace(
            config,
            train=dataclasses.replace(config.train, markov_init="corpus"),
            draft=dataclasses.replace(config.draft, **draft),
        )
    with pytest.raises(ConfigError, match="markov_init = 'corpus' and start_from = 'x'"):
        dataclasses.replace(config, train=TrainSettings(max_steps=1, markov_init="corpus", start_from="x"))
