"""The training program end to end on the tiny random target: it learns, saves, resumes exactly, and refuses clearly."""

import contextlib
import dataclasses
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dspark_jax import load_drafter
from dspark_jax.config import ConfigError, drafter_config
from dspark_jax.config_files import load_config
from dspark_jax.weights.drafter_files import read_drafter
from dspark_jax.weights.fingerprint import weights_hash
from train import data, evaluate, hosts, loop, setup
from train.checkpoint import Checkpoints, RunFacts
from train.main import main
from train.report import Report
from train.step import TrainState, eval_step, init_state, train_step
from train.tiny import tiny_target

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "tiny.py"
STEPS = 16
# One set of settings for all runs: settings are part of the step's compile key.
SETTINGS = f"""--train.max-steps {STEPS} --train.log-every 2 --train.checkpoint-every 8 --train.eval-every 8
    --train.eval-prompts 2 --train.eval-tokens 8 --data.num-anchors 8""".split()


def run(workdir: Path, *more: str) -> int:
    return main(["--config", str(CONFIG), "--workdir", str(workdir), *SETTINGS, *more])


def saved(workdir: Path) -> tuple[TrainState, RunFacts]:
    """State and facts of the newest checkpoint, read as a new program would."""
    config = load_config(CONFIG)
    like = init_state(drafter_config(config.draft, tiny_target().config), config)
    checkpoints = Checkpoints(workdir / "checkpoints", 2)
    state, facts = checkpoints.load_state(like), checkpoints.load_facts()
    checkpoints.close()
    return state, facts


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without interruption; what it printed lies beside it."""
    workdir = tmp_path_factory.mktemp("train") / "straight"
    with workdir.with_suffix(".log").open("w") as log, contextlib.redirect_stdout(log):
        assert run(workdir) == 0
    return workdir


def test_the_loss_falls_and_everything_is_shown(straight: Path) -> None:
    shown = straight.with_suffix(".log").read_text()
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)", shown, re.MULTILINE)]
    assert len(losses) == STEPS // 2
    assert np.mean(losses[-2:]) < 0.95 * np.mean(losses[:2])
    assert "skipped 1 (fewer than 14 supervised tokens)" in shown
    assert len(re.findall(r"accepted length [\d.]+ \(temperature 0\)", shown)) == 2
    assert f"finished at step {STEPS}" in shown


def test_a_run_leaves_checkpoints_scalars_and_drafters(straight: Path) -> None:
    assert sorted(path.name for path in straight.iterdir()) == ["checkpoints", "drafter", "drafter_best", "tensorboard"]
    assert sorted(path.name for path in (straight / "checkpoints").iterdir()) == [str(STEPS), str(STEPS // 2)]
    notes = json.loads((straight / "drafter" / "config.json").read_text())["dspark_jax"]
    assert notes["target_weights"] == weights_hash(tiny_target().params)
    written = b"".join(events.read_bytes() for events in (straight / "tensorboard").iterdir())
    for tag in (
        "train/loss", "train/ce", "train/tv", "train/confidence", "train/tau", "train/acceptance_by_slot/4",
        "train/learning_rate", "train/grad_norm", "train/update_norm", "train/blocks_per_second",
        "train/tokens_per_second", "train/padding", "held_out/loss", "held_out/accepted_length/temperature_0",
    ):  # fmt: skip
        assert tag.encode() in written, tag


def test_the_drafter_written_is_the_drafter_trained(straight: Path) -> None:
    state, facts = saved(straight)
    drafter = load_drafter(straight / "drafter", tiny_target())
    for trained, served in zip(jax.tree.leaves(state.params), jax.tree.leaves(drafter.params), strict=True):
        np.testing.assert_allclose(np.asarray(trained), np.asarray(served), rtol=2**-8)  # bfloat16 on disk
    assert drafter.frozen.draft_to_target_V.tolist() == facts.draft_vocabulary
    best = load_drafter(straight / "drafter_best", tiny_target())
    assert best.config == drafter.config
    assert str(Path.cwd()) not in (straight / "drafter" / "config.json").read_text()


@pytest.mark.slow
def test_sigterm_saves_and_a_resumed_run_ends_where_a_straight_one_does(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = loop.train_step, []

    def preempted(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    monkeypatch.setattr(loop, "train_step", preempted)
    assert run(tmp_path / "w") == 0
    assert "stopped and saved at step 3" in capsys.readouterr().out
    assert saved(tmp_path / "w")[1].step == 3
    assert run(tmp_path / "w") == 2  # a run is there: never overwritten by mistake
    assert "--resume" in capsys.readouterr().err
    assert run(tmp_path / "w", "--resume") == 0
    (state, facts), (wanted, wanted_facts) = saved(tmp_path / "w"), saved(straight)
    assert facts == wanted_facts
    assert jax.tree.structure(state) == jax.tree.structure(wanted)
    for left, right in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@pytest.mark.slow
def test_a_run_killed_while_it_evaluates_loses_neither_step_nor_evaluation(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> float:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop.evaluate, "accepted_length", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "w")
    assert saved(tmp_path / "w")[1].step == STEPS // 2
    assert run(tmp_path / "w", "--resume") == 0
    assert saved(tmp_path / "w")[1] == saved(straight)[1]


@pytest.mark.slow
def test_sigterm_in_the_last_step_does_not_leave_out_its_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop.hosts, "agreed", lambda asked, step: step == STEPS)
    assert run(tmp_path, "--train.eval-every", str(STEPS)) == 0
    assert f"finished at step {STEPS}" in capsys.readouterr().out
    assert saved(tmp_path)[1].best_step == STEPS


def test_a_second_sigterm_does_not_disturb_the_save() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with loop._stop_signals() as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked()
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.paths", "nowhere.jsonl"], "nowhere.jsonl: cannot read it"),
        (["--target.path", "nowhere"], "target nowhere: no such file"),
        (["--data.max-length", "4096"], "data max_length = 4096 exceeds the target's context of 512"),
        (["--data.min-supervised", "500"], "no usable conversation (fewer than 500 supervised tokens: 40)"),
        (["--data.validation-fraction", "1e-9"], "validation_fraction"),
        (["--draft.draft-vocab-size", "2"], "draft_vocab_size = 2"),
        (["--draft.mask-token-id", "258"], "mask_token_id = 258 ends a text"),
        (
            ["--draft.algorithm", "dflash2", "--draft.markov-rank", "0", "--draft.conv-group-size", "5"],
            "conv_group_size = 5: expected a divisor",
        ),
        (["--train.eval-tokens", "510"], "train eval_tokens = 510"),
        (["--mesh.fsdp", "3"], "mesh data = 0, fsdp = 3, tensor = 1: there are 1 devices"),
        (["--resume"], "holds no checkpoint to resume from"),
    ],
)
def test_what_the_user_must_put_right_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(tmp_path, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error


def test_another_drafter_is_not_resumed(straight: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(straight, "--resume", "--draft.block-size", "3") == 2
    assert "another drafter (block_size 4 there, 3 here)" in capsys.readouterr().err


def test_a_finished_run_that_is_resumed_has_nothing_to_do(straight: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = saved(straight)[1]
    assert run(straight, "--resume") == 0
    assert f"finished at step {STEPS}" in capsys.readouterr().out
    assert saved(straight)[1] == before


@pytest.mark.parametrize(
    "arguments",
    [["--train.nonsense", "3"], ["--train.max-steps", "many"], ["--train.max-steps", "0"], ["--train.seed", "-1"]],
)
def test_options_that_do_not_exist_or_fit_exit_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        run(tmp_path, *arguments)
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    name = arguments[0].removeprefix("--train.")
    assert name in (captured.err + captured.out).replace("_", "-")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such Python file"),
        ("x = 1", "defines no get_config"),
        ("def get_config(): return 3", "returned int, expected Config"),
        ("def get_config(:", "invalid syntax"),
        ("from dspark_jax.config import TrainSettings\nget_config = lambda: TrainSettings(stepz=3)", "stepz"),
        (
            "from dspark_jax.config import TrainSettings\nget_config = lambda: TrainSettings(max_steps=0)",
            "max_steps = 0",
        ),
    ],
)
def test_a_config_that_is_none_is_refused_by_name(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "c.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"c\.py: ") as error:
        load_config(path)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["tiny", "tiny_eagle3", "smollm2_135m", "smollm2_135m_dflash2"])
def test_every_config_loads(name: str) -> None:
    assert load_config(CONFIG.with_name(f"{name}.py")).train.max_steps > 0


def metrics(loss: float, skipped: bool) -> dict[str, np.ndarray]:
    return {"loss": np.float32(loss), "skipped": np.float32(skipped), "blocks": np.float32(8)}


def report(tmp_path: Path) -> Report:
    return Report(tmp_path, 0, 100, loop.Console(width=200))


def test_skipped_batches_are_counted_and_kept_out_of_the_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with report(tmp_path) as shown:
        for i in range(6):
            shown.add(metrics(float("nan") if i % 3 == 0 else 2.0, i % 3 == 0), tokens=5, places=10)
        shown.flush(6)
    assert shown.skipped == 2
    out = capsys.readouterr().out
    assert "loss 2.0000" in out
    assert "padding 0.50" in out


def test_twenty_skipped_batches_in_a_row_end_the_run(tmp_path: Path) -> None:
    with report(tmp_path) as shown:
        for step in range(1, 20):
            shown.add(metrics(float("nan"), True), tokens=5, places=10)
            if step % 5 == 0:
                shown.flush(step)
        shown.add(metrics(1.0, False), tokens=5, places=10)  # one good batch starts the count again
        for _ in range(19):
            shown.add(metrics(float("nan"), True), tokens=5, places=10)
        shown.flush(39)
        shown.add(metrics(float("nan"), True), tokens=5, places=10)
        with pytest.raises(ConfigError, match="20 batches in a row"):
            shown.flush(40)


def test_a_run_can_start_from_a_written_drafter(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, facts = saved(straight)
    start = str(straight / "drafter")
    config = load_config(CONFIG)
    run_ = setup.build(dataclasses.replace(config, train=dataclasses.replace(config.train, start_from=start)), None)
    first = run_.first_state()
    assert int(first.step) == 0
    assert run_.draft_vocabulary is not None and run_.draft_vocabulary.tolist() == facts.draft_vocabulary
    for given, trained in zip(jax.tree.leaves(first.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_allclose(np.asarray(given), np.asarray(trained), rtol=2**-8)
    moved = dataclasses.replace(config, train=dataclasses.replace(config.train, start_from="gone"))
    whole = dataclasses.replace(moved, draft=dataclasses.replace(config.draft, draft_vocab_size=0))
    assert setup.build(moved, facts).draft_vocabulary is not None  # a resumed run has its weights already
    assert setup.build(whole, dataclasses.replace(facts, draft_vocabulary=None)).draft_vocabulary is None
    assert run(tmp_path, "--train.start-from", start, "--draft.markov-rank", "3") == 2
    assert "its markov_rank differ from the run's draft settings" in capsys.readouterr().err


def test_a_run_may_draft_longer_blocks_than_the_drafter_it_starts_from(straight: Path, tmp_path: Path) -> None:
    start, config = straight / "drafter", load_config(CONFIG)
    size = config.draft.block_size + 3
    draft = dataclasses.replace(config.draft, block_size=size)
    train = dataclasses.replace(config.train, start_from=str(start))
    run_ = setup.build(dataclasses.replace(config, draft=draft, train=train), None)
    _, written, _ = read_drafter(start, tiny_target())
    given = jax.tree.map(np.asarray, run_.first_state().params)
    jax.tree.map(np.testing.assert_array_equal, given, jax.tree.map(np.asarray, written))
    longer = ("--train.start-from", str(start), "--draft.block-size", str(size), "--train.max-steps", "2")
    assert run(tmp_path / "longer", *longer) == 0
    assert read_drafter(tmp_path / "longer" / "drafter", tiny_target())[0].block_size == size


def test_a_deeper_drafter_begins_as_the_written_one_and_learns_in_every_layer(
    straight: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start, config = str(straight / "drafter"), load_config(CONFIG)
    train = dataclasses.replace(config.train, start_from=start)
    depth = config.draft.num_layers

    def started(layers: int) -> tuple[setup.Run, TrainState, Any, float]:
        draft = dataclasses.replace(config.draft, num_layers=layers)
        run_ = setup.build(dataclasses.replace(config, train=train, draft=draft), None)
        element = next(data.batches(run_.groups, config.train.batch_size, 0))
        batch, state = hosts.place_batch(run_.mesh, evaluate.to_batch(element), 1), run_.first_state()
        loss = eval_step(run_.models, run_.mesh, state.params, run_.weights, batch)["loss"]
        return run_, state, batch, float(loss)

    *_, written = started(depth)
    run_, state, batch, loss = started(depth + 2)
    np.testing.assert_allclose(loss, written, rtol=1e-6)
    for _ in range(2):  # the learning rate of the first is 0
        state, _ = train_step(run_.models, run_.mesh, state, run_.weights, batch)
    for layer in range(depth, depth + 2):
        for name in ("o", "down"):
            assert np.any(np.asarray(state.params["backbone"][f"layers_{layer}"][name])), (layer, name)
    more = ("--train.start-from", start, "--draft.num-layers", "2", "--draft.layer-causal", "True", "True")
    assert run(tmp_path, *more) == 2
    assert "its layer_causal differ from the run's draft settings" in capsys.readouterr().err


def test_a_vocabulary_counted_again_keeps_what_is_known_of_each_id(straight: Path) -> None:
    start, config = str(straight / "drafter"), load_config(CONFIG)
    settings = dataclasses.replace(config.train, start_from=start, recount_vocabulary=True)
    size = config.draft.draft_vocab_size + 8
    draft = dataclasses.replace(config.draft, draft_vocab_size=size)
    _, old, before = read_drafter(start, tiny_target())
    again = setup.build(dataclasses.replace(config, train=settings, draft=draft), None)
    assert again.start_params is not None and before is not None and again.draft_vocabulary is not None
    rows = np.asarray(again.start_params["markov"]["w2"])
    assert len(rows) == size > len(before)
    for token, row in zip(again.draft_vocabulary.tolist(), rows, strict=True):
        known = np.flatnonzero(before == token)
        np.testing.assert_array_equal(row, np.asarray(old["markov"]["w2"])[known[0]] if len(known) else 0 * row)
    with pytest.raises(ConfigError, match="recount_vocabulary needs start_from"):
        dataclasses.replace(settings, start_from="")


@pytest.mark.parametrize("workdir", [(), ("--workdir", "x")], ids=["alone", "with a workdir"])
def test_help_lists_the_settings_of_a_config(workdir: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--config", str(CONFIG), *workdir, "--help"])
    shown = capsys.readouterr().out
    assert end.value.code == 0
    assert "--draft.markov-rank INT" in shown and "(default: 8)" in shown
