"""Drafters in the other public formats, written here by hand from their descriptions, and how each is recognised.

Only names, shapes and settings are compared: the network behind them is the one of every other test.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import make_drafter, make_target

from dspark_jax import ConfigError, load_drafter
from dspark_jax.config import RopeScaling
from dspark_jax.drafters import Drafter
from dspark_jax.weights.drafter_files import open_drafter, read_drafter, recognise, write_drafter

TARGET = make_target()
IDS = np.asarray([0, 3, 4, 9, 17, 20, 39], np.int32)
PLAIN: dict[str, Any] = {"markov_rank": 0, "confidence_head": False, "confidence_with_markov": False}
BODY: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
}


def their_tensors(drafter: Drafter) -> dict[str, np.ndarray]:
    """The names that all the formats share, spelt out once more, independent of the tables."""
    backbone = jax.tree.map(np.asarray, drafter.params["backbone"])
    tensors = {"fc.weight": backbone["fc"].reshape(32, -1)}
    tensors |= {f"{name}.weight": backbone[name] for name in ("hidden_norm", "norm")}
    for i in range(drafter.config.num_layers):
        layer, place = backbone[f"layers_{i}"], f"layers.{i}."
        tensors[place + "input_layernorm.weight"] = layer["attn_norm"]
        if drafter.config.family == "gemma4":
            tensors[place + "post_attention_layernorm.weight"] = layer["post_attn_norm"]
            tensors[place + "pre_feedforward_layernorm.weight"] = layer["mlp_norm"]
            tensors[place + "post_feedforward_layernorm.weight"] = layer["post_mlp_norm"]
            tensors[place + "layer_scalar"] = layer["layer_scalar"]
        else:
            tensors[place + "post_attention_layernorm.weight"] = layer["mlp_norm"]
        tensors[place + "self_attn.q_proj.weight"] = layer["q"].reshape(-1, 32)
        tensors[place + "self_attn.k_proj.weight"] = layer["kv"][0].reshape(-1, 32)
        if not drafter.config.value_is_key:
            tensors[place + "self_attn.v_proj.weight"] = layer["kv"][1].reshape(-1, 32)
        tensors[place + "self_attn.o_proj.weight"] = layer["o"].reshape(32, -1)
        tensors |= {f"{place}self_attn.{name}_norm.weight": layer[f"{name}_norm"] for name in "qk"}
        tensors |= {f"{place}mlp.{name}_proj.weight": layer[name] for name in ("gate", "up", "down")}
    heads = jax.tree.map(np.asarray, {name: drafter.params.get(name, {}) for name in ("markov", "confidence_head")})
    names = {
        "w1": "markov_w1.weight",
        "w2": "markov_w2.weight",
        "gate": "gate_proj.weight",
        "joint": "joint_proj.weight",
    }
    names |= {"gate_bias": "gate_proj.bias", "joint_bias": "joint_proj.bias"}
    tensors |= {f"markov_head.{names[name]}": leaf for name, leaf in heads["markov"].items()}
    if heads["confidence_head"]:
        tensors["confidence_head.proj.weight"] = heads["confidence_head"]["weight"][None]
        tensors["confidence_head.proj.bias"] = heads["confidence_head"]["bias"][None]
    if drafter.frozen.draft_to_target_V is not None:
        ids = np.asarray(drafter.frozen.draft_to_target_V, np.int64)
        tensors |= {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(40), ids)}
    return tensors


def save(directory: Path, raw: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


ROPE = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
ZLAB: dict[str, Any] = BODY | {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "rope_theta": 10000,
    "block_size": 5,
    "num_target_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "sliding_window": None,
    "dflash_config": {"mask_token_id": 39, "target_layer_ids": [-1, 0]},
}
SPECFORGE: dict[str, Any] = (
    BODY
    | ROPE
    | {
        "architectures": ["DSparkDraftModel"],
        "block_size": 4,
        "dflash_config": {
            "projector_type": "dspark",
            "mask_token_id": 39,
            "target_layer_ids": [-1, 0],
            "markov_rank": 32,
            "markov_head_type": "vanilla",
            "confidence_head_alpha": 1.0,
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
    }
)
SPECULATORS: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "speculators_version": "0.7.0",
    "block_size": 4,
    "draft_vocab_size": 40,
    "target_hidden_size": 32,
    "mask_token_id": 39,
    "aux_hidden_state_layer_ids": [0, 1],
    "sample_from_anchor": True,
    "sliding_window_non_causal": False,
    "markov_rank": 32,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "transformer_layer_config": BODY | ROPE | {"model_type": "qwen3"},
    "speculators_config": {
        "algorithm": "dspark",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
        "verifier": {"name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"]},
    },
}
# The target's text settings with the drafter's beside them, as DeepSpec saves them; two ways to spell the full layers.
GEMMA: dict[str, Any] = {key: value for key, value in BODY.items() if key != "hidden_act"} | {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "target_model_type": "gemma4_unified",
    "target_text_model_type": "gemma4_unified_text",
    "num_target_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "sliding_window": 1024,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 2,
    "num_key_value_heads": 4,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 40,
    "enable_moe_block": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "full_attention": {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
    "target_layer_ids": [-1, 0],
    "block_size": 4,
    "mask_token_id": 39,
    "num_anchors": 512,
    "markov_rank": 32,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
BY_LAYER = {str(i): {"head_dim": 16, "num_key_value_heads": 2} for i in range(2)}
GEMMA_FIELDS: dict[str, Any] = {
    "family": "gemma4",
    "value_is_key": True,
    "rope_theta": 1e6,
    "rope_scaling": RopeScaling("proportional", fraction=0.25),
    "embed_scale": 32**0.5,
    "logit_softcap": 30.0,
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
FILL_IN = PLAIN | {"layout": "fill_in", "block_size": 5}


def layer_config(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return raw | {"transformer_layer_config": raw["transformer_layer_config"] | changes}


def proposes(raw: dict[str, Any], tokens: int, **changes: Any) -> dict[str, Any]:
    methods = [
        {"proposal_type": "other", "speculative_tokens": 99},
        {"proposal_type": "greedy", "speculative_tokens": tokens},
    ]
    return raw | {"speculators_config": raw["speculators_config"] | {"proposal_methods": methods}} | changes


DFLASH = {"speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"]}
NO_HEADS = dict.fromkeys(
    ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"), ...
)
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
    "specforge": (SPECFORGE, {}, "SpecForge DSpark format, DSpark, anchor_first, 4 drafts a block"),
    "specforge, both rope spellings, settings outside": (
        SPECFORGE
        | {"rope_theta": 1e4, "markov_rank": 32, "markov_head_type": "gated"}
        | {"dflash_config": SPECFORGE["dflash_config"] | {"markov_head_type": "gated"}},
        {"markov_head_type": "gated"},
        "SpecForge",
    ),
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
        (GEMMA | {"enable_moe_block": True}, "enable_moe_block = True"),
        (GEMMA | {"layer_types": ["sliding_attention"] * 2}, "layer_types = "),
        (GEMMA | {"surprise": 1}, "unknown key 'surprise'"),
        (SPECFORGE | {"markov_rank": 8}, "dflash_config.markov_rank = 32, but markov_rank = 8"),
        (SPECFORGE | {"dflash_config": SECTION | {"projector_type": "domino"}}, "projector_type = 'domino'"),
        (SPECULATORS | {"target_hidden_size": 64}, "target_hidden_size = 64: supported here: 32"),
        (SPECULATORS | {"aux_hidden_state_layer_ids": [1, 2]}, "target_layer_ids has 1"),
        (SPECULATORS | {"sample_from_anchor": False}, "sample_from_anchor = False, but block_size - speculative"),
        (proposes(SPECULATORS, 2, sample_from_anchor=...), "speculative_tokens = 2 with block_size = 4"),
        (layer_config(SPECULATORS, surprise=3), "unknown key 'transformer_layer_config.surprise' = 3"),
        (SPECULATORS | {"draft_vocab_size": 7}, "tensor 'd2t' is missing"),
        (SPECULATORS | {"projector_type": "domino"}, "projector_type = 'domino'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, raw: dict[str, Any], message: str) -> None:
    changes = FILL_IN if raw.get("architectures") == ["DFlashDraftModel"] else {}
    with pytest.raises(ConfigError, match=message):
        read_drafter(save(tmp_path, raw, their_tensors(make_drafter(TARGET, **changes))), TARGET)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "'DFlash2DraftModel' is DFlash 2"),
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


WRITTEN: dict[str, list[dict[str, Any]]] = {
    "deepspec": [
        {"rope_scaling": RopeScaling("yarn", factor=4.0, original_length=64, attention_factor=1.25)},
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
        ("speculators", GEMMA_FIELDS, "Gemma layers"),
        ("deepspec", GEMMA_FIELDS | {"embed_scale": 2.0}, "another embedding scale"),
        ("speculators", {"layer_causal": (True, True)}, "causal layers without a window"),
        ("speculators", {"embed_scale": 2.0}, "an embedding scale"),
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


def test_tensors_of_the_speculators_export_are_named_as_vllm_names_them(tmp_path: Path) -> None:
    drafter = make_drafter(TARGET, draft_to_target=IDS)
    write_drafter(tmp_path, "speculators", drafter.config, drafter.params, IDS, {}, "float32")
    expected, written = their_tensors(drafter), load_file(tmp_path / "model.safetensors")
    assert written.keys() == expected.keys()
    compare: Callable[..., None] = np.testing.assert_array_equal
    jax.tree.map(compare, written, expected)
    assert written["d2t"].dtype == np.int64
    assert written["t2d"].dtype == bool
