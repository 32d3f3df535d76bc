"""The benchmark on tiny random models: its numbers agree with each other, and bad input ends in one clear line."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tiny import make_drafter, make_target

from dspark_jax import ConfigError, Drafter, Generation, Target, generate
from dspark_jax.weights.deepspec import write_drafter
from serve import bench, cells, probe, report
from serve.probe import choose_dtype
from serve.prompts import Prompt

PROMPTS = {"math": [[1, 2, 3], [4, 5, 6, 7]], "chat": [[3, 1, 4, 1, 5], [9, 2, 6]]}
SETTINGS = bench.Settings(tokens=10, limit=2, single=1)


class Words:
    """The one call of a tokenizer that the benchmark makes: an id a word."""

    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        return [len(word) % 30 for word in messages[0]["content"].split()]


@pytest.fixture(scope="module")
def target() -> Target:
    return dataclasses.replace(make_target(eos_token_ids=(7,)), tokenizer=Words())


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    return make_drafter(target)


@pytest.fixture(scope="module")
def quick() -> Iterator[None]:
    """Greedy and in float32 only: every other program would be compiled for little. The slow test has them all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "TEMPERATURES", (0.0,))
        patch.setattr(
            probe,
            "choose_dtype",
            lambda target, requests, *_: probe.Probe(requests, {"float32": 1.0}, {"float32": 2.0}),
        )
        yield


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, int]]:
    return []


@pytest.fixture(scope="module")
def result(quick: None, target: Target, drafter: Drafter, steps: list[tuple[str, int]]) -> dict[str, Any]:
    return bench.run(target, drafter, PROMPTS, SETTINGS, lambda text, done: steps.append((text, done)))


def rows_of(result: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if all(row[name] == value for name, value in wanted.items())]


def test_every_cell_has_a_plain_and_a_drafted_row(result: dict[str, Any]):
    cells = [(r["requests"], r["temperature"], r["domain"], r["policy"]) for r in result["rows"]]
    assert sorted(cells) == sorted(
        (n, 0.0, domain, policy) for n in (1, 8) for domain in PROMPTS for policy in ("plain", "draft")
    )
    assert [row["prompts"] for row in rows_of(result, domain="math", policy="plain", temperature=0.0)] == [2, 1]


def test_rows_agree_with_themselves(result: dict[str, Any], drafter: Drafter):
    for row in result["rows"]:
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert 0 < row["tokens"] <= row["prompts"] * (SETTINGS.tokens - 1)
        assert len(row["acceptance_by_position"]) == (drafter.config.num_drafts if row["policy"] == "draft" else 0)
    for row in rows_of(result, policy="draft"):
        (plain,) = rows_of(result, **{k: row[k] for k in ("requests", "temperature", "domain")}, policy="plain")
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / plain["tokens_per_second"])
        assert 1 <= row["accepted_length"] <= drafter.config.num_drafts + 1


def test_acceptance_is_that_of_the_texts(result: dict[str, Any], target: Target, drafter: Drafter):
    texts = generate(target, drafter, PROMPTS["math"], SETTINGS.tokens, eos_token_ids=target.config.eos_token_ids)
    (row,) = rows_of(result, requests=8, temperature=0.0, domain="math", policy="draft")
    assert row["rounds"] == sum(len(text.rounds) for text in texts)
    assert row["tokens"] == sum(len(text.tokens) - 1 for text in texts)
    assert row["exact_match"] == 1.0
    assert all(r["exact_match"] is None for r in rows_of(result, policy="plain"))


def test_summary_is_the_mean_over_domains(result: dict[str, Any]):
    assert [(mean["requests"], mean["temperature"]) for mean in result["summary"]] == [(8, 0.0), (1, 0.0)]
    for mean in result["summary"]:
        group = rows_of(result, requests=mean["requests"], temperature=mean["temperature"], policy="draft")
        assert mean["speedup"] == pytest.approx(sum(row["speedup"] for row in group) / len(group))
        assert mean["prompts"] == sum(row["prompts"] for row in group)


def test_pieces_of_a_round_add_up(result: dict[str, Any]):
    assert [piece["requests"] for piece in result["where_time_goes"]] == [8, 1]
    for piece in result["where_time_goes"]:
        assert piece["draft_ms"] + piece["verify_ms"] + piece["other_ms"] == pytest.approx(piece["round_ms"])
        assert piece["plain_step_ms"] > 0


def test_all_announced_steps_are_done(steps: list[tuple[str, int]], result: dict[str, Any]):
    assert sum(done for _, done in steps) == bench.count_steps(PROMPTS)
    assert ("one request, temperature 0, chat: draft", 0) in steps


def test_result_is_json_and_can_be_shown(result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "out.json"
    report.write_json(path, result)
    assert json.loads(path.read_text()) == json.loads(json.dumps(result))
    assert list(tmp_path.iterdir()) == [path]
    report.show(result)
    assert "All 6 greedy texts are those of plain decoding" in capsys.readouterr().out


def test_nothing_compiles_while_the_clock_runs(target: Target, drafter: Drafter):
    made = cells.Bench(target, drafter, PROMPTS, tokens=10, seed=0)
    made.warm_up(PROMPTS, 2, [0.0], {"plain": "float32", "draft": "float32"})
    compiled: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        compiled.extend([event] if "backend_compile" in event else [])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for domain, ids in PROMPTS.items():
            made.cell(domain, ids, 2, 0.0, {"plain": "float32", "draft": "float32"}, lambda _: None)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


def test_a_difference_is_listed_with_its_margin(target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch):
    true = generate(target, None, PROMPTS["math"], 10, eos_token_ids=target.config.eos_token_ids)[0].tokens
    wrong = (true[2] + 1) % 40

    def tampered(target: Target, drafter: Drafter | None, *args: Any, **options: Any) -> list[Generation]:
        texts = generate(target, drafter, *args, **options)
        if drafter is None:
            texts[0].tokens[2] = wrong
        return texts

    monkeypatch.setattr(cells, "generate", tampered)
    made = cells.Bench(target, drafter, PROMPTS, tokens=10, seed=0)
    cell = made.cell("math", PROMPTS["math"], 2, 0.0, {"plain": "float32", "draft": "float32"}, lambda _: None)
    assert [row["exact_match"] for row in cell.rows] == [None, 0.5]
    (difference,) = cell.differences
    assert (difference["prompt"], difference["position"], difference["dtype"]) == (0, 2, "float32")
    assert (difference["plain_token"], difference["draft_token"]) == (wrong, true[2])
    logits_V = target.forward(jnp.asarray([PROMPTS["math"][0] + true[:2]])).logits_BSV[0, -1]
    assert difference["margin"] == pytest.approx(float(logits_V[true[2]] - logits_V[wrong]), abs=1e-4)


def test_greedy_texts_are_compared_within_one_dtype(target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch):
    decoded: list[tuple[str, bool]] = []

    def by_dtype(target: Target, drafter: Drafter | None, prompts: Any, *_: Any, **options: Any) -> list[Generation]:
        decoded.append((str(target.dtype), drafter is None))
        options["on_progress"](1)
        return [Generation([1, 2 if target.dtype == jnp.float32 else 3], []) for _ in prompts]

    monkeypatch.setattr(cells, "generate", by_dtype)
    made = cells.Bench(target, drafter, PROMPTS, tokens=10, seed=0)
    dtypes: dict[cells.Policy, str] = {"plain": "float32", "draft": "bfloat16"}
    for _ in range(2):  # the second time the plain bfloat16 texts are there already
        cell = made.cell("math", PROMPTS["math"], 8, 0.0, dtypes, lambda _: None)
        assert cell.rows[1]["exact_match"] == 1.0
    assert decoded.count(("bfloat16", True)) == 1


def test_models_are_cast_whole(target: Target, drafter: Drafter):
    cast, drafts = cells.Bench(target, drafter, PROMPTS, tokens=4, seed=0).models("bfloat16")
    assert cast.dtype == drafts.frozen.head_VD.dtype == drafts.params["backbone"]["fc"].dtype == jnp.bfloat16


def test_probe_times_every_pass():
    choice = choose_dtype(make_target(num_layers=1), 2, 5, 64, ["bfloat16"])
    assert set(choice.plain_ms) == set(choice.verify_ms) == {"bfloat16"}
    assert all(math.isfinite(ms) and ms > 0 for ms in [*choice.plain_ms.values(), *choice.verify_ms.values()])


def test_probe_takes_the_fastest():
    choice = probe.Probe(1, {"float32": 33.0, "bfloat16": 300.0}, {"float32": 96.0, "bfloat16": 57.0})
    assert (choice.plain_dtype, choice.draft_dtype) == ("float32", "bfloat16")


@pytest.mark.slow
def test_run_with_every_program(target: Target, drafter: Drafter):
    result = bench.run(target, drafter, PROMPTS, SETTINGS)
    assert len(result["rows"]) == 2 * 2 * 2 * 2
    assert all(row["exact_match"] is None for row in result["rows"] if row["temperature"] > 0)
    assert all(set(choice["plain_ms"]) == {"float32", "bfloat16"} for choice in result["probes"])


# What main says of bad input.


@pytest.fixture
def checkpoint(drafter: Drafter, tmp_path: Path) -> Path:
    write_drafter(tmp_path / "drafter", drafter.config, drafter.params, None, {})
    return tmp_path / "drafter"


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    path = tmp_path / "maths.jsonl"
    lines = ["How much is twelve times three?", "What is the sum of the first ten numbers?"]
    path.write_text("".join(json.dumps({"turns": [line]}) + "\n" for line in lines))
    return path


def fails(capsys: pytest.CaptureFixture[str], argv: list[object]) -> str:
    assert bench.main([str(arg) for arg in argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_main_decodes_a_file_and_writes_json(
    quick: None, target: Target, checkpoint: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bench, "load_target", lambda path, dtype: target)
    out = prompts_file.with_name("out.json")
    argv = ["--target", "tiny", "--drafter", checkpoint, "--prompts", prompts_file, "--json", out]
    assert bench.main([*map(str, argv), "--tokens", "10", "--limit", "2", "--single", "1"]) == 0
    result = json.loads(out.read_text())
    assert {row["domain"] for row in result["rows"]} == {"maths"}
    assert result["command"].startswith("python -m serve.bench --target tiny")
    assert {"cpu", "cores", "jax", "platform"} <= set(result["machine"])


def test_the_shipped_drafter_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(bench, "SHIPPED_DRAFTER", tmp_path / "none")
    assert str(tmp_path / "none") in fails(capsys, [])


def test_another_target_needs_its_own_drafter(capsys: pytest.CaptureFixture[str]):
    assert "--drafter" in fails(capsys, ["--target", "elsewhere"])


def test_target_is_missing(capsys: pytest.CaptureFixture[str], checkpoint: Path):
    assert "no such file" in fails(capsys, ["--target", "elsewhere", "--drafter", checkpoint])


def test_drafter_of_another_target(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bench, "load_target", lambda path, dtype: make_target(vocab_size=44))
    assert "another target" in fails(capsys, ["--target", "tiny", "--drafter", checkpoint])


def test_random_tokens_are_refused(capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path):
    path = tmp_path / "random.jsonl"
    path.write_text(json.dumps({"prompt": [5, 17, 23]}) + "\n")
    argv = ["--drafter", checkpoint, "--prompts", path]
    assert "random tokens" in fails(capsys, argv)


def test_prompt_longer_than_the_context_is_named(target: Target):
    prompts = [Prompt("short enough", "chat"), Prompt("a long one " * 200, "chat")]
    with pytest.raises(ConfigError, match=r"'a long one a long .* of chat has 600 tokens"):
        bench.encode(target, prompts, 10)


@pytest.mark.parametrize("argv", [["--tokens", "1"], ["--limit", "0"], ["--json", "/nowhere/out.json"]])
def test_bad_settings(capsys: pytest.CaptureFixture[str], argv: list[str], checkpoint: Path):
    assert argv[0] in fails(capsys, ["--drafter", checkpoint, *argv])


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "out.json"
    path.write_text("{}")

    def full(self: Path, text: str, encoding: str) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ConfigError, match="No space left"):
        report.write_json(path, {})
    assert path.read_bytes() == b"{}"
    assert list(tmp_path.iterdir()) == [path]
