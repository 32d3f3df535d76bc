"""The commands of `serve` from their arguments to their files, on tiny models; what cannot work is said at once."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import good_drafter, make_target

from dspark_jax.weights.drafter_files import write_drafter
from serve import bench, calibrate, load, profile, setup
from serve import curves as curves_lib
from serve.calibration import FILE, read_temperatures
from serve.curves import Curves

WORDS = ["how", "much", "is", "twelve", "times", "three", "and", "what", "will", "a", "red", "fox", "say", "about"]


class Words:
    """The one call of a tokenizer that the commands make: an id a word."""

    template_hash = "words"

    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        return [sum(map(ord, word)) % 38 for word in messages[0]["content"].split()]


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments that name a tiny target, its drafter on disk and prompts of two domains."""
    target = dataclasses.replace(make_target(mixing=0.15), tokenizer=Words())
    drafter = good_drafter(target)
    monkeypatch.setattr(setup, "load_target", lambda path, dtype, mesh: target)
    monkeypatch.setattr(setup, "fast_dtype", lambda: "float32")
    monkeypatch.setattr(setup.selftest, "questions", lambda target: [])  # drafters on trial have tests of their own
    monkeypatch.setattr(curves_lib, "make_curves", Curves)  # tiny models on a busy machine may really be flat
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_drafter(tmp_path / "drafter", "deepspec", drafter.config, drafter.params, None, {})
    rng = np.random.default_rng(0)
    lines = [
        json.dumps({"turns": [" ".join(rng.choice(WORDS, 5))], "category": ("math", "chat")[i % 2]}) for i in range(24)
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    return ["--target", "tiny", "--drafter", str(tmp_path / "drafter")]


def with_prompts(models: list[str]) -> list[str]:
    return [*models, "--prompts", str(Path(models[-1]).with_name("prompts.jsonl"))]


@pytest.mark.slow
def test_profile_writes_curves_and_keeps_them(models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "deep" / "profile"
    argv = [*models, "--requests", "2", "--out", str(out)]
    assert profile.main(argv) == 0
    assert {path.name for path in out.iterdir()} == {"curves.json", "curves.png"}
    first = json.loads((out / "curves.json").read_text())
    assert {point["requests"] for point in first["curves"]} == {1, 2}
    assert profile.main(argv) == 0
    assert json.loads((out / "curves.json").read_text()) == first, "measured again"
    monkeypatch.setattr(profile, "measure", lambda engine, on_point: Curves({(1, 0, False): 9.0}))
    assert profile.main([*argv, "--profile"]) == 0
    assert len(json.loads((out / "curves.json").read_text())["curves"]) == 1


@pytest.mark.slow
def test_calibrate_leaves_temperatures_beside_the_drafter(models: list[str], tmp_path: Path):
    plot = tmp_path / "reliability.png"
    argv = [*with_prompts(models), "--tokens", "40", "--temperature", "0.8", "--top-p", "0.9", "--plot", str(plot)]
    assert calibrate.main(argv) == 0
    folder = Path(models[-1])
    report = json.loads((folder / FILE).read_text())
    assert report["sampling"] == {"temperature": 0.8, "top_k": 0, "top_p": 0.9}
    assert report["blocks"]["fit"] > report["blocks"]["choose"] > 0
    assert read_temperatures(folder, 4).tolist() == pytest.approx(report["temperatures"])
    assert plot.stat().st_size


@pytest.mark.slow
def test_load_measures_every_policy_and_writes_all(models: list[str], tmp_path: Path):
    out, plots = tmp_path / "load.json", tmp_path / "plots"
    policies = ["off", "fixed:2", "threshold:0.5", "scheduled", "scheduled:sync"]
    sizes = ["--concurrency", "2", "--rates", "50", "--requests", "1", "--tokens", "6"]
    argv = [*with_prompts(models), "--policies", *policies, *sizes, "--json", str(out), "--plots", str(plots)]
    assert load.main(argv) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["rate"], row["policy"]) for row in rows] == [(rate, p) for rate in (0.0, 50.0) for p in policies]
    assert {"pareto.png", "step-times.png"} <= {path.name for path in plots.iterdir()}


@pytest.mark.slow
def test_bench_offers_algorithm_1(models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "REQUESTS", (2,))
    monkeypatch.setattr(bench, "TEMPERATURES", (0.0,))
    out = tmp_path / "bench.json"
    argv = [*with_prompts(models), "--policy", "scheduled:sync", "--limit", "2", "--single", "1", "--tokens", "8"]
    assert bench.main([*argv, "--json", str(out)]) == 0
    assert {row["policy"] for row in json.loads(out.read_text())["rows"]} >= {"off", "scheduled:sync"}


@pytest.mark.parametrize(
    ("main", "more", "message"),
    [
        (bench.main, ["--policy", "sheduled"], "policy 'sheduled'"),
        (bench.main, ["--policy", "fixed:5"], "K from 1 to 4"),
        (load.main, ["--policies", "off", "threshold:50"], "policy 'threshold:50'"),
        (load.main, ["--temperature", "-1"], "temperature = -1.0"),
        (load.main, ["--limit", "0"], "--limit"),
        (load.main, ["--seed", "-1"], "--seed -1"),
        (load.main, ["--plots", "/proc/nowhere"], "--plots /proc/nowhere"),
        (calibrate.main, ["--temperature", "-1"], "temperature = -1.0"),
        (calibrate.main, ["--top-p", "0"], "top_p = 0"),
        (calibrate.main, ["--limit", "0"], "--limit 0"),
        (calibrate.main, ["--tokens", "1"], "--tokens 1"),
        (calibrate.main, ["--plot", "/nowhere/x.png"], "--plot /nowhere/x.png"),
        (profile.main, ["--out", "/proc/nowhere"], "--out /proc/nowhere"),
    ],
)
def test_bad_arguments_end_before_anything_is_compiled(
    main: Callable[[list[str]], int], more: list[str], message: str, models: list[str],
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    refuse_work(monkeypatch)
    assert main([*models, *more]) == 2
    error = capsys.readouterr().err.strip().split("\n")[-1]  # what was read of the drafter may be told before
    assert error.startswith("error: ") and message in error


def test_a_drafter_that_cannot_be_written_beside_is_refused_before_the_rollouts(
    models: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    refuse_work(monkeypatch)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert calibrate.main(with_prompts(models)) == 2
    assert f"--drafter {models[-1]}/{FILE}: its directory cannot be written to" in capsys.readouterr().err


def refuse_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes minutes must not begin."""

    def work(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("work began")

    for module, name in ((bench, "engines"), (load, "make_engines"), (calibrate, "run"), (setup, "Engine")):
        monkeypatch.setattr(module, name, work)
