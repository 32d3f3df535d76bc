"""The comparison of drafters: equal conditions, a run that goes on where it was, and tables that say what was found."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from benchmarks import drafters, drafters_measure, drafters_plots, drafters_report, drafters_train
from dspark_jax.config import Config, ConfigError, TargetConfig, drafter_config
from dspark_jax.config_files import load_config, load_drafters
from dspark_jax.weights.drafter_files import check_writable, native_format
from train.loop import Outcome
from train.tiny import tiny_target

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
COMPARISON = CONFIGS / "compare_smollm2.py"
NAMES = list(load_drafters(COMPARISON))
SMOLLM2 = TargetConfig(
    family="llama", vocab_size=49152, d_model=576, d_ff=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
    rope_theta=1e5, norm_eps=1e-5, max_length=8192, tied_head=True, eos_token_ids=(2,),
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_each_drafter_exists_and_is_trained_like_the_others(name: str) -> None:
    common, config = load_config(COMPARISON), load_drafters(COMPARISON)[name]
    made = drafter_config(config.draft, SMOLLM2)
    check_writable(native_format(made), made)
    assert (made.num_drafts, made.draft_vocab_size, made.confidence_head) == (5, 8192, True)
    same = "target", "data", "optimizer", "mesh"
    assert [getattr(config, group) for group in same] == [getattr(common, group) for group in same]
    start = "corpus" if name == "dspark-2-corpus" else "random"
    assert config.train == dataclasses.replace(common.train, markov_init=start)
    # The cache of one training serves all: nobody taps a layer that the others do not.
    assert set(made.target_layer_ids) <= set(drafter_config(common.draft, SMOLLM2).target_layer_ids)
    sizes = drafters_measure.parameters(made)
    has_tables, of_previous = made.markov_rank > 0 or made.algorithm == "dflash2", max(1, made.ngram_tokens)
    assert sizes["in_tables"] == has_tables * 64 * (of_previous * 49152 + 8192)
    assert sizes["parameters"] > sizes["in_tables"]


def made_up(*names: str, seeds: tuple[int, ...] = (1,)) -> dict[str, Any]:
    """Results as the command writes them, in which every drafter adds one token a round more than the one before it."""

    def run(place: int, name: str, seed: int) -> dict[str, Any]:
        rows = [
            {
                "set": prompts, "domain": domain, "temperature": t, "emitted": [10 * (place + 2), 20 * (place + 2), 0],
                "rounds": [10, 20, 0], "conditional": [0.9, 0.8, None],
            }
            for prompts, domain in (("gsm8k", "math"), ("humaneval", "code"))
            for t in (0.0, 1.0)
        ]  # fmt: skip
        return {
            "name": name, "seed": seed, "differs": [], "seconds": 120.0, "blocks": 7, "positions": 30, "skipped": 0,
            "parameters": 3_000_000, "in_tables": 1_000_000, "layers": 2, "num_drafts": 3, "dtype": "float32",
            "draft_seconds": {"1": 0.001, "8": 0.002}, "rows": rows,
        }  # fmt: skip

    return {
        "machine": {"cpu": "A CPU", "cores": 2, "system": "Linux", "python": "3.11", "platform": "cpu", "devices": []},
        "versions": {"jax": "1"}, "command": "python -m benchmarks.drafters", "target": "tiny", "tokens": 8,
        "sets": [
            {"name": "gsm8k", "domain": "math", "prompts": 3, "left_out": 0},
            {"name": "humaneval", "domain": "code", "prompts": 3, "left_out": 0},
        ],
        "context": 256,
        "common": {
            "steps": 3, "batch_size": 2, "num_anchors": 4, "max_length": 64, "learning_rate": 1e-3, "dtype": "float32",
            "cached_features": False, "draft_vocab_size": 0,
        },
        "drafters": [run(place, name, seed) for seed in seeds for place, name in enumerate(names)],
    }  # fmt: skip


def test_every_drafter_has_its_row_in_every_table() -> None:
    names = ("dflash-5", "dspark-2-vanilla", "eagle-3")
    text = drafters_report.markdown(made_up(*names, seeds=(1, 2)))
    tables = [sheet for sheet in drafters_report.sheets(made_up(*names)) if sheet.columns[0] == "drafter"]
    assert len(tables) == 5  # lengths and conditional acceptance at two temperatures, and what they cost
    for sheet in tables:
        assert [row[0] for row in sheet.rows] == list(names)
        assert all(len(row) == len(sheet.columns) for row in sheet.rows)
    for name in names:
        assert text.count(f"| {name} |") == len(tables)
    assert "| dspark-2-vanilla | 3.00 (3.00 to 3.00) | 3.00 (3.00 to 3.00) | 3.00 (3.00 to 3.00) | 3.00, 3.00 |" in text
    assert "| dspark-2-vanilla over dflash-5 | +50.0 | +50.0 | +50.0 (+50.0 to +50.0) | above 0 (paper) |" in text
    assert "0.90 0.80 -" in text


def test_a_gain_is_that_of_the_same_prompts() -> None:
    """A prompt in which only one of the two had rounds says nothing about their ratio."""
    result = made_up("dflash-2", "dspark-2-vanilla")
    for row in result["drafters"][0]["rows"]:
        row["emitted"][2], row["rounds"][2] = 1000, 10
    one, other = (drafters_report.counts(result, name, 0.0) for name in ("dspark-2-vanilla", "dflash-2"))
    ratio, bounds = drafters_report.gain(one, other)
    assert ratio == pytest.approx(0.5) and bounds == pytest.approx((0.5, 0.5))


def test_pictures_are_drawn(tmp_path: Path) -> None:
    for path in drafters_plots.draw(made_up("dflash-5", "eagle-3"), tmp_path):
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def tiny() -> Config:
    config = load_config(CONFIGS / "tiny.py")
    train = dataclasses.replace(config.train, max_steps=3, batch_size=2, eval_every=0)
    return dataclasses.replace(config, train=train)


@pytest.fixture(scope="module")
def budget(tiny: Config) -> drafters_train.Budget:
    return drafters_train.make_budget(tiny, tiny_target())


def test_positions_seen_are_the_supervised_slots_of_the_batches(tiny: Config, budget: drafters_train.Budget) -> None:
    drafts = drafter_config(tiny.draft, tiny_target().config).num_drafts
    stream, blocks, positions = drafters_train.data.batches(budget.groups, 2, 5), 0, 0
    for _ in range(3):
        x = next(stream)
        for row, anchor in zip(*np.nonzero(x["keep"]), strict=True):
            labels = x["supervised"][row, x["anchors"][row, anchor] + 1 :][:drafts]
            same = (
                x["start"][row, x["anchors"][row, anchor] + 1 :][:drafts] == x["start"][row, x["anchors"][row, anchor]]
            )
            blocks, positions = blocks + 1, positions + int(np.cumprod(labels & same).sum())
    assert drafters_train.seen(budget, 5, 3, 2, drafts) == (blocks, positions)


def test_a_run_goes_on_and_a_finished_one_is_left_alone(
    tiny: Config, budget: drafters_train.Budget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []

    def train(config: Config, folder: Path, resume: bool, console: Console) -> Outcome:
        calls.append(resume)
        step = len(calls)
        (folder / "checkpoints" / str(step)).mkdir(parents=True)
        if step == 2:
            raise KeyboardInterrupt  # killed, after its checkpoint
        return Outcome(step, None, 0, stopped=step == 1)

    def trained(config: Config = tiny) -> dict[str, Any] | None:
        return drafters_train.trained(config, tmp_path, budget, tiny_target(), Console(quiet=True))

    monkeypatch.setattr(drafters_train, "train", train)
    assert trained() is None
    with pytest.raises(KeyboardInterrupt):
        trained()
    # The killed session counts up to its checkpoint, here an hour.
    before = json.loads((tmp_path / "run.json").read_text())
    os.utime(tmp_path / "checkpoints" / "2", times=(before["started"] + 3600,) * 2)
    facts = trained()
    assert facts is not None and facts["finished"] and facts["positions"] > facts["blocks"] > 0
    assert 3600 <= facts["seconds"] - before["seconds"] < 3660
    assert trained() == facts
    assert calls == [False, True, True]
    other = dataclasses.replace(tiny, train=dataclasses.replace(tiny.train, max_steps=4))
    with pytest.raises(ConfigError, match=r"train.max_steps 3 there, 4 here"):
        trained(other)


def test_one_dtype_is_given_to_target_and_training() -> None:
    def dtypes(dtype: Any) -> set[tuple[str, str]]:
        runs = drafters._runs(drafters.Args(config=COMPARISON, dtype=dtype))
        return {(config.target.dtype, config.train.dtype) for config in runs.values()}

    assert dtypes("") == {("bfloat16", "bfloat16")} and dtypes("float32") == {("float32", "float32")}


def test_the_command_keeps_no_place_on_this_machine() -> None:
    words = ["--data", "/home/me/answers.jsonl", "--prompts", "../shared/eval", "--config", "configs/x.py"]
    assert drafters._command(words) == (
        "python -m benchmarks.drafters --data answers.jsonl --prompts eval --config configs/x.py"
    )


@pytest.mark.slow
def test_the_comparison_of_tiny_drafters(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training, decoding, timing and tables for a block drafter and a chain; the second time nothing is done again."""
    config = tmp_path / "config.py"
    config.write_text(
        "import dataclasses\nfrom pathlib import Path\nfrom dspark_jax.config_files import load_config\n"
        f"get_config = lambda: load_config(Path({str(CONFIGS / 'tiny.py')!r}))\n"
        "def get_drafters():\n"
        "    plain = dataclasses.replace(get_config(), train=dataclasses.replace(get_config().train, eval_every=0))\n"
        "    chain = dataclasses.replace(plain, draft=dataclasses.replace(\n"
        f"        load_config(Path({str(CONFIGS / 'tiny_eagle3.py')!r})).draft, algorithm='mtp', num_taps=0))\n"
        "    return {'dspark': plain, 'mtp-1': chain}\n"
    )
    arguments = f"--config {config} --workdir {tmp_path / 'work'} --steps 2 --batch-size 2 --limit 1 --tokens 4".split()
    assert drafters.main(arguments) == 0
    out = tmp_path / "work" / "results.json"
    first = json.loads(out.read_text())
    assert [run["name"] for run in first["drafters"]] == ["dspark", "mtp-1"]
    assert len({run["blocks"] for run in first["drafters"]}) == 1
    monkeypatch.setattr(drafters_train, "train", None)
    monkeypatch.setattr(drafters_measure, "accepted", None)
    assert drafters.main(arguments) == 0
    assert json.loads(out.read_text()) == first
    capsys.readouterr()
    assert drafters.main(["--markdown", str(out)]) == 0
    assert capsys.readouterr().out == drafters_report.markdown(first) + "\n"
