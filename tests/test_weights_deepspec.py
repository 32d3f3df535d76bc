"""DeepSpec checkpoints: round trips lose nothing, and whatever does not fit is refused by name."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import make_drafter, make_target

from dspark_jax import ConfigError, load_drafter
from dspark_jax.drafters import Drafter
from dspark_jax.target import Target
from dspark_jax.weights.drafter_files import read_drafter, write_drafter

TARGET = make_target()
NO_HEADS = {"markov_rank": 0, "confidence_with_markov": False, "confidence_head": False}
HEADS: list[dict[str, Any]] = [
    {},
    {"confidence_with_markov": False, "markov_head_type": "gated"},
    {"markov_head_type": "rnn", "layer_causal": (True, True)},
    NO_HEADS | {"layer_windows": (0, 6)},
]
IDS = np.asarray([0, 3, 4, 9, 17, 20, 39], np.int32)


def written(directory: Path, drafter: Drafter, dtype: str = "float32") -> Path:
    ids = drafter.frozen.draft_to_target_V
    ids = None if ids is None else np.asarray(ids)
    write_drafter(directory, "deepspec", drafter.config, drafter.params, ids, {"steps": 3}, dtype)
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def edit_tensors(directory: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("ids", [None, IDS], ids=["full vocabulary", "reduced vocabulary"])
@pytest.mark.parametrize("heads", HEADS)
def test_a_round_trip_is_bit_equal(tmp_path: Path, ids: np.ndarray | None, heads: dict[str, Any]) -> None:
    drafter = make_drafter(TARGET, draft_to_target=ids, **heads)
    config, params, read_ids = read_drafter(written(tmp_path / "a", drafter), TARGET)
    assert config == drafter.config
    jax.tree.map(np.testing.assert_array_equal, params, drafter.params)
    assert (read_ids is None) == (ids is None) and (ids is None or read_ids.tolist() == ids.tolist())
    write_drafter(tmp_path / "b", "deepspec", config, params, read_ids, {"steps": 3}, "float32")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_bfloat16_on_disk_is_bfloat16_in_memory(tmp_path: Path) -> None:
    drafter = make_drafter(TARGET)
    loaded = load_drafter(written(tmp_path, drafter, "bfloat16"), TARGET, "bfloat16")
    assert loaded.params["backbone"]["fc"].dtype == "bfloat16"
    assert loaded.params["backbone"]["norm"].dtype == "float32"
    stored = jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16), drafter.params)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b).astype(a.dtype)), loaded.params, stored)


def test_frozen_copies_are_compared_with_the_target(tmp_path: Path) -> None:
    directory = written(tmp_path, make_drafter(TARGET))
    copies = {"embed_tokens.weight": TARGET.params["embed"], "lm_head.weight": TARGET.params["head"]}
    edit_tensors(directory, lambda tensors: tensors.update({k: np.array(v) for k, v in copies.items()}))
    read_drafter(directory, TARGET)
    with pytest.raises(ConfigError, match=r"'embed_tokens.weight' is not the target's"):
        read_drafter(directory, make_target(seed=7))


def other_target(**changes: Any) -> Target:
    return dataclasses.replace(TARGET, config=dataclasses.replace(TARGET.config, **changes))


@pytest.mark.parametrize(
    ("name", "changes"),
    [("hidden_size", {"d_model": 64}), ("vocab_size", {"vocab_size": 50}), ("num_target_layers", {"num_layers": 3})],
)
def test_a_drafter_of_another_target_is_refused(tmp_path: Path, name: str, changes: dict[str, int]) -> None:
    directory = written(tmp_path, make_drafter(TARGET))
    with pytest.raises(ConfigError, match=rf"{name} = \d+, but the target .* has \d+: another target"):
        read_drafter(directory, other_target(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["OtherModel"]}, r"architectures = \['OtherModel'\]"),
        ({"block_size": ...}, "key 'block_size' is missing"),
        ({"surprise": 1}, "unknown key 'surprise' = 1"),
        ({"markov_head_type": "lstm"}, "markov_head_type = 'lstm'"),
        ({"markov_head_type": "rnn"}, r"'markov_head.joint_proj.weight' is missing"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = "),
        ({"mask_token_id": 40}, "mask_token_id = 40 is outside the embedding"),
        ({"target_layer_ids": [0, 1]}, "target_layer_ids has 1"),
        ({"target_layer_ids": [-1]}, r"'fc.weight' has shape \[32, 64\], expected \[32, 32\], 1 target layers"),
        ({"num_hidden_layers": 3, "layer_types": ...}, r"'layers.2.\S+' is missing"),
        ({"num_hidden_layers": 1, "layer_types": ...}, r"'layers.1.\S+' is not used"),
        ({"rope_theta": 5.0}, "rope_theta is given as"),
        ({"draft_vocab_size": 7}, "tensor 'd2t' is missing"),
        ({"projector_type": "domino"}, "projector_type = 'domino'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    directory = written(tmp_path, make_drafter(TARGET))
    edit_config(directory, **changes)
    with pytest.raises(ConfigError, match=message):
        read_drafter(directory, TARGET)


def test_a_vocabulary_that_points_outside_is_refused(tmp_path: Path) -> None:
    directory = written(tmp_path, make_drafter(TARGET, draft_to_target=IDS))
    edit_tensors(directory, lambda tensors: tensors.update(t2d=np.roll(tensors["t2d"], 1)))
    with pytest.raises(ConfigError, match="'d2t' and 't2d' name different ids"):
        read_drafter(directory, TARGET)
    edit_tensors(directory, lambda tensors: tensors.update(d2t=tensors["d2t"] + 1))
    with pytest.raises(ConfigError, match=r"'d2t' has 7 entries pointing at ids 1..40"):
        read_drafter(directory, TARGET)


def test_a_vocabulary_that_names_an_id_twice_is_refused(tmp_path: Path) -> None:
    directory = written(tmp_path, make_drafter(TARGET, draft_to_target=IDS))

    def repeat(tensors: dict[str, np.ndarray]) -> None:
        del tensors["t2d"]
        tensors["d2t"] = np.asarray([0, 3, 4, 9, 9, 20, 39]) - np.arange(7)

    edit_tensors(directory, repeat)
    with pytest.raises(ConfigError, match="'d2t' points at id 9 more than once"):
        read_drafter(directory, TARGET)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such drafter directory"):
        read_drafter(tmp_path / "none", TARGET)
    directory = written(tmp_path / "drafter", make_drafter(TARGET))
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(ConfigError, match=r"model.safetensors: not a readable safetensors file"):
        read_drafter(directory, TARGET)
    weights.unlink()
    with pytest.raises(ConfigError, match=r"neither model.safetensors nor"):
        read_drafter(directory, TARGET)


def test_fill_in_cannot_be_written_as_deepspec(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="DeepSpec format cannot hold the layout 'fill_in'"):
        written(tmp_path / "drafter", make_drafter(TARGET, layout="fill_in"))
    assert not (tmp_path / "drafter").exists()
