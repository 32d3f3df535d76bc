"""`serve.compile`: errors in one line, the roofline's arithmetic, and a small engine compiled for a real topology."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import TARGET

from dspark_jax import ConfigError
from dspark_jax.slices import CHIPS, Chip
from serve import compile as serve_compile
from serve import roofline
from serve.roofline import Work

REPOSITORY = Path(__file__).resolve().parents[1]
SMALL = """
import dataclasses, runpy
big = runpy.run_path({path!r})
def get_target():
    return dataclasses.replace(big["get_target"](), num_layers=3, vocab_size=4096, eos_token_ids=(1,))
def get_config():
    draft = dataclasses.replace(big["get_config"]().draft, mask_token_id=2, num_layers=1, target_layer_ids=(0,))
    return dataclasses.replace(big["get_config"](), draft=draft)
"""


def test_a_round_takes_as_long_as_the_slowest_of_compute_memory_and_links():
    chip = Chip(memory=1.0, flops=100.0, memory_bandwidth=10.0, link_bandwidth=2.0)
    assert roofline.seconds(Work(200.0, 10.0), chip) == 2.0
    assert roofline.seconds(Work(200.0, 50.0), chip) == 5.0
    assert roofline.seconds(Work(200.0, 50.0, 12.0), chip) == 6.0
    assert roofline.seconds(Work(1.0, 2.0, 5.0) + Work(199.0, 48.0, 5.0), chip) == 5.0


def test_attention_reads_each_key_once_and_meets_it_with_every_query():
    config = dataclasses.replace(TARGET, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16)
    work = roofline.attention_work(config, requests=5, queries=20, context=100, bytes_each=2, tensor=2)
    assert work.bytes == 5 * 100 * 3 * (2 * 16) * 2 * 2 / 2  # contexts, layers, heads, keys and values, bytes
    assert work.flops == 20 * 100 * 3 * (4 * 16) * 2 * 2 / 2  # rows, keys, layers, heads, two products


def test_chips_are_told_apart():
    """Their ridge, FLOPs a byte at which compute and memory balance, says how many tokens a step verifies for free."""
    ridge = {name: chip.flops / chip.memory_bandwidth for name, chip in CHIPS.items()}
    assert sorted(ridge, key=lambda name: ridge[name]) == ["TPU v5", "TPU v4", "TPU v5 lite", "TPU v6 lite"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target-config", "qwen4_9b", "--topology", "v5e:2x4"], "no such file; known names: qwen3_14b, qwen3_4b"),
        (["--target-config", "smollm2_135m", "--topology", "v5e:2x4"], "defines no get_target"),
        (["--target-config", "qwen3_8b", "--topology", "v5e:3"], "--topology v5e:3: cannot be described"),
        (
            ["--target-config", "qwen3_8b", "--topology", "v5e:2x4", "--json", "/nowhere/x.json"],
            "--json /nowhere/x.json",
        ),
    ],
)
def test_what_must_be_put_right_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert serve_compile.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_named_targets_bring_the_papers_drafters():
    sizes = {name: serve_compile.load_models(name) for name in ("qwen3_4b", "qwen3_8b", "qwen3_14b")}
    assert [target.d_model for target, _ in sizes.values()] == [2560, 4096, 5120]
    for _, drafter in sizes.values():
        assert (drafter.num_drafts, drafter.num_layers, drafter.markov_rank) == (7, 5, 256)
    with pytest.raises(ConfigError, match="no such file"):
        serve_compile.load_models("elsewhere.py")


@pytest.mark.parametrize(("text", "message"), [("x = 1", "defines no get_target"), ("def f(:", "invalid syntax")])
def test_a_target_config_that_is_none_is_refused_by_name(tmp_path: Path, text: str, message: str):
    path = tmp_path / "wrong.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"--target-config .*wrong.py: .*{message}"):
        serve_compile.load_models(str(path))


@pytest.mark.tpu_compile
def test_a_small_engine_compiles_for_a_topology_and_a_huge_one_does_not_fit(tmp_path: Path):
    """With the kernel, over eight devices, layers as a loop: the whole engine for one request, and one more bucket."""
    config, out = tmp_path / "small.py", tmp_path / "out.json"
    config.write_text(SMALL.format(path=str(REPOSITORY / "configs" / "qwen3_4b.py")))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["-m", "serve.compile", "--target-config", str(config), "--topology", "v5e:2x4", "--json", str(out)]
        known = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")} | {"PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(
            [sys.executable, *command, *arguments], env=known, cwd=REPOSITORY, text=True, capture_output=True
        )

    done = run("--requests", "1", "--max-context", "65536", "--prefill", "64")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fits: " in done.stdout
    told = json.loads(out.read_text())
    assert [(p["program"], p["tokens"]) for p in told["programs"]] == [
        ("prefill", 64), ("plain", 1), ("round", 4), ("round", 8)
    ]  # fmt: skip
    rounds = told["programs"][1:]
    assert all(a["flops"] < b["flops"] and a["sent"] < b["sent"] for a, b in itertools.pairwise(rounds))
    assert all(p["temporaries_bytes"] < told["memory"]["target pages"] / 2 for p in rounds), "pages are copied"
    assert rounds[0]["flops"] > told["memory"]["target"], (
        "two operations a weight of two bytes, in every layer of the loop"
    )
    assert told["needed"] < told["chip"]["memory"]
    done = run("--requests", "8", "--max-context", "8388608")
    assert done.returncode == 1 and "does not fit: " in done.stdout
