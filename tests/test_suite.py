"""The evaluation on tiny models: cells resume, the report answers, comparisons add up, bad input ends in one line."""

import dataclasses
import html
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny import good_drafter, make_target

from dspark_jax import Drafter, Target
from dspark_jax.weights.drafter_files import write_drafter
from serve import bench, setup, suite_against, suite_args, suite_cells, suite_report, suite_tables
from serve import curves as curves_lib
from serve.curves import Curves

TEXTS = {
    "gsm8k": ["How much is twelve times three?", "What is the sum of the first ten numbers?"],
    "mt-bench": ["Tell me a story about a red fox.", "Why is the sky blue in the morning?", "Write a short poem."],
}


class Words:
    """The one call of a tokenizer that the evaluation makes: an id a word."""

    template_hash = "words"

    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        return [len(word) % 30 for word in messages[0]["content"].split()]


@pytest.fixture(scope="module")
def target() -> Target:
    return dataclasses.replace(make_target(mixing=0.15, eos_token_ids=(7,)), tokenizer=Words())


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    return good_drafter(target)


@pytest.fixture(scope="module")
def folder(drafter: Drafter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter's checkpoint and two prompt sets."""
    path = tmp_path_factory.mktemp("suite")
    write_drafter(path / "drafter", "deepspec", drafter.config, drafter.params, None, {})
    for name, texts in TEXTS.items():
        lines = [json.dumps({"turns": [text]}) + "\n" for text in texts]
        (path / f"{name}.jsonl").write_text("".join(lines))
    return path


@pytest.fixture(autouse=True)
def tiny_target(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "load_target", lambda path, dtype, mesh: target)
    monkeypatch.setattr(setup, "fast_dtype", lambda: "float32")


def arguments(folder: Path, out: Path, *more: str, questions: str = "1 2 4 5", limit: int = 2) -> list[str]:
    texts = f"--suite quick --target tiny --sets gsm8k mt-bench --limit {limit} --tokens 8 --questions {questions}"
    return [*texts.split(), "--drafter", str(folder / "drafter"), "--data", str(folder), "--out", str(out), *more]


@pytest.fixture(scope="module")
def out(target: Target, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, greedy."""
    path = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "load_target", lambda path, dtype, mesh: target)
        assert bench.main(arguments(folder, path, "--temperatures", "0")) == 0
    return path


@pytest.fixture(scope="module")
def result(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def test_results_agree_with_themselves(result: dict[str, Any]):
    (drafter,) = result["drafters"]
    assert [(r["set"], r["domain"], r["prompts"]) for r in result["accepted"]] == [
        ("gsm8k", "math", 2), ("mt-bench", "chat", 2)
    ]  # fmt: skip
    for row in result["accepted"]:
        assert row["accepted_length"] == pytest.approx(sum(row["emitted_by_prompt"]) / sum(row["rounds_by_prompt"]))
        assert row["interval"][0] <= row["accepted_length"] <= row["interval"][1]
    lengths = [row["accepted_length"] for row in result["accepted"]]
    (mean,) = [row for row in result["means"] if row["domain"] == "all"]
    assert mean["accepted_length"] == pytest.approx(sum(lengths) / 2)
    with_, without = ([r for r in result["acceptance"] if r["head"] == head] for head in (True, False))
    for one, other in zip(with_, without, strict=True):
        assert one["domain"] == other["domain"] and one["prompts"] == other["prompts"]
        # All of this drafter's skill is in its sequential head.
        assert one["by_position"][0] > (other["by_position"][0] or 0)
    for row in result["sweep"]:
        assert row["replayed"] and row["accepted_length"] >= 1 + (row["accepted"] or 0) - 1e-9
    assert {row["threshold"] for row in result["sweep"]} == {i / 10 for i in range(10)}
    assert drafter["block"] == 4 and drafter["name"] == "drafter"
    assert all("50 are needed" in row["why_not"] for row in result["calibration"])


def test_the_report_has_every_section_and_needs_no_other_file(out: Path, result: dict[str, Any]):
    page = (out / "report.html").read_text()
    for number, (question, _) in suite_report.QUESTIONS.items():
        assert f"<h2>{number}. {html.escape(question)}</h2>" in page
    assert page.count(suite_report.NOT_MEASURED) == 2  # load and losslessness were not asked for
    assert "--suite quick" in page and result["machine"]["cpu"] in page and result["versions"]["jax"] in page
    assert page.count('<img alt="') == page.count("data:image/png;base64,") == len(list(out.glob("*.png"))) > 3
    assert 'src="data:' in page and "http" not in page and 'src="/' not in page


def test_markdown_has_the_tables(out: Path, capsys: pytest.CaptureFixture[str]):
    assert suite_report.main(["--markdown", str(out / "results.json")]) == 0
    text = capsys.readouterr().out
    assert all(f"## {number}. " in text for number in suite_report.QUESTIONS)
    (line,) = [line for line in text.split("\n") if line.startswith("| gsm8k (math)")]
    assert line.count("|") == 3


def calls(monkeypatch: pytest.MonkeyPatch, stop_after: int = 10**6) -> list[str]:
    """Hears of every cell that is measured; the run is killed when there were `stop_after`."""
    heard: list[str] = []
    real = suite_cells.rollout

    def rollout(lab: Any, cell: Any, needs: Any, tell: Any) -> Any:
        if len(heard) == stop_after:
            raise KeyboardInterrupt
        heard.append(cell.key)
        return real(lab, cell, needs, tell)

    monkeypatch.setitem(suite_cells.KINDS, "rollout", rollout)
    return heard


def test_a_finished_run_measures_nothing_again(out: Path, folder: Path, monkeypatch: pytest.MonkeyPatch):
    before = (out / "results.json").read_text()
    heard = calls(monkeypatch)
    assert bench.main(arguments(folder, out, "--temperatures", "0")) == 0
    assert not heard and (out / "results.json").read_text() == before


def test_a_killed_run_goes_on_and_a_changed_setting_is_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, result: dict[str, Any]
):
    argv = arguments(folder, tmp_path, "--temperatures", "0")
    with monkeypatch.context() as patch:
        first = calls(patch, stop_after=3)
        with pytest.raises(KeyboardInterrupt):
            bench.main(argv)
    assert not (tmp_path / "results.json").exists()
    cells = list((tmp_path / "cells").iterdir())
    assert len(cells) == len(first) == 3
    cells[0].write_text('{"result": ')  # as if the disk had lost its end
    with monkeypatch.context() as patch:
        second = calls(patch)
        assert bench.main(argv) == 0
    assert cells[0].stem in second and len(second) == 2 and set(first) - {cells[0].stem} == set(first) - set(second)
    assert json.loads((tmp_path / "results.json").read_text())["accepted"] == result["accepted"]
    with monkeypatch.context() as patch:
        third = calls(patch, stop_after=1)
        with pytest.raises(KeyboardInterrupt):
            bench.main([*argv, "--seed", "1"])
    assert len(third) == 1 and third[0] not in {*first, *second}


def test_against_itself_nothing_differs(out: Path, folder: Path, result: dict[str, Any]):
    diff = suite_against.compare(suite_against.read(out / "results.json"), result)
    assert diff["drafters"] == [{"old": "drafter", "new": "drafter"}] and not diff["settings"]
    wheres = [row["where"] for row in diff["accepted"]]
    assert wheres == ["gsm8k", "mean of math", "mean of all", "mt-bench", "mean of chat"]
    for row in diff["accepted"]:
        assert row["paired"] and row["difference"] == 0 and row["interval"] == (0, 0)
    page = suite_report.page(result | {"against": diff}, [])
    assert "Against an earlier run" in page and "+0.00" in page


def run_of(name: str, emitted: list[int], rounds: list[int], seconds: list[float], digest: str) -> dict[str, Any]:
    """A results.json with one set and one round time."""
    accepted = {
        "drafter": name, "set": "s", "domain": "d", "temperature": 0.0, "digest": digest, "emitted_by_prompt": emitted,
        "rounds_by_prompt": rounds,
    }  # fmt: skip
    latency = {"drafter": name, "requests": 1, "block": 4, "seconds": seconds}
    about = {
        "target": "t",
        "dtype": "float32",
        "machine": {},
        "versions": {},
        "command": "c",
        "settings": {"tokens": 8},
    }
    return about | {"drafters": [{"name": name}], "accepted": [accepted], "latency": [latency], "load": []}


def test_differences_by_hand():
    old = run_of("a", [8, 4, 0], [4, 4, 0], [0.5, 0.5, 1.0], "x")
    new = run_of("b", [12, 8, 0], [4, 4, 0], [0.25, 0.25, 0.25], "x") | {"settings": {"tokens": 9}}
    diff = suite_against.compare(old, new)
    assert diff["drafters"] == [{"old": "a", "new": "b"}]  # one each: compared whatever their names
    assert diff["settings"] == [{"setting": "tokens", "old": 8, "new": 9}]
    row = diff["accepted"][0]
    assert (row["old"], row["new"], row["difference"], row["paired"]) == (1.5, 2.5, 1.0, True)
    # Each prompt gained one token a round: paired draws know that, whichever prompts they draw.
    assert row["interval"] == pytest.approx((1.0, 1.0))
    unpaired = suite_against.compare(old, new | {"accepted": [new["accepted"][0] | {"digest": "y"}]})["accepted"][0]
    assert not unpaired["paired"] and unpaired["interval"] == pytest.approx((0.0, 2.0))
    (speed,) = diff["speeds"]
    assert (speed["old"], speed["new"], speed["ratio"]) == (2.0, 4.0, 2.0)
    assert speed["interval"] == pytest.approx((2.0, 4.0))
    assert suite_against.ratio([2.0], [3.0]) == {"old": 2.0, "new": 3.0, "ratio": 1.5, "interval": None}


@pytest.mark.slow
def test_every_question_is_answered(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(curves_lib, "make_curves", Curves)  # tiny models on a busy machine may really be flat
    few = dataclasses.replace(suite_args.SIZES["quick"], concurrency=(1, 2), blocks=(2,), repeats=2)
    monkeypatch.setitem(suite_args.SIZES, "quick", few)
    argv = arguments(folder, tmp_path, "--tokens", "24", questions="1 2 3 4 5 6 7", limit=3)
    assert bench.main(argv) == 0
    result = json.loads((tmp_path / "results.json").read_text())
    for tables in suite_tables.TABLES.values():
        assert tables(result)
    assert suite_report.NOT_MEASURED not in (tmp_path / "report.html").read_text()
    assert {(p["requests"], p["block"]) for p in result["latency"]} == {(r, b) for r in (1, 2) for b in (0, 2, 4)}
    assert {row["policy"] for row in result["load"]} == {"off", "fixed:4", "scheduled"}
    assert all(row["exact_match"] == 1 for row in result["lossless"] if row["policy"] != "off")
    assert all(row["p"] > 1e-3 for row in result["law"])
    assert {row["replayed"] for row in result["sweep"] if row["temperature"] == 1} == {False}
    folder_of_load = tmp_path / "6-load-drafter"
    assert {p.name for p in folder_of_load.iterdir()} == {"pareto.png", "lengths.png", "domains.png", "step-times.png"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data", "/nowhere"], "no such folder"),
        (["--sets", "gsm8k", "mbpp"], "has no mbpp.jsonl; choose with --sets among gsm8k mt-bench"),
        (["--tokens", "1"], "--tokens 1: expected at least 2"),
        (["--tokens", "4"], "give at least 5"),
        (["--questions", "8"], "--questions 8: expected some of 1 to 7"),
        (["--temperatures", "-1"], "none below 0"),
        (["--max-prompt-tokens", "2"], "no prompt has at most 2 tokens"),
        (["--max-prompt-tokens", "512"], "exceed the target's context"),
        (["--against", "/nowhere/results.json"], "cannot be read"),
        (["--out", "/proc/nowhere"], "--out /proc/nowhere"),
        (["--drafter", "/nowhere"], "no such directory"),
    ],
)
def test_bad_input(more: list[str], message: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert bench.main(arguments(folder, tmp_path / "out", *more)) == 2
    error = capsys.readouterr().err.strip().split("\n")[-1]
    assert error.startswith("error: ") and message in error


def test_other_files_are_no_earlier_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "results.json"
    for content, message in (("{", "not JSON"), ("{}", "not the results"), ('{"accepted": []}', "another version")):
        path.write_text(content)
        assert bench.main(arguments(folder, tmp_path, "--against", str(path))) == 2
        assert message in capsys.readouterr().err
    assert suite_report.main([]) == 2


def test_the_same_drafter_twice_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    shutil.copytree(folder / "drafter", tmp_path / "copy" / "drafter")
    for again, names in (
        (folder / "drafter", "drafter, drafter"),
        (tmp_path / "copy" / "drafter", f"{folder.name}/drafter, copy/drafter"),
    ):
        argv = arguments(folder, tmp_path)
        argv.insert(argv.index("--drafter") + 2, str(again))
        assert bench.main(argv) == 2
        assert f"two of {names} have the same files" in capsys.readouterr().err


def test_interleave_takes_turns():
    assert suite_cells.interleave([[1, 2, 3], [4], [5, 6]]) == [1, 4, 5, 2, 6, 3]
