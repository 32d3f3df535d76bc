"""DFlash 2 through `python -m train.main`: every part learns, and what is written is served."""

import contextlib
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax import Drafter, load_drafter
from dspark_jax.config_files import load_config
from dspark_jax.drafters.drafter import frozen_parts
from dspark_jax.weights.drafter_files import open_drafter
from train.main import main
from train.step import init_state
from train.tiny import tiny_target

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "tiny.py"
DRAFT = """--draft.algorithm dflash2 --draft.layout fill_in --draft.block-size 5 --draft.layer-windows 64
    --draft.markov-rank 0 --draft.conv-group-size 8 --draft.selector-rank 8 --draft.selector-top-k 6
    --draft.selector-tied"""
LOSS = "--loss.ce 1 --loss.tv 0 --loss.base-ce 1 --optimizer.learning-rate 1e-2 --data.num-anchors 8"
TRAIN = """--train.max-steps 16 --train.log-every 2 --train.eval-every 16 --train.eval-prompts 2
    --train.eval-tokens 8"""
SETTINGS = f"{DRAFT} {LOSS} {TRAIN}"


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; what it printed lies beside it."""
    path = tmp_path_factory.mktemp("train") / "run"
    with path.with_suffix(".log").open("w") as log, contextlib.redirect_stdout(log):
        assert main(["--config", str(CONFIG), "--workdir", str(path), *SETTINGS.split()]) == 0
    return path


def test_the_loss_falls_and_drafts_are_measured(workdir: Path) -> None:
    shown = workdir.with_suffix(".log").read_text()
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", shown, re.MULTILINE)]
    assert np.mean(losses[-2:]) < 0.9 * np.mean(losses[:2])
    assert "drafter of 1 layers, 4 drafts a block" in shown
    assert re.search(r"accepted length [\d.]+ \(temperature 0\)", shown)


def test_every_part_learns(workdir: Path) -> None:
    trained = open_drafter(workdir / "drafter")
    assert "z-lab DFlash 2 format, DFlash 2, fill_in, 4 drafts a block" in trained.summary
    config = load_config(CONFIG)
    fresh = jax.jit(lambda: init_state(trained.config, config))().params
    assert jax.tree.map(np.shape, fresh) == jax.tree.map(np.shape, trained.params)
    for (path, before), after in zip(
        jax.tree_util.tree_leaves_with_path(fresh), jax.tree.leaves(trained.params), strict=True
    ):
        moved = np.abs(np.asarray(before) - np.asarray(after, np.float32)).max()
        assert moved > 1e-3, jax.tree_util.keystr(path)


def test_it_is_served_as_it_was_trained(workdir: Path) -> None:
    """Loaded, its tied codebooks are tables; the drafts are those of the weights that were trained."""
    target, trained = tiny_target(), open_drafter(workdir / "drafter")
    served = load_drafter(workdir / "drafter", target)
    assert (trained.config.selector_tied, served.config.selector_tied) == (True, False)
    params = jax.tree.map(lambda x: np.asarray(x, np.float32), trained.params)
    own = Drafter(trained.config, params, frozen_parts(target.params, trained.draft_to_target))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 250, (1, 24)).astype(np.int32)
    taps = rng.normal(size=(1, 24, 2, 32)).astype(np.float32)
    drafts = [one.teacher_forced(tokens, taps, np.array([[4, 9]])) for one in (own, served)]
    np.testing.assert_allclose(drafts[0].logits_BAGV, drafts[1].logits_BAGV, rtol=1e-4, atol=1e-4)
