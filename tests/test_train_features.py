"""Cached target features: the same loss as online, and no cache is ever taken for another."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.config import Config, ConfigError, drafter_config
from dspark_jax.config_files import load_config
from dspark_jax.target import cast_params
from train import data, features, setup
from train.evaluate import to_batch
from train.step import eval_step
from train.tiny import tiny_target, tiny_tokenizer

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "tiny.py"


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(CONFIG)


def make(config: Config, out: Path, *more: str) -> int:
    dtype = () if "--dtype" in more else ("--dtype", "float32")
    return features.main(["--config", str(CONFIG), "--out", str(out), *dtype, *more])


@pytest.fixture(scope="module")
def cache(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("features") / "cache"
    assert make(config, out) == 0
    return out


def with_cache(config: Config, cache: Path, **draft: object) -> Config:
    changed = dataclasses.replace(config.draft, **draft) if draft else config.draft
    return dataclasses.replace(config, draft=changed, data=dataclasses.replace(config.data, features=str(cache)))


@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_online_and_cached_give_the_same_loss(
    config: Config, cache: Path, tmp_path: Path, dtype: str, within: float
) -> None:
    if dtype == "bfloat16":  # the default, for half the space
        cache = tmp_path
        assert make(config, cache, "--dtype", dtype) == 0
    run = setup.build(with_cache(config, cache), None)
    rows = [data.element((record,), run.shapes[0], np.random.default_rng(0), run.features) for record in run.train[:4]]
    cached = to_batch(jax.tree.map(lambda *leaves: np.stack(leaves), *rows))
    state = run.first_state()
    online = eval_step(run.models, run.mesh, state.params, run.weights, cached._replace(features=None))
    for name, value in eval_step(run.models, run.mesh, state.params, run.weights, cached).items():
        np.testing.assert_allclose(value, online[name], rtol=within, atol=within, err_msg=name)


def test_a_run_goes_on_after_its_last_whole_shard(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(features, "_SHARD_RECORDS", 16)
    write, calls = features._write_manifest, []

    def killed(directory: Path, manifest: dict) -> None:
        if calls:
            raise KeyboardInterrupt
        calls.append(manifest)
        write(directory, manifest)

    monkeypatch.setattr(features, "_write_manifest", killed)
    with pytest.raises(KeyboardInterrupt):
        make(config, tmp_path)
    monkeypatch.setattr(features, "_write_manifest", write)
    assert make(config, tmp_path) == 0
    made = capsys.readouterr().out.splitlines()[-1]
    assert made.endswith("16 were there already")
    run = setup.build(with_cache(config, tmp_path), None)
    assert run.features is not None
    keys = [key for shard in json.loads((tmp_path / "manifest.json").read_text())["shards"] for key in shard["keys"]]
    assert sorted(keys) == sorted(set(keys)), "a conversation was stored twice"
    features.CachedFeatures(tmp_path, run.target, run.drafter).require(run.conversations.records)


def test_the_manifest_says_what_was_written(config: Config, cache: Path) -> None:
    manifest = json.loads((cache / "manifest.json").read_text())
    records = setup.build(config, None).conversations.records
    unique = {record.tokens.tobytes(): len(record.tokens) for record in records}
    assert manifest["records"] == len(unique)
    assert manifest["tokens"] == sum(unique.values())
    assert manifest["max_length"] == max(unique.values())
    assert manifest["dtype"] == "float32"


def test_packed_rows_bring_the_features_of_their_conversations(config: Config, cache: Path) -> None:
    run = setup.build(with_cache(config, cache), None)
    assert run.features is not None
    first, second = run.train[:2]
    both = run.features.read((first, second), 512)
    for record, begin in ((first, 0), (second, len(first.tokens))):
        part = slice(begin, begin + len(record.tokens))
        alone = run.features.read((record,), len(record.tokens))
        np.testing.assert_array_equal(both.taps_BSMD[part], alone.taps_BSMD)
    assert not both.hidden_BSD[len(first.tokens) + len(second.tokens) :].any()


def test_one_of_several_processes_makes_no_cache(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    assert make(config, tmp_path / "cache") == 2
    assert "train.features runs as one process" in capsys.readouterr().err


def test_other_layers_are_refused_by_name(config: Config, cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"made with layers = \[-1, 1\], the run needs \[0, 1\]"):
        setup.build(with_cache(config, cache, target_layer_ids=(0, 1)), None)


def test_a_drafter_that_taps_less_reads_its_own_layers(config: Config, cache: Path) -> None:
    whole, part = (setup.build(with_cache(config, cache, **draft), None) for draft in ({}, {"target_layer_ids": (1,)}))
    assert whole.features is not None and part.features is not None
    both, one = (run.features.read(run.train[:1], 192) for run in (whole, part) if run.features)
    np.testing.assert_array_equal(one.taps_BSMD, both.taps_BSMD[:, 1:])
    np.testing.assert_array_equal(one.hidden_BSD, both.hidden_BSD)


def test_another_target_and_template_are_refused_by_name(config: Config, cache: Path, tmp_path: Path) -> None:
    for name, value in (("weights", "0" * 16), ("template", "f" * 16), ("target", "other")):
        for file in cache.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        manifest = json.loads((cache / "manifest.json").read_text()) | {name: value}
        (tmp_path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(ConfigError, match=f"made with {name} = '{value}'"):
            setup.build(with_cache(config, tmp_path), None)


def test_whatever_changes_features_changes_the_identity() -> None:
    target, drafter = tiny_target(), drafter_config(load_config(CONFIG).draft, tiny_target().config)
    known = features.identity(target, drafter)
    embed = target.params["embed"]
    tokenizer = tiny_tokenizer()
    tokenizer.tokenizer.chat_template += "{# another #}"
    changed = {
        "weights": dataclasses.replace(target, params=target.params | {"embed": embed.at[-1, -1].add(1.0)}),
        "shape": dataclasses.replace(target, config=dataclasses.replace(target.config, rope_theta=5e5)),
        "target_dtype": dataclasses.replace(target, params=cast_params(target.params, "bfloat16")),
        "template": dataclasses.replace(target, tokenizer=tokenizer),
    }
    for name, other in changed.items():
        found = features.identity(other, drafter)
        assert {key for key in known if found[key] != known[key]} == {name}
    assert features.identity(target, dataclasses.replace(drafter, target_layer_ids=(0,)))["layers"] == [0]


def test_an_entry_that_is_not_what_was_written_is_refused_when_it_is_read(
    config: Config, cache: Path, tmp_path: Path
) -> None:
    """The digests are exchanged, not the shard's bytes: ArrayRecord has checksums of its own for those."""
    for file in cache.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((cache / "manifest.json").read_text())
    manifest["shards"][0]["digests"].reverse()
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    run = setup.build(with_cache(config, tmp_path), None)
    assert run.features is not None
    with pytest.raises(ConfigError, match=r"shard-00000.array_record: entry \d+ is not what was written"):
        run.features.read(run.train[:2], 512)


def test_what_cannot_be_written_is_said(config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert make(config, tmp_path / "file" / "cache") == 2
    assert "cache: cannot write it" in capsys.readouterr().err


def test_only_what_is_still_to_be_made_is_estimated(
    config: Config, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = setup.build(config, None)
    tokens = sum({features.record_key(record): len(record.tokens) for record in run.conversations.records}.values())
    records = run.conversations.records * 2
    manifest = features.open_manifest(run.target, run.drafter, "float32", cache / "none")
    todo = features.missing(records, manifest)
    size = features.estimate(todo, run.target, run.drafter, "float32", cache)
    # Two taps and the hidden state of 32 numbers, and the log-partition.
    assert (size.tokens, size.bytes) == (tokens, tokens * (3 * 32 * 4 + 4))
    written = sum(file.stat().st_size for file in cache.glob("*.array_record"))
    assert 0.8 * size.bytes < written < 1.3 * size.bytes  # compressed, and with names
    assert make(config, cache) == 0
    known = len(run.conversations.records)
    assert f"0 of {known} conversations are to be made: 0 tokens" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.multidevice
def test_several_devices_make_the_same_features(config: Config, cache: Path, tmp_path: Path) -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    mesh = ["--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.tensor", "2"]
    command = [sys.executable, "-m", "train.features", "--config", str(CONFIG), "--out", str(tmp_path / "cache")]
    subprocess.run(
        [*command, "--dtype", "float32", *mesh], env=environment, cwd=CONFIG.parents[1], check=True, timeout=300
    )
    one, eight = (setup.build(with_cache(config, folder), None) for folder in (cache, tmp_path / "cache"))
    assert one.features is not None and eight.features is not None
    for record in one.train[:5]:
        pair = (cached.read((record,), 192) for cached in (one.features, eight.features))
        for left, right in zip(*pair, strict=True):
            np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4)


def test_a_damaged_shard_is_refused_by_name(config: Config, cache: Path, tmp_path: Path) -> None:
    for file in cache.iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content if file.suffix == ".json" else content[:-100])
    with pytest.raises(ConfigError, match=r"shard-00000.array_record: missing or damaged"):
        setup.build(with_cache(config, tmp_path), None)


def test_a_cache_without_some_conversation_is_refused(config: Config, cache: Path) -> None:
    run = setup.build(with_cache(config, cache), None)
    assert run.features is not None
    other = dataclasses.replace(run.train[0], tokens=run.train[0].tokens[::-1])
    with pytest.raises(ConfigError, match="lacks 1 of 2 conversations"):
        run.features.require([run.train[1], other])


def test_a_cache_that_would_not_fit_needs_a_yes(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = lambda *arguments: features.Estimate(tokens=10, bytes=2, free=1)  # noqa: E731
    monkeypatch.setattr(features, "estimate", full)
    assert make(config, tmp_path / "cache") == 2
    assert "would not fit" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()
    assert make(config, tmp_path / "cache", "--yes") == 0
