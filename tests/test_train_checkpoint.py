"""What train.checkpoint promises: all or nothing, bit for bit, and a clear word when it cannot be."""

import contextlib
import dataclasses
import gc
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dspark_jax.config import ConfigError, DrafterConfig
from dspark_jax.config_files import load_config
from train.checkpoint import Checkpoints, RunFacts, changed_settings, check_drafter, check_target

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "tiny.py"


class State(NamedTuple):
    params: dict[str, Any]
    opt_state: Any
    step: jax.Array


DRAFTER = DrafterConfig(
    vocab_size=64, d_model=16, d_ff=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, rope_theta=1e4,
    norm_eps=1e-6, max_length=128, target_layer_ids=(0, 1), num_target_layers=4, block_size=4, mask_token_id=1,
)  # fmt: skip


def state(seed: int) -> State:
    keys = jax.random.split(jax.random.key(seed), 2)
    params = {"a": jax.random.normal(keys[0], (64, 64)), "b": {"c": jax.random.normal(keys[1], (5,), jnp.bfloat16)}}
    return State(params, optax.adam(1e-3).init(params), jnp.int32(seed))


def facts(step: int, **changes: Any) -> RunFacts:
    known = RunFacts(
        step=step, drafter=dataclasses.asdict(DRAFTER), data="abc", data_seed=1, place=step,
        draft_vocabulary=[1, 2, 60], best=None, config={"train": {"max_steps": 9}},
    )  # fmt: skip
    return dataclasses.replace(known, **changes)


def opened(directory: Path, keep: int = 2) -> Checkpoints:
    return Checkpoints(directory, keep)


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may grow over 64 kB: what a full disk looks like to whoever writes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_state_and_facts_come_back_bit_for_bit(tmp_path: Path) -> None:
    writer = opened(tmp_path / "c")
    writer.save(state(3), facts(3, best=1.25))
    writer.close()
    reader = opened(tmp_path / "c")
    assert reader.latest == 3
    assert reader.load_facts() == dataclasses.replace(
        facts(3, best=1.25), drafter=json.loads(json.dumps(dataclasses.asdict(DRAFTER)))
    )
    restored = reader.load_state(state(0))
    reader.close()
    assert jax.tree.structure(restored) == jax.tree.structure(state(3))
    for left, right in zip(jax.tree.leaves(restored), jax.tree.leaves(state(3)), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


def test_a_saved_state_may_be_donated_at_once(tmp_path: Path) -> None:
    step = jax.jit(lambda s: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), s), donate_argnums=0)
    current = state(1)
    writer = opened(tmp_path / "c")
    writer.save(current, facts(1))
    for _ in range(5):
        current = step(current)
    writer.close()
    reader = opened(tmp_path / "c")
    np.testing.assert_array_equal(np.asarray(reader.load_state(state(0)).params["a"]), np.asarray(state(1).params["a"]))
    reader.close()


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    writer = opened(tmp_path / "c", keep=2)
    for step in (1, 2, 3, 4):
        writer.save(state(step), facts(step))
    writer.close()
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["3", "4"]


def test_the_best_checkpoint_is_kept_with_the_last(tmp_path: Path) -> None:
    def there() -> list[str]:
        return sorted(path.name for path in (tmp_path / "c").iterdir())

    writer = opened(tmp_path / "c", keep=1)
    for step, best in ((1, 1), (2, 1), (3, 1)):
        writer.save(state(step), facts(step, best_step=best))
    writer.close()
    assert there() == ["1", "3"]
    resumed = opened(tmp_path / "c", keep=1)
    resumed.save(state(4), facts(4, best_step=1))
    resumed.save(state(5), facts(5, best_step=4))
    resumed.close()
    assert there() == ["4", "5"]


def test_an_unfinished_checkpoint_is_not_taken_for_whole(tmp_path: Path) -> None:
    writer = opened(tmp_path / "c")
    writer.save(state(1), facts(1))
    writer.close()
    # What a kill leaves behind: files under the name of a write in progress.
    (tmp_path / "c" / "2.orbax-checkpoint-tmp-1" / "state").mkdir(parents=True)
    reader = opened(tmp_path / "c")
    assert reader.latest == 1
    assert int(reader.load_state(state(0)).step) == 1
    reader.close()


def test_a_directory_without_a_checkpoint_says_so(tmp_path: Path) -> None:
    reader = opened(tmp_path / "c")
    assert reader.latest is None
    with pytest.raises(ConfigError, match="holds no finished checkpoint"):
        reader.load_facts()
    reader.close()


# Orbax drops the other reads when one fails; collecting them here keeps the complaint out of later tests.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_damage_is_named_and_not_loaded(tmp_path: Path) -> None:
    writer = opened(tmp_path / "c")
    writer.save(state(1), facts(1))
    writer.close()
    for path in (tmp_path / "c" / "1" / "state").rglob("*"):
        if path.is_file() and path.stat().st_size > 4096:
            path.write_bytes(path.read_bytes()[:100])
    reader = opened(tmp_path / "c")
    with pytest.raises(ConfigError, match=r"c/1: cannot read this checkpoint"):
        reader.load_state(state(0))
    reader.close()
    gc.collect()


# Orbax drops a coroutine when a write fails; collecting it here keeps the complaint out of later tests.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
def test_a_full_disk_is_one_clear_error_and_the_last_checkpoint_survives(tmp_path: Path, small_disk: None) -> None:
    small, large = {"a": jnp.arange(4)}, {"a": jax.random.normal(jax.random.key(0), (512, 512))}
    writer = opened(tmp_path / "c")
    writer.save(small, facts(1))
    writer.wait()
    with (
        pytest.raises(ConfigError, match=r"cannot write a checkpoint .*last finished one is of step 1"),
        contextlib.closing(writer),
    ):
        writer.save(large, facts(2))
    reader = opened(tmp_path / "c")
    assert reader.latest == 1
    np.testing.assert_array_equal(np.asarray(reader.load_state(small)["a"]), np.arange(4))
    reader.close()
    gc.collect()


def test_another_drafter_is_refused_by_field(tmp_path: Path) -> None:
    fields = json.loads(json.dumps(dataclasses.asdict(DRAFTER)))
    stored = facts(1, drafter=fields)
    check_drafter(stored, DRAFTER, tmp_path)
    # Written before there was a choice of algorithms.
    older = facts(1, drafter={name: value for name, value in fields.items() if name not in ("algorithm", "qk_norm")})
    check_drafter(older, DRAFTER, tmp_path)
    with pytest.raises(ConfigError, match="num_layers 1 there, 2 here"):
        check_drafter(stored, dataclasses.replace(DRAFTER, num_layers=2), tmp_path)


def test_another_target_is_refused_and_a_checkpoint_that_names_none_is_not(tmp_path: Path) -> None:
    config = load_config(CONFIG)
    stored = facts(1, target="a", config={"target": {"path": "first"}})
    check_target(stored, "a", config, tmp_path)
    check_target(dataclasses.replace(stored, target=""), "b", config, tmp_path)
    with pytest.raises(ConfigError, match=r"of another target \(first, weights a; target tiny-random has b\)"):
        check_target(stored, "b", config, tmp_path)


def test_settings_that_change_in_mid_run_are_said_and_free_ones_are_not() -> None:
    config = load_config(CONFIG)
    stored = facts(1, config=json.loads(json.dumps(dataclasses.asdict(config))))
    assert changed_settings(stored, config) == []
    del stored.config["loss"]["dpace"]  # younger than the checkpoint
    free = dataclasses.replace(
        config,
        target=dataclasses.replace(config.target, path="moved"),
        data=dataclasses.replace(config.data, paths=("moved",), workers=3),
        train=dataclasses.replace(config.train, log_every=1, accumulation_steps=2),
    )
    assert changed_settings(stored, free) == []
    other = dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, learning_rate=0.5),
        loss=dataclasses.replace(config.loss, tv=0.25),
    )
    assert changed_settings(stored, other) == [
        "optimizer learning_rate was 0.005, is 0.5 from here on",
        "loss tv was 0.9, is 0.25 from here on",
    ]


def test_a_checkpoint_older_than_a_field_counts_as_having_its_default(tmp_path: Path) -> None:
    stored = facts(1, drafter=json.loads(json.dumps(dataclasses.asdict(DRAFTER))))
    for name in ("logit_softcap", "layer_windows", "rope_scaling"):
        del stored.drafter[name]
    check_drafter(stored, DRAFTER, tmp_path)
    with pytest.raises(ConfigError, match=r"logit_softcap 0\.0 there, 30\.0 here"):
        check_drafter(stored, dataclasses.replace(DRAFTER, logit_softcap=30.0), tmp_path)
    del stored.drafter["num_heads"]  # has no default
    with pytest.raises(ConfigError, match="num_heads None there, 2 here"):
        check_drafter(stored, DRAFTER, tmp_path)
