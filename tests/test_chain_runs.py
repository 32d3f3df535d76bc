"""EAGLE-3 and MTP through what runs every drafter: `generate`, the engine, the training step."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafter_runs import losses_of_a_few_steps, served
from tiny import good_chain, make_target, random_tokens

from dspark_jax import ConfigError, generate, load_drafter
from dspark_jax.config import DraftSettings, drafter_config
from dspark_jax.config_files import load_config
from train.main import main
from train.tiny import tiny_target

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "tiny_eagle3.py"
TARGET = make_target(mixing=0.15)
PROMPTS = [random_tokens(i, length).tolist() for i, length in enumerate((1, 3, 12, 20))]
NEW = 12


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [one.tokens for one in generate(TARGET, None, PROMPTS, NEW)]


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_greedy_text_is_the_targets_own(name: str, plain: list[list[int]]) -> None:
    """Whether the drafter is good or its weights are nonsense."""
    good = good_chain(TARGET, name)
    texts = generate(TARGET, good, PROMPTS, NEW)
    assert [one.tokens for one in texts] == plain
    assert np.mean([r.accepted for one in texts for r in one.rounds]) > 1
    nonsense = dataclasses.replace(good, params=jax.tree.map(jnp.flip, good.params))
    assert [one.tokens for one in generate(TARGET, nonsense, PROMPTS, NEW)] == plain


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_the_engine_writes_the_same_text(name: str, plain: list[list[int]]) -> None:
    for texts in served(TARGET, good_chain(TARGET, name), PROMPTS, NEW, 1e-4):
        assert [text.tokens for text in texts] == plain
        assert sum(text.accepted for text in texts) > 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_a_few_steps_lower_the_loss(name: str) -> None:
    config = load_config(CONFIG)
    draft = config.draft if name == "eagle3" else DraftSettings(algorithm="mtp", block_size=2)
    losses = losses_of_a_few_steps(dataclasses.replace(config, draft=draft))
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.97 * losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--draft.algorithm", "mtp", "--draft.num-taps", "0"]], ids=["eagle3", "mtp"])
def test_a_run_writes_a_drafter_that_loads(tmp_path: Path, more: list[str]) -> None:
    """From the command line: trained, measured on held-out prompts, written, read."""
    short = {"max-steps": 4, "eval-every": 4, "eval-prompts": 2, "eval-tokens": 8}
    more = [*(f"--train.{name}={value}" for name, value in short.items()), *more]
    assert main(["--config", str(CONFIG), "--workdir", str(tmp_path / "run"), *more]) == 0
    drafter = load_drafter(tmp_path / "run" / "drafter_best", tiny_target())
    assert (drafter.config.algorithm, drafter.config.num_drafts) == ("mtp" if "mtp" in more else "eagle3", 3)
    assert drafter.config.draft_vocab_size == 300


TINY = TARGET.config


def test_settings_become_the_drafter_they_describe() -> None:
    eagle3 = drafter_config(DraftSettings(algorithm="eagle3", target_layer_ids=(-1, 0)), TINY)
    assert (eagle3.num_layers, eagle3.mask_token_id, eagle3.markov_rank, eagle3.num_drafts) == (1, -1, 0, 7)
    assert eagle3.confidence_head and not eagle3.confidence_with_markov
    mtp = drafter_config(DraftSettings(algorithm="mtp", block_size=1), TINY)
    assert (mtp.target_layer_ids, mtp.num_drafts) == ((), 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"markov_rank": 8}, "draft markov_rank = 8: eagle3 drafters have 0; leave it out"),
        ({"num_layers": 2}, "draft num_layers = 2: eagle3 drafters have 1"),
        ({"mask_token_id": 39}, "draft mask_token_id = 39: eagle3 drafters have -1"),
        ({"selector_rank": 8}, "draft selector_rank = 8: eagle3 drafters have 0"),
        (
            {"algorithm": "dflash2", "markov_head_type": "kda"},
            "markov_head_type = 'kda': dflash2 drafters have 'vanilla'",
        ),
        ({"algorithm": "dspark", "selector_top_k": 3}, "draft selector_top_k = 3: dspark drafters have 0"),
        ({"layout": "fill_in"}, "draft layout = 'fill_in'"),
        ({"algorithm": "mtp", "target_layer_ids": (0,)}, r"draft target_layer_ids = \(0,\): mtp drafters have \(\)"),
        ({"algorithm": "mtp", "num_taps": 3}, "draft num_taps = 3: mtp drafters have 0"),
        ({"algorithm": "dspark", "markov_rank": 4}, "mask_token_id = -1 is outside"),
    ],
)
def test_settings_that_are_not_used_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drafter_config(DraftSettings(**({"algorithm": "eagle3", "target_layer_ids": (0,)} | settings)), TINY)
