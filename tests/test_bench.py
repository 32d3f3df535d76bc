"""The benchmarks on tiny random models: their numbers agree with each other, and bad input ends in one clear line."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import good_drafter, make_drafter, make_target

from dspark_jax import ConfigError, Drafter, SamplingParams, Target, generate
from dspark_jax.weights.drafter_files import write_drafter
from serve import bench, calibrate, load, load_plots, profile, report, setup
from serve import curves as curves_lib
from serve.cells import Bench
from serve.curves import Curves
from serve.engine import Engine
from serve.prompts import Prompt, encode

PROMPTS = {"math": [[1, 2, 3], [4, 5, 6, 7]], "chat": [[3, 1, 4, 1, 5], [9, 2, 6]]}
SETTINGS = bench.Settings(tokens=10, limit=2, single=1)


class Words:
    """The one call of a tokenizer that the benchmark makes: an id a word."""

    template_hash = "words"

    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        return [len(word) % 30 for word in messages[0]["content"].split()]


@pytest.fixture(scope="module")
def target() -> Target:
    return dataclasses.replace(make_target(mixing=0.15, eos_token_ids=(7,)), tokenizer=Words())


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    return good_drafter(target)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Two requests, greedy: other programs would be compiled for little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "TEMPERATURES", (0.0,))
        patch.setattr(bench, "REQUESTS", (2,))
        yield


@pytest.fixture(scope="module")
def both(quick: None, target: Target, drafter: Drafter) -> tuple[Engine, Engine]:
    plain, drafting = bench.engines(target, drafter, Path(), 5, SETTINGS.tokens)
    plain.compile()
    drafting.compile()
    return plain, drafting


@pytest.fixture(scope="module")
def curves(both: tuple[Engine, Engine]) -> Curves:
    sizes = {(r, t) for r in both[1].request_buckets for t in (0, *both[1].token_buckets[r])}
    return Curves({(r, t, s): 1.0 + 0.05 * (t or r) for r, t in sizes for s in (False, True)})


@pytest.fixture(scope="module")
def steps() -> list[tuple[str, int]]:
    return []


@pytest.fixture(scope="module")
def result(target: Target, both: tuple[Engine, Engine], curves: Curves, steps: list[tuple[str, int]]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:  # the machine's own noise is not under test
        patch.setattr(profile, "measure", lambda engine, on_point: curves)
        return bench.run(target, *both, PROMPTS, SETTINGS, lambda text, done: steps.append((text, done)))


def rows_of(result: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if all(row[name] == value for name, value in wanted.items())]


def test_every_cell_has_a_row_a_policy(result: dict[str, Any], drafter: Drafter):
    cells = [(r["requests"], r["temperature"], r["domain"], r["policy"]) for r in result["rows"]]
    policies = ("off", f"fixed:{drafter.config.num_drafts}", "scheduled")
    assert sorted(cells) == sorted((2, 0.0, domain, policy) for domain in PROMPTS for policy in policies)


def test_one_greedy_request_is_also_served_with_every_draft_verified(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "REQUESTS", (1, 8))
    assert bench.compared("scheduled", 5, 1, 0.0) == ["off", "fixed:5", "scheduled"]
    assert bench.compared("scheduled", 5, 8, 0.0) == bench.compared("scheduled", 5, 1, 1.0) == ["off", "scheduled"]


def test_rows_agree_with_themselves(result: dict[str, Any], drafter: Drafter):
    for row in result["rows"]:
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert 0 < row["tokens"] <= row["prompts"] * (SETTINGS.tokens - 1)
        (plain,) = rows_of(result, domain=row["domain"], policy="off")
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / plain["tokens_per_second"])
        if row["policy"] == "off":
            assert row["drafted_rounds"] == 0 and row["accepted_length"] is None
        else:
            assert 1 <= row["accepted_length"] <= drafter.config.num_drafts + 1
            assert row["tokens"] == plain["tokens"] and row["rounds"] <= plain["rounds"]


def test_acceptance_is_that_of_the_texts(result: dict[str, Any], target: Target, drafter: Drafter):
    texts = generate(target, drafter, PROMPTS["math"], SETTINGS.tokens, eos_token_ids=target.config.eos_token_ids)
    (row,) = rows_of(result, domain="math", policy=f"fixed:{drafter.config.num_drafts}")
    # The engine drafts from a shortlist, which can only miss.
    assert sum(len(text.rounds) for text in texts) <= row["drafted_rounds"] < row["tokens"]
    assert row["tokens"] == sum(len(text.tokens) - 1 for text in texts)
    assert row["exact_match"] == 1.0
    assert all(r["exact_match"] is None for r in rows_of(result, policy="off"))


def test_summary_is_the_mean_over_domains(result: dict[str, Any]):
    for mean in result["summary"]:
        group = rows_of(result, policy=mean["policy"])
        assert mean["speedup"] == pytest.approx(sum(row["speedup"] for row in group) / len(group))
        assert mean["prompts"] == sum(row["prompts"] for row in group)


def test_all_announced_steps_are_done(steps: list[tuple[str, int]], result: dict[str, Any]):
    assert sum(done for _, done in steps) == 1 + len(PROMPTS)  # the programs were compiled before
    assert ("2 requests, temperature 0, chat: scheduled", 0) in steps


def test_result_is_json_and_can_be_shown(result: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "out.json"
    report.write_json(path, result)
    assert json.loads(path.read_text()) == json.loads(json.dumps(result))
    assert list(tmp_path.iterdir()) == [path]
    report.show(result, 4)
    assert "All 8 greedy texts are those of plain decoding" in capsys.readouterr().out


def test_a_difference_is_listed_with_its_margin(
    target: Target, both: tuple[Engine, Engine], curves: Curves, monkeypatch: pytest.MonkeyPatch
):
    made = Bench(target, *both, curves, tokens=10, seed=0)
    real = made.decode
    true = real(PROMPTS["math"], "off", 0.0, 0).generations[0].tokens
    wrong = (true[2] + 1) % 40

    def tampered(prompts: Any, policy: str, temperature: float, first: int) -> Any:
        batch = real(prompts, policy, temperature, first)
        if policy == "off":
            batch.generations[0].tokens[2] = wrong
        return batch

    monkeypatch.setattr(made, "decode", tampered)
    cell = made.cell("math", PROMPTS["math"], 2, 0.0, ["off", "scheduled"], lambda _: None)
    assert [row["exact_match"] for row in cell.rows] == [None, 0.5]
    (difference,) = cell.differences
    assert (difference["prompt"], difference["position"], difference["policy"]) == (0, 2, "scheduled")
    assert (difference["plain_token"], difference["draft_token"]) == (wrong, true[2])
    logits_V = target.forward(jnp.asarray([PROMPTS["math"][0] + true[:2]])).logits_BSV[0, -1]
    assert difference["margin"] == pytest.approx(float(logits_V[true[2]] - logits_V[wrong]), abs=1e-4)


def test_load_serves_every_request_once_under_every_policy(both: tuple[Engine, Engine], curves: Curves):
    args = load.Args(policies=("off", "fixed:4", "scheduled"), concurrency=(1, 2), rates=(50.0,), requests=2, tokens=6)
    rows = load.run({False: both[0], True: both[1]}, curves, PROMPTS, args)
    assert len(rows) == 3 * 3
    for row in rows:
        assert row["texts"] == 2 * row["users"] and 0 < row["tokens"] <= 6 * row["texts"]
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert 0 <= row["padding_share"] < 1 and 0 < row["host_share"] < 1
        assert 0 <= row["idle_share"] < 1
        assert (row["verified_per_request_round"] or 0) >= (row["accepted_per_request_round"] or 0)
        assert set(row["by_domain"]) == set(PROMPTS)
    same = {(r["users"], r["rate"]): set() for r in rows}
    for row in rows:
        same[row["users"], row["rate"]].add(row["tokens"])
    assert all(len(tokens) == 1 for tokens in same.values()), "policies differ in what they decode"
    load.show(rows)


def test_poisson_arrivals_wait_for_their_time(
    both: tuple[Engine, Engine], curves: Curves, monkeypatch: pytest.MonkeyPatch
):
    """With a clock that only `sleep` and steps move, no request is submitted before it arrives, and its wait is
    counted from then on."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.001
        return now[0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    server = load.Server(both[0], "off", curves, clock=clock)
    requests = load.make_requests(PROMPTS, load.Load(2, 4.0, "mixed"), load.Args(requests=3, tokens=2), ())
    submit, handed_over = server.scheduler.submit, []
    monkeypatch.setattr(server.scheduler, "submit", lambda *args: (handed_over.append(now[0]), submit(*args))[1])
    texts, seconds = load.run_point(server, load.Load(2, 4.0, "mixed"), requests, 0, sleep)
    arrivals = np.cumsum(np.random.default_rng(0).exponential(0.25, 6))
    start = 0.001  # the clock's first word
    assert [text.submitted for text in texts] == pytest.approx(start + arrivals)
    assert all(then > text.submitted for then, text in zip(handed_over, texts, strict=True))
    assert seconds > arrivals[-1]


def test_load_pictures_are_drawn(both: tuple[Engine, Engine], curves: Curves, tmp_path: Path):
    args = load.Args(policies=("off", "scheduled"), concurrency=(1, 2), requests=1, tokens=4, repeats=2)
    rows = load.run({False: both[0], True: both[1]}, curves, PROMPTS, args)
    means = load_plots.average(rows)
    off = [row for row in rows if (row["users"], row["policy"]) == (1, "off")]
    assert len(means) == 4 and means[0]["seconds"] == pytest.approx(sum(row["seconds"] for row in off) / 2)
    whole = sum(row["tokens"] for row in off) / sum(row["seconds"] for row in off)
    assert means[0]["tokens_per_second"] == pytest.approx(whole)
    load_plots.draw(rows, tmp_path)
    profile.plot(curves, tmp_path / "step-times.png")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"pareto.png", "lengths.png", "domains.png", "step-times.png"}


def test_usual_policies_are_those_that_a_drafter_can_follow(drafter: Drafter):
    own = drafter.config
    assert load.usual_policies(own) == ("off", "fixed:2", f"fixed:{own.num_drafts}", "threshold:0.5", "scheduled")
    short = dataclasses.replace(own, block_size=1, confidence_head=False, confidence_with_markov=False)
    assert load.usual_policies(short) == ("off", "fixed:1", "scheduled")


def test_profile_measures_every_program_and_leaves_the_engine_empty(
    both: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(curves_lib, "make_curves", Curves)  # tiny models on a busy machine may really be flat
    measured = profile.measure(both[1])
    assert set(measured.seconds) == {(2, t, s) for t in (0, *both[1].token_buckets[2]) for s in (False, True)}
    assert min(measured.seconds.values()) > 0
    assert not np.asarray(both[1].state.slots.length_N).any()
    profile.show(measured, 4)


def test_calibration_improves_a_boastful_head(target: Target):
    """Logits far too high: temperatures above 1 bring the predicted survival down to what is accepted."""
    drafter = make_drafter(target)
    head = {"weight": drafter.params["confidence_head"]["weight"] * 0, "bias": jnp.float32(8.0)}
    boastful = dataclasses.replace(drafter, params=drafter.params | {"confidence_head": head})
    prompts = [[1 + i % 30, 2, 3 + i % 20] for i in range(64)]
    temperatures, measured, held = calibrate.run(target, boastful, [prompts], 24, SamplingParams(0.0))
    assert measured["kept"] and sum(measured["after"]["ece"]) < sum(measured["before"]["ece"])
    assert held.logits_NG.shape[1] == drafter.config.num_drafts and np.all(temperatures > 0)
    with pytest.raises(ConfigError, match="give more prompts"):
        calibrate.run(target, boastful, [prompts[:2], prompts[2:4]], 4, SamplingParams(0.0))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_domain_has_its_share_of_every_split(count: int):
    parts = calibrate.split([[domain] * 40 for domain in range(count)])
    for part, share in zip(parts, (20, 10, 10), strict=True):
        assert [part.count(domain) for domain in range(count)] == [share] * count
    assert sorted(i for part in calibrate.split([[*range(7)], [*range(7, 12)]]) for i in part) == [*range(12)]


# What main says of bad input.


@pytest.fixture
def checkpoint(drafter: Drafter, tmp_path: Path) -> Path:
    write_drafter(tmp_path / "drafter", "deepspec", drafter.config, drafter.params, None, {})
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
    target: Target, checkpoint: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(setup, "load_target", lambda path, dtype, mesh: target)
    monkeypatch.setattr(curves_lib, "make_curves", Curves)
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
    monkeypatch.setattr(setup, "SHIPPED_DRAFTER", tmp_path / "none")
    assert str(tmp_path / "none") in fails(capsys, [])


def test_another_target_needs_its_own_drafter(capsys: pytest.CaptureFixture[str]):
    assert "--drafter" in fails(capsys, ["--target", "elsewhere"])


def test_target_is_missing(capsys: pytest.CaptureFixture[str], checkpoint: Path):
    assert "no such file" in fails(capsys, ["--target", "elsewhere", "--drafter", checkpoint])


def test_drafter_of_another_target(
    capsys: pytest.CaptureFixture[str], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(setup, "load_target", lambda path, dtype, mesh: make_target(vocab_size=44))
    assert "another target" in fails(capsys, ["--target", "tiny", "--drafter", checkpoint])


def test_more_devices_than_there_are(capsys: pytest.CaptureFixture[str], checkpoint: Path):
    count = len(jax.devices())
    for tensor in (0, count + 1):
        error = fails(capsys, ["--drafter", checkpoint, "--tensor", tensor])
        assert f"--tensor {tensor}: expected 1 to {count}, the devices that are here" in error


def test_random_tokens_are_refused(capsys: pytest.CaptureFixture[str], checkpoint: Path, tmp_path: Path):
    path = tmp_path / "random.jsonl"
    path.write_text(json.dumps({"prompt": [5, 17, 23]}) + "\n")
    argv = ["--drafter", checkpoint, "--prompts", path]
    assert "random tokens" in fails(capsys, argv)


def test_prompt_longer_than_the_context_is_named(target: Target):
    prompts = [Prompt("short enough", "chat"), Prompt("a long one " * 200, "chat")]
    with pytest.raises(ConfigError, match=r"'a long one a long .* of chat has 600 tokens"):
        encode(target, prompts, 10)


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
