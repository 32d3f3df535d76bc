"""Drafters written in the public formats: a round trip is bit-equal; what a format cannot say is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from formats import (
    FILL_IN,
    FILL_IN_2,
    GEMMA_FIELDS,
    IDS,
    OURS_2,
    PLAIN,
    their_tensors,
)
from safetensors import SafetensorError
from safetensors.numpy import load_file
from tiny import make_drafter, make_target

from dspark_jax import ConfigError
from dspark_jax.config import RopeScaling
from dspark_jax.weights import drafter_files
from dspark_jax.weights.drafter_files import open_drafter, write_drafter

TARGET = make_target()

WRITTEN: dict[str, list[dict[str, Any]]] = {
    "deepspec": [
        {"rope_scaling": RopeScaling("yarn", factor=4.0, original_length=64, attention_factor=1.25)},
        {"rope_scaling": RopeScaling("yarn", factor=4.0, original_length=64, whole_pairs=False)},
        {"embed_scale": 5.5, "logit_softcap": 30.0},
        GEMMA_FIELDS,
        GEMMA_FIELDS | {"value_is_key": False, "logit_softcap": 0.0, "rope_scaling": None, "ids": IDS},
    ],
    "zlab": [
        FILL_IN,
        FILL_IN | {"layer_windows": (7, 0), "layer_causal": (True, False)},
        FILL_IN | {"layer_windows": (0, 7), "rope_scaling": RopeScaling("linear", factor=2.0)},
        FILL_IN | {"layer_causal": (True, True), "embed_scale": 5.5, "logit_softcap": 30.0},
        FILL_IN | {"layer_causal": (True, True), "layer_windows": (0, 7)},
        FILL_IN_2,
        FILL_IN_2 | {"embed_scale": 5.5, "logit_scale": 0.25, "logit_softcap": 30.0, "layer_causal": (True, True)},
        OURS_2,
    ],
    "speculators": [
        {},
        FILL_IN,
        {"markov_head_type": "rnn", "layer_windows": (7, 7), "layer_causal": (True, True)},
        {"rope_scaling": RopeScaling("llama3", factor=8.0, original_length=128)},
        {"layer_windows": (7, 0), "layout": "fill_in"},
        {"ids": IDS, "confidence_head": False, "confidence_with_markov": False},
    ],
}


@pytest.mark.parametrize(("name", "place"), [(name, i) for name, cases in WRITTEN.items() for i in range(len(cases))])
def test_a_round_trip_is_bit_equal(tmp_path: Path, name: str, place: int) -> None:
    changes = dict(WRITTEN[name][place])
    drafter = make_drafter(TARGET, draft_to_target=changes.pop("ids", None), **changes)
    ids = drafter.frozen.draft_to_target_V
    write_drafter(tmp_path / "a", name, drafter.config, drafter.params, ids, {"steps": 3}, "bfloat16")
    read = open_drafter(tmp_path / "a", None)
    assert read.config == drafter.config
    assert read.notes == {"steps": 3}
    assert read.params["backbone"]["fc"].dtype == "bfloat16"
    write_drafter(tmp_path / "b", name, read.config, read.params, read.draft_to_target, read.notes, None)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("zlab", PLAIN, "the layout 'anchor_first'"),
        ("zlab", FILL_IN | {"markov_rank": 4}, "a Markov head"),
        ("zlab", FILL_IN | {"confidence_head": True}, "a confidence head"),
        ("zlab", FILL_IN | {"ids": IDS}, "a reduced draft vocabulary"),
        ("zlab", FILL_IN | {"layer_causal": (True, False)}, "only some are causal"),
        ("zlab", GEMMA_FIELDS | FILL_IN, "Gemma layers"),
        ("zlab", FILL_IN_2 | {"layer_causal": (True, False)}, "only some are causal"),
        ("deepspec", OURS_2, "cannot be written for dflash2 drafters"),
        ("speculators", FILL_IN_2, "cannot be written for dflash2 drafters"),
        ("speculators", GEMMA_FIELDS, "Gemma layers"),
        ("deepspec", GEMMA_FIELDS | {"embed_scale": 2.0}, "another embedding scale"),
        ("speculators", {"layer_causal": (True, True)}, "causal layers without a window"),
        ("speculators", {"embed_scale": 2.0}, "an embedding scale"),
        *((name, {"logit_scale": 0.5}, "a scale of the logits") for name in ("deepspec", "speculators")),
        ("speculators", {"markov_tied": True}, r"a tied Markov head \(export --target multiplies it out\)"),
        ("speculators", {"markov_head_type": "rnn", "layout": "fill_in"}, "an rnn head that starts behind"),
        ("deepspec", {"layer_causal": (True, False)}, "only some are causal"),
        ("specforge", {}, "format 'specforge' cannot be written"),
    ],
)
def test_a_format_that_cannot_say_it_refuses(tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    changes = dict(changes)
    drafter = make_drafter(TARGET, draft_to_target=changes.pop("ids", None), **changes)
    with pytest.raises(ConfigError, match=message):
        write_drafter(tmp_path / "a", name, drafter.config, drafter.params, None, {})
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("gemma", [False, True])
def test_deepspec_finds_the_keys_that_it_asks_for(tmp_path: Path, gemma: bool) -> None:
    """Its models stop at once where one of these is missing."""
    drafter = make_drafter(TARGET, **(GEMMA_FIELDS if gemma else {}))
    asked = {"target_layer_ids", "mask_token_id", "num_anchors", "enable_confidence_head", "markov_rank"}
    asked |= {"markov_head_type", "confidence_head_with_markov", "block_size"}
    asked |= {"num_global_key_value_heads", "global_head_dim"} if gemma else set()
    for notes, anchors in (({}, 512), ({"config": {"data": {"num_anchors": 64}}}, 64)):
        write_drafter(tmp_path, "deepspec", drafter.config, drafter.params, None, notes)
        raw = json.loads((tmp_path / "config.json").read_text())
        assert raw.keys() >= asked
        assert raw["num_anchors"] == anchors


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(drafter_files, "save_file", full)
    drafter = make_drafter(TARGET)
    with pytest.raises(ConfigError, match=r"out: cannot write the drafter .*No space left on device.*free some space"):
        write_drafter(tmp_path / "out", "deepspec", drafter.config, drafter.params, None, {})
    assert not list(tmp_path.iterdir())


def test_tensors_of_the_speculators_export_are_named_as_vllm_names_them(tmp_path: Path) -> None:
    drafter = make_drafter(TARGET, draft_to_target=IDS)
    write_drafter(tmp_path, "speculators", drafter.config, drafter.params, IDS, {}, "float32")
    expected, written = their_tensors(drafter), load_file(tmp_path / "model.safetensors")
    assert written.keys() == expected.keys()
    compare: Callable[..., None] = np.testing.assert_array_equal
    jax.tree.map(compare, written, expected)
    assert written["d2t"].dtype == np.int64
    assert written["t2d"].dtype == bool
