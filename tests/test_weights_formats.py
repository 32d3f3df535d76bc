"""Drafters in the other public formats: how each is recognised and read, from folder or Hub, and what is refused."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import numpy as np
import pytest
from formats import (
    BY_LAYER,
    DFLASH,
    FILL_IN,
    FILL_IN_2,
    GEMMA,
    GEMMA_FIELDS,
    IDS,
    NO_HEADS,
    OURS_2,
    SLIDING,
    SPECFORGE,
    SPECULATORS,
    ZLAB,
    ZLAB_2,
    layer_config,
    proposes,
    save,
    their_tensors,
)
from safetensors.numpy import save_file
from tiny import make_drafter, make_target

from dspark_jax import ConfigError, load_drafter
from dspark_jax.weights.drafter_files import open_drafter, read_drafter, recognise

TARGET = make_target()
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "zlab": (ZLAB, FILL_IN, "z-lab DFlash format, DFlash, fill_in, 4 drafts a block, target layers -1, 0"),
    "zlab, window": (
        ZLAB | SLIDING,
        FILL_IN | {"layer_windows": (7, 0), "layer_causal": (True, False)},
        "z-lab",
    ),
    "zlab, window, not causal": (
        ZLAB | SLIDING | {"is_causal": False, "use_sliding_window": True},
        FILL_IN | {"layer_windows": (7, 0)},
        "z-lab",
    ),
    "zlab, causal, scaled": (
        ZLAB
        | {"is_causal": True}
        | {"dflash_config": ZLAB["dflash_config"] | {"input_embedding_scale": 5.5, "final_logit_softcapping": 30}},
        FILL_IN | {"layer_causal": (True, True), "embed_scale": 5.5, "logit_softcap": 30.0},
        "z-lab",
    ),
    "zlab 2": (ZLAB_2, FILL_IN_2, "z-lab DFlash 2 format, DFlash 2, fill_in, 4 drafts a block, target layers -1, 0"),
    "zlab 2, settings at the top, scaled": (
        {key: value for key, value in ZLAB_2.items() if key != "dflash_config"}
        | ZLAB_2["dflash_config"]
        | {"input_embedding_scale": 5.5, "final_logit_softcapping": 30, "output_multiplier": 0.25},
        FILL_IN_2 | {"embed_scale": 5.5, "logit_scale": 0.25, "logit_softcap": 30.0},
        "z-lab DFlash 2",
    ),
    "zlab 2, causal with a window where nothing is said": (
        ZLAB_2 | {"is_causal": ...},
        FILL_IN_2 | {"layer_causal": (True, True)},
        "z-lab DFlash 2",
    ),
    "zlab 2, ours": (
        ZLAB_2
        | {"sample_from_anchor": True, "draft_vocab_size": 7, "enable_confidence_head": True}
        | {"layer_types": ..., "sliding_window": ..., "is_causal": ...}
        | {"dflash_config": ZLAB_2["dflash_config"] | {"block_size": 4, "selector_tied": True}},
        OURS_2,
        "DFlash 2, anchor_first, 4 drafts a block",
    ),
    "zlab 2, the whole vocabulary counted": (ZLAB_2 | {"draft_vocab_size": 40}, FILL_IN_2, "z-lab DFlash 2"),
    "specforge": (SPECFORGE, {}, "SpecForge DSpark format, DSpark, anchor_first, 4 drafts a block"),
    "specforge, both rope spellings, settings outside": (
        SPECFORGE
        | {"rope_theta": 1e4, "markov_rank": 32, "markov_head_type": "gated"}
        | {"dflash_config": SPECFORGE["dflash_config"] | {"markov_head_type": "gated"}},
        {"markov_head_type": "gated"},
        "SpecForge",
    ),
    "deepspec, gemma 4, the whole vocabulary counted": (GEMMA | {"draft_vocab_size": 40}, GEMMA_FIELDS, "DeepSpec"),
    "deepspec, gemma 4": (GEMMA, GEMMA_FIELDS, "DeepSpec (Gemma 4) format, DSpark, anchor_first, 4 drafts a block"),
    "deepspec, gemma 4, values of their own, no cap": (
        GEMMA
        | {"attention_k_eq_v": False, "final_logit_softcapping": None, "per_layer_config": BY_LAYER}
        | {"global_head_dim": ..., "num_global_key_value_heads": ...},
        GEMMA_FIELDS | {"value_is_key": False, "logit_softcap": 0.0},
        "DeepSpec",
    ),
    "speculators": (SPECULATORS, {}, "speculators format, DSpark, anchor_first, 4 drafts a block"),
    "speculators, rnn, reduced, window": (
        layer_config(SPECULATORS, **SLIDING) | {"markov_head_type": "rnn", "draft_vocab_size": 7},
        {"markov_head_type": "rnn", "layer_windows": (7, 0), "layer_causal": (True, False), "ids": IDS},
        "speculators",
    ),
    "speculators, window, not causal": (
        layer_config(SPECULATORS, **SLIDING) | {"sliding_window_non_causal": True},
        {"layer_windows": (7, 0)},
        "speculators",
    ),
    "speculators, old: the layout from the tokens": (
        proposes(SPECULATORS, 4, sample_from_anchor=...),
        {"layout": "anchor_first"},
        "anchor_first",
    ),
    "speculators, old, fill_in": (proposes(SPECULATORS, 3, sample_from_anchor=...), {"layout": "fill_in"}, "fill_in"),
    "speculators, dflash, nothing said": (
        SPECULATORS | DFLASH | NO_HEADS | {"sample_from_anchor": ..., "speculators_config": ..., "block_size": 5},
        FILL_IN,
        "speculators format, DFlash, fill_in, 4 drafts a block",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_each_format_is_read_as_what_it_is(tmp_path: Path, name: str) -> None:
    raw, changes, line = CASES[name]
    changes = dict(changes)
    drafter = make_drafter(TARGET, draft_to_target=changes.pop("ids", None), **changes)
    checkpoint = open_drafter(save(tmp_path, raw, their_tensors(drafter)), TARGET.config)
    assert checkpoint.config == drafter.config
    jax.tree.map(np.testing.assert_array_equal, checkpoint.params, drafter.params)
    ids = drafter.frozen.draft_to_target_V
    assert (checkpoint.draft_to_target is None) == (ids is None)
    if ids is not None:
        np.testing.assert_array_equal(checkpoint.draft_to_target, ids)
    assert line in checkpoint.summary


def test_loading_says_in_one_line_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drafter = load_drafter(save(tmp_path, SPECULATORS, their_tensors(make_drafter(TARGET))), TARGET)
    assert drafter.config.layout == "anchor_first"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("speculators format, DSpark, anchor_first, 4 drafts a block, target layers -1, 0")


def test_a_head_over_every_id_may_be_spelt_out(tmp_path: Path) -> None:
    """All ids as d2t and t2d, and copies of the target's matrices: the same drafter."""
    tensors = their_tensors(make_drafter(TARGET))
    tensors |= {"d2t": np.zeros(40, np.int64), "t2d": np.ones(40, bool)}
    tensors |= {"embed_tokens.weight": np.asarray(TARGET.params["embed"])}
    tensors |= {"lm_head.weight": np.asarray(TARGET.params["head"])}
    assert read_drafter(save(tmp_path, SPECULATORS, tensors), TARGET)[2] is None


def test_a_reduced_head_is_compared_with_its_rows(tmp_path: Path) -> None:
    drafter = make_drafter(TARGET, draft_to_target=IDS)
    tensors = their_tensors(drafter) | {"lm_head.weight": np.asarray(TARGET.params["head"])[IDS]}
    raw = SPECULATORS | {"draft_vocab_size": 7}
    assert read_drafter(save(tmp_path, raw, tensors), TARGET)[0].head_rows == 7
    tensors["lm_head.weight"] = np.asarray(TARGET.params["head"])[IDS[::-1]]
    with pytest.raises(ConfigError, match=r"'lm_head.weight' is not the target's"):
        read_drafter(save(tmp_path, raw, tensors), TARGET)


def test_several_files_with_an_index(tmp_path: Path) -> None:
    drafter = make_drafter(TARGET)
    tensors = {name: np.ascontiguousarray(x) for name, x in their_tensors(drafter).items()}
    save(tmp_path, SPECULATORS, tensors)
    (tmp_path / "model.safetensors").unlink()
    weight_map = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in ("model-0.safetensors", "model-1.safetensors"):
        save_file({name: x for name, x in tensors.items() if weight_map[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    jax.tree.map(np.testing.assert_array_equal, read_drafter(tmp_path, TARGET)[1], drafter.params)


SECTION = SPECFORGE["dflash_config"]
PLAINLY = {"DFlashDraftModel": FILL_IN, "DFlash2DraftModel": FILL_IN_2}


def section_2(**changes: Any) -> dict[str, Any]:
    section = ZLAB_2["dflash_config"] | changes
    return ZLAB_2 | {"dflash_config": {key: value for key, value in section.items() if value is not ...}}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (ZLAB | {"surprise": 1}, "unknown key 'surprise' = 1"),
        (ZLAB | {"dflash_config": ZLAB["dflash_config"] | {"new": 2}}, r"unknown key 'dflash_config.new' = 2"),
        (ZLAB | {"dflash_config": ...}, r"key 'dflash_config.target_layer_ids' is missing"),
        (ZLAB | {"block_size": 1}, "block_size = 1: expected at least 2"),
        (ZLAB | {"dflash_config": ZLAB["dflash_config"] | {"block_size": 6}}, "block_size = 5, but dflash_config"),
        (ZLAB | {"num_target_layers": 3}, "num_target_layers = 3, but the target '' has 2"),
        (ZLAB | {"layer_types": SLIDING["layer_types"]}, "layer_types = .* needs a positive sliding_window"),
        (ZLAB | SLIDING | {"use_sliding_window": False}, "layer_types = .* use_sliding_window = False"),
        (ZLAB | {"layer_types": ["full_attention"]}, "layer_types = .* for each of 2 layers"),
        (ZLAB | {"rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}}, "rope_theta is given as"),
        (ZLAB | {"hidden_size": "32"}, "hidden_size = '32': expected int"),
        (ZLAB | {"dflash_config": {"mask_token_id": 40, "target_layer_ids": [-1, 0]}}, "mask_token_id = 40 is outside"),
        (ZLAB | {"dflash_config": {"mask_token_id": 39, "target_layer_ids": [0]}}, r"'fc.weight' has shape \[32, 64\]"),
        (ZLAB | {"dflash_config": {"mask_token_id": 39, "target_layer_ids": [0, 1]}}, "target_layer_ids has 1"),
        (section_2(conv_kernel_size=4), "dflash_config.conv_kernel_size = 4: supported here: 2"),
        (section_2(output_multiplier=-0.5), "logit_scale = -0.5: expected a positive number"),
        (section_2(selector_rank=...), "key 'dflash_config.selector_rank' is missing"),
        (section_2(selector_rank=7), r"selector.predecessor_codebook' has shape \[40, 6\], expected \[40, 7\]"),
        (section_2(conv_group_size=16), r"'layers.0.attention_conv.kernel_projection.weight' has shape \[16, 32\]"),
        (section_2(selector_top_k=41), "selector_top_k = 41: expected 1 to 40"),
        (section_2(surprise=1), "unknown key 'dflash_config.surprise' = 1"),
        (GEMMA | {"enable_moe_block": True}, "enable_moe_block = True"),
        (GEMMA | {"layer_types": ["sliding_attention"] * 2}, "layer_types = "),
        (GEMMA | {"surprise": 1}, "unknown key 'surprise'"),
        (SPECFORGE | {"markov_rank": 8}, "dflash_config.markov_rank = 32, but markov_rank = 8"),
        (SPECFORGE | {"dflash_config": SECTION | {"projector_type": "domino"}}, "projector_type = 'domino'"),
        (SPECFORGE | {"dflash_config": SECTION | {"attention_mode": "mla"}}, "attention_mode = 'mla'"),
        (SPECFORGE | {"target_hidden_size": 64}, "target_hidden_size = 64: supported here: 32"),
        (SPECULATORS | {"target_hidden_size": 64}, "target_hidden_size = 64: supported here: 32"),
        (SPECULATORS | {"aux_hidden_state_layer_ids": [1, 2]}, "target_layer_ids has 1"),
        (SPECULATORS | {"sample_from_anchor": False}, "sample_from_anchor = False, but block_size - speculative"),
        (proposes(SPECULATORS, 2, sample_from_anchor=...), "speculative_tokens = 2 with block_size = 4"),
        (layer_config(SPECULATORS, surprise=3), "unknown key 'transformer_layer_config.surprise' = 3"),
        (SPECULATORS | {"draft_vocab_size": 7}, "tensor 'd2t' is missing"),
        (SPECULATORS | {"projector_type": "domino"}, "projector_type = 'domino'"),
        (proposes(SPECULATORS, 3, sample_from_anchor=..., markov_head_type="rnn"), "'rnn' with the layout 'fill_in'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, raw: dict[str, Any], message: str) -> None:
    changes: dict[str, Any] = PLAINLY.get(raw.get("architectures", [""])[0], {})
    with pytest.raises(ConfigError, match=message):
        read_drafter(save(tmp_path, raw, their_tensors(make_drafter(TARGET, **changes))), TARGET)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"speculators_model_type": "dflash2"}, "'dflash2' is DFlash 2 as speculators stores it"),
        ({"speculators_model_type": "mlp"}, "speculators_model_type = 'mlp' is no drafter known here"),
        ({"architectures": ["Qwen3ForCausalLM"]}, r"architectures = \['Qwen3ForCausalLM'\] is no drafter known here"),
        ({}, r"architectures = \[\] is no drafter"),
    ],
)
def test_other_kinds_are_refused_by_name(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recognise(raw, "config.json")


def forbid_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise AssertionError("a local path reached the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


def test_local_paths_never_touch_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_network(monkeypatch)
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "org" / "drafter", SPECULATORS, their_tensors(make_drafter(TARGET)))
    for path in ("org/drafter", tmp_path / "org" / "drafter", "./org/drafter"):
        open_drafter(path, TARGET.config)
    for path in ("org/typo", tmp_path / "none", "nothing", "./a/b", "a/b/c", "../x/y"):
        with pytest.raises(ConfigError, match="no such drafter directory"):
            open_drafter(path, TARGET.config)


def test_hub_ids_are_fetched_with_their_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "cache", SPECULATORS, their_tensors(make_drafter(TARGET)))
    asked: list[tuple[str, str | None]] = []

    def download(repository: str, revision: str | None = None, **_: Any) -> str:
        asked.append((repository, revision))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for path in ("RedHatAI/Qwen3-8B-speculator.dspark", "deepseek-ai/dspark_qwen3_8b_block7@refs/pr/1"):
        assert open_drafter(path, TARGET.config).form.name == "speculators"
    assert asked == [
        ("RedHatAI/Qwen3-8B-speculator.dspark", None),
        ("deepseek-ai/dspark_qwen3_8b_block7", "refs/pr/1"),
    ]


def cached(cache: Path, repository: str, revision: str, folder: Path) -> None:
    """What huggingface_hub leaves in its cache after a download."""
    home = cache / f"models--{repository.replace('/', '--')}"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / revision).write_text("0" * 40)
    (home / "snapshots").mkdir()
    folder.rename(home / "snapshots" / ("0" * 40))


def test_without_a_network_the_cache_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = save(tmp_path / "drafter", SPECULATORS, their_tensors(make_drafter(TARGET)))
    cached(tmp_path / "hub", "org/drafter", "main", folder)
    assert open_drafter("org/drafter", TARGET.config).config.block_size == 4
    with pytest.raises(ConfigError, match=r"org/other: not a folder here, and the Hugging Face Hub does not give it"):
        open_drafter("org/other", TARGET.config)
