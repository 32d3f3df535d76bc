"""EAGLE-3 and MTP checkpoints: each format is read as what it is, a round trip loses nothing, and what does not fit is
refused by name. The files are written here by hand from the formats' descriptions.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_weights_export import target_folder
from tiny import make_chain, make_target

from dspark_jax import ConfigError, Drafter, load_drafter, load_target
from dspark_jax.config import RopeScaling
from dspark_jax.weights import export, inspect
from dspark_jax.weights.drafter_files import open_drafter, read_drafter, write_drafter
from dspark_jax.weights.selftest import self_test

TARGET = make_target(num_layers=8)  # the servers' usual taps of it are layers 1, 3 and 4
IDS = np.asarray([0, 3, 4, 9, 17, 20, 39], np.int32)
TAPS = (1, 3, 4)
LLAMA: dict[str, Any] = {
    "target_layer_ids": TAPS, "qk_norm": False, "own_head": True, "confidence_head": False, "draft_to_target": IDS,
}  # fmt: skip


def make(**changes: Any) -> Drafter:
    return make_chain(TARGET, changes.pop("algorithm", "eagle3"), **changes)


def their_tensors(drafter: Drafter, layer: str) -> dict[str, np.ndarray]:
    """The names of the formats' tensors, spelt out once more, independent of the tables."""
    params = jax.tree.map(np.asarray, drafter.params)
    backbone, own = params["backbone"], params["backbone"]["layers_0"]
    width = own["q"].shape[-1]
    tensors = {
        "fc.weight": backbone["fc"].reshape(32, -1),
        "norm.weight": backbone["norm"],
        layer + "input_layernorm.weight": backbone["embed_norm"],
        layer + "hidden_norm.weight": backbone["hidden_norm"],
        layer + "post_attention_layernorm.weight": own["mlp_norm"],
        layer + "self_attn.q_proj.weight": own["q"].reshape(-1, width),
        layer + "self_attn.k_proj.weight": own["kv"][0].reshape(-1, width),
        layer + "self_attn.v_proj.weight": own["kv"][1].reshape(-1, width),
        layer + "self_attn.o_proj.weight": own["o"].reshape(32, -1),
    }
    tensors |= {f"{layer}self_attn.{name}_norm.weight": own[f"{name}_norm"] for name in "qk" if f"{name}_norm" in own}
    tensors |= {f"{layer}mlp.{name}_proj.weight": own[name] for name in ("gate", "up", "down")}
    if "head" in params:
        tensors["lm_head.weight"] = params["head"]
    if drafter.frozen.draft_to_target_V is not None:
        ids = np.asarray(drafter.frozen.draft_to_target_V, np.int64)
        tensors |= {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(40), ids)}
    return tensors


def save(directory: Path, raw: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ...}))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


BODY: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "head_dim": 16, "hidden_act": "silu", "hidden_size": 32,
    "intermediate_size": 48, "max_position_embeddings": 512, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 4, "num_hidden_layers": 1, "num_key_value_heads": 2, "pretraining_tp": 1,
    "rms_norm_eps": 1e-6, "rope_theta": 10000, "rope_scaling": None, "vocab_size": 40,
}  # fmt: skip
SPECFORGE: dict[str, Any] = BODY | {
    "architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": 1, "eos_token_id": 2, "draft_vocab_size": 7,
    "sliding_window": None, "use_sliding_window": False, "max_window_layers": 8, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "ttt_length": 4,
}  # fmt: skip
EAGLE_CONFIG = {"eagle_aux_hidden_state_layer_ids": [-1, 2], "use_aux_hidden_state": True}
PROPOSALS = [{"proposal_type": "greedy", "speculative_tokens": 4, "verifier_accept_k": 1, "accept_tolerance": 0.0}]
SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": 7,
    "has_no_defaults_at_init": False,
    "norm_before_residual": True,
    "speculators_config": {
        "algorithm": "eagle3", "default_proposal_method": "greedy", "proposal_methods": PROPOSALS,
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "org/target"},
    },
    "speculators_model_type": "eagle3",
    "speculators_version": "0.1.0",
    "target_hidden_size": None,
    "torch_dtype": "bfloat16",
    "transformer_layer_config": BODY,
}  # fmt: skip
DEEPSPEC: dict[str, Any] = BODY | {
    "architectures": ["Qwen3Eagle3Model"], "model_type": "qwen3", "draft_num_hidden_layers": 1, "ttt_length": 4,
    "num_target_layers": 8, "step_loss_decay": 0.8, "target_layer_ids": [0, 2, 5], "target_model_name_or_path": "t",
    "layer_types": ["full_attention"],
}  # fmt: skip
LINE = "EAGLE-3, anchor_first, 4 drafts a block, target layers"
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "deepspec": (
        DEEPSPEC, "layers.0.", {"target_layer_ids": (0, 2, 5), "confidence_head": False},
        f"DeepSpec EAGLE-3 format, {LINE} 0, 2, 5",
    ),
    "deepspec, the whole vocabulary counted": (
        DEEPSPEC | {"draft_vocab_size": 40}, "layers.0.", {"target_layer_ids": (0, 2, 5), "confidence_head": False},
        LINE,
    ),
    "specforge, nothing said": (SPECFORGE, "midlayer.", LLAMA, f"SpecForge EAGLE-3 format, {LINE} 1, 3, 4"),
    "specforge, layers named, whole vocabulary": (
        SPECFORGE | {"eagle_config": EAGLE_CONFIG, "draft_vocab_size": 40, "norm_before_residual": True},
        "midlayer.",
        LLAMA | {"target_layer_ids": (-1, 2), "draft_to_target": None, "norm_before_residual": True},
        f"{LINE} -1, 2",
    ),
    "specforge, the target's head": (
        SPECFORGE | {"draft_vocab_size": None, "ttt_length": ...}, "midlayer.",
        LLAMA | {"own_head": False, "draft_to_target": None, "block_size": 7}, "7 drafts a block",
    ),
    "speculators, nothing said": (
        SPECULATORS, "layers.0.", LLAMA | {"norm_before_residual": True},
        f"speculators EAGLE-3 format, {LINE} 1, 3, 4",
    ),
    "speculators, qwen3": (
        SPECULATORS
        | {"transformer_layer_config": BODY | {"model_type": "qwen3"}, "norm_before_residual": False}
        | {"eagle_aux_hidden_state_layer_ids": [0, 3], "speculators_config": ..., "target_hidden_size": 32},
        "layers.0.",
        LLAMA | {"qk_norm": True, "target_layer_ids": (-1, 2), "block_size": 3},
        "3 drafts a block, target layers -1, 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_each_format_is_read_as_what_it_is(tmp_path: Path, name: str) -> None:
    raw, layer, changes, line = CASES[name]
    drafter = make(**changes)
    checkpoint = open_drafter(save(tmp_path, raw, their_tensors(drafter, layer)), TARGET.config)
    assert checkpoint.config == drafter.config
    jax.tree.map(np.testing.assert_array_equal, checkpoint.params, drafter.params)
    ids = changes.get("draft_to_target")
    assert (checkpoint.draft_to_target is None) == (ids is None)
    if ids is not None:
        np.testing.assert_array_equal(checkpoint.draft_to_target, ids)
    assert line in checkpoint.summary
    assert not checkpoint.copies


def test_a_head_of_its_own_is_served_and_a_copy_of_the_embedding_is_compared(tmp_path: Path) -> None:
    drafter = make(**LLAMA)
    tensors = their_tensors(drafter, "midlayer.") | {"embed_tokens.weight": np.asarray(TARGET.params["embed"])}
    loaded = load_drafter(save(tmp_path, SPECFORGE, tensors), TARGET)
    np.testing.assert_array_equal(loaded.params["head"], drafter.params["head"])
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"][::-1]
    with pytest.raises(ConfigError, match=r"'embed_tokens.weight' is not the target's"):
        load_drafter(save(tmp_path, SPECFORGE, tensors), TARGET)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (SPECFORGE | {"surprise": 1}, "unknown key 'surprise' = 1"),
        (SPECFORGE | {"fc_norm": True}, "fc_norm = True"),
        (SPECFORGE | {"norm_output": True}, "norm_output = True"),
        (SPECFORGE | {"target_hidden_size": 64}, "target_hidden_size = 64"),
        (SPECFORGE | {"eagle_config": EAGLE_CONFIG | {"use_mtp_layernorm": True}}, "eagle_config.use_mtp_layernorm"),
        (SPECFORGE | {"eagle_config": EAGLE_CONFIG}, r"'fc.weight' has shape \[32, 96\], expected \[32, 64\]"),
        (SPECFORGE | {"draft_vocab_size": 8}, "'d2t' has 7 entries"),
        (SPECFORGE | {"num_hidden_layers": 2}, "num_layers = 2: eagle3 has 1"),
        (SPECULATORS | {"norm_before_fc": True}, "norm_before_fc = True"),
        (SPECULATORS | {"transformer_layer_config": BODY | {"model_type": "gpt_oss"}}, "model_type = 'gpt_oss'"),
        (SPECULATORS | {"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}, "target_layer_ids has 7"),
        (SPECULATORS | {"transformer_layer_config": BODY | {"model_type": "qwen3"}}, "q_norm.weight' is missing"),
        (DEEPSPEC | {"ttt_length": ...}, "key 'ttt_length' is missing"),
        (DEEPSPEC | {"draft_num_hidden_layers": 2}, "draft_num_hidden_layers = 2"),
        (DEEPSPEC | {"markov_rank": 4}, "unknown key 'markov_rank' = 4"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, raw: dict[str, Any], message: str) -> None:
    deepspec = raw["architectures"] == ["Qwen3Eagle3Model"]
    changes = CASES["deepspec"][2] if deepspec else LLAMA
    layer = "midlayer." if raw["architectures"] == ["LlamaForCausalLMEagle3"] else "layers.0."
    with pytest.raises(ConfigError, match=message):
        read_drafter(save(tmp_path, raw, their_tensors(make(**changes), layer)), TARGET)


def test_usual_layers_need_to_know_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "drafter", SPECFORGE, their_tensors(make(**LLAMA), "midlayer."))
    target = target_folder(tmp_path / "target", TARGET)
    for command in (inspect.main, export.main):
        more = ["--format", "speculators", str(tmp_path / "out")] if command is export.main else []
        assert command([str(folder), *more]) == 2
        assert "names no eagle_aux_hidden_state_layer_ids" in capsys.readouterr().err
        assert command([str(folder), *more, "--target", str(target)]) == 0
        capsys.readouterr()
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    assert told["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    written = load_file(tmp_path / "out" / "model.safetensors")
    np.testing.assert_array_equal(written["lm_head.weight"], their_tensors(make(**LLAMA), "")["lm_head.weight"])
    np.testing.assert_array_equal(written["embed_tokens.weight"], TARGET.params["embed"])


WRITTEN: list[tuple[str, dict[str, Any]]] = [
    ("deepspec", {"target_layer_ids": TAPS}),
    ("deepspec", {"confidence_head": False, "rope_scaling": RopeScaling("linear", factor=2.0)}),
    ("deepspec", {"draft_to_target": IDS, "embed_scale": 5.5, "logit_softcap": 30.0, "block_size": 2}),
    ("specforge", LLAMA),
    ("specforge", LLAMA | {"own_head": False}),
    ("specforge", LLAMA | {"own_head": False, "draft_to_target": None, "norm_before_residual": True}),
    ("specforge", LLAMA | {"draft_to_target": None, "rope_scaling": RopeScaling("llama3", 8.0, 128)}),
    ("speculators", LLAMA | {"norm_before_residual": True}),
    ("speculators", LLAMA | {"qk_norm": True, "own_head": False}),
    ("speculators", LLAMA | {"draft_to_target": None, "own_head": False, "block_size": 5}),
    ("mtp", {"algorithm": "mtp"}),
    ("mtp", {"algorithm": "mtp", "qk_norm": False, "draft_to_target": IDS, "confidence_head": False, "block_size": 1}),
]


@pytest.mark.parametrize("place", range(len(WRITTEN)))
def test_a_round_trip_is_bit_equal(tmp_path: Path, place: int) -> None:
    name, changes = WRITTEN[place]
    drafter, ids = make(**changes), changes.get("draft_to_target")
    write_drafter(tmp_path / "a", name, drafter.config, drafter.params, ids, {"steps": 3}, "bfloat16")
    read = open_drafter(tmp_path / "a", None)
    assert read.config == drafter.config
    assert read.notes == {"steps": 3}
    write_drafter(tmp_path / "b", name, read.config, read.params, read.draft_to_target, read.notes, None)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize(("name", "layer"), [("specforge", "midlayer."), ("speculators", "layers.0.")])
def test_tensors_are_written_under_the_names_that_servers_read(tmp_path: Path, name: str, layer: str) -> None:
    drafter = make(**LLAMA)
    write_drafter(tmp_path, name, drafter.config, drafter.params, IDS, {}, "float32")
    expected, written = their_tensors(drafter, layer), load_file(tmp_path / "model.safetensors")
    assert written.keys() == expected.keys()
    jax.tree.map(np.testing.assert_array_equal, written, expected)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepspec", {"qk_norm": False}, "a layer without norms of queries and keys"),
        ("deepspec", {"norm_before_residual": True}, "a residual stream that starts after the norm"),
        ("deepspec", {"own_head": True}, "a head of the drafter's own"),
        ("specforge", {}, "norms of queries and keys"),
        ("specforge", {"qk_norm": False}, "a confidence head"),
        ("speculators", {}, "a confidence head"),
        ("speculators", {"confidence_head": False, "embed_scale": 2.0}, "an embedding scale"),
        ("zlab", {}, "'zlab' cannot be written for eagle3 drafters; choose one of deepspec, specforge, speculators"),
        ("deepspec", {"algorithm": "mtp"}, "'deepspec' cannot be written for mtp drafters; choose one of mtp"),
    ],
)
def test_a_format_that_cannot_say_it_refuses(tmp_path: Path, name: str, changes: dict[str, Any], message: str) -> None:
    drafter = make(**changes)
    with pytest.raises(ConfigError, match=message):
        write_drafter(tmp_path / "a", name, drafter.config, drafter.params, None, {})
    assert not (tmp_path / "a").exists()


def test_deepspec_finds_the_keys_that_it_asks_for(tmp_path: Path) -> None:
    drafter = make()
    write_drafter(tmp_path, "deepspec", drafter.config, drafter.params, None, {})
    assert json.loads((tmp_path / "config.json").read_text()).keys() >= {
        "target_layer_ids", "ttt_length", "step_loss_decay",
    }  # fmt: skip


def exported(folder: Path, name: str, out: Path, *more: str | Path) -> dict[str, bytes]:
    assert export.main([str(folder), "--format", name, str(out), *map(str, more)]) == 0
    return {name: tensor.tobytes() for name, tensor in load_file(out / "model.safetensors").items()}


def test_the_golden_drafter_is_written_back_bit_for_bit(shared: Path, tmp_path: Path) -> None:
    """DeepSpec's own file, and through vLLM's format, whose head is then known to be the target's."""
    folder, target = (shared / "golden" / "qwen3_eagle3" / part for part in ("draft", "target"))
    first = {name: tensor.tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}
    assert exported(folder, "deepspec", tmp_path / "deepspec") == first
    assert exported(folder, "speculators", tmp_path / "vllm", "--target", target) == first
    assert json.loads((tmp_path / "vllm" / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [
        1, 2, 3, 4, 5,
    ]  # fmt: skip
    assert exported(tmp_path / "vllm", "deepspec", tmp_path / "back") == first
    assert open_drafter(tmp_path / "back").config == open_drafter(folder).config


def test_a_public_drafter_goes_from_one_server_to_the_other(tmp_path: Path) -> None:
    names = their_tensors(make(**LLAMA), "layers.0.")
    raw = SPECULATORS | {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    raw["dspark_jax"] = {"num_target_layers": 8}
    folder = save(tmp_path / "a", raw, names)
    there = exported(folder, "specforge", tmp_path / "b")
    assert {name.replace("midlayer.", "layers.0."): x for name, x in there.items()} == {
        name: x.tobytes() for name, x in names.items()
    }
    told = json.loads((tmp_path / "b" / "config.json").read_text())
    assert told["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert (told["norm_before_residual"], told["draft_vocab_size"]) == (True, 7)
    exported(tmp_path / "b", "speculators", tmp_path / "c")
    assert open_drafter(tmp_path / "c").config == open_drafter(folder).config


def test_inspect_tells_what_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, changes, texts in (
        ("specforge", LLAMA, ("SpecForge EAGLE-3", "1, 3, 4 of 8", "head its own", "7 of 40 ids", "speculators")),
        ("mtp", {"algorithm": "mtp"}, ("MTP", "none: its last hidden state is read", "the target's", "written as mtp")),
    ):
        drafter = make(**changes)
        write_drafter(tmp_path / name, name, drafter.config, drafter.params, changes.get("draft_to_target"), {})
        assert inspect.main([str(tmp_path / name)]) == 0
        shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
        for text in texts:
            assert text in shown, (name, text, shown)


@pytest.mark.slow
def test_the_self_test_finds_what_is_wrong_with_eagle3(shared: Path) -> None:
    folder = shared / "golden" / "qwen3_eagle3"
    target, drafter = load_target(folder / "target"), load_drafter(folder / "draft", load_target(folder / "target"))
    arrays = np.load(folder / "decoding.npz")
    report = self_test(target, drafter, [arrays[f"p{i}_prompt"].tolist() for i in range(3)])
    assert report.cause is None
    assert not any("layout" in name for name in report.changed)


@pytest.mark.slow
def test_the_self_test_runs_on_mtp() -> None:
    report = self_test(TARGET, make(algorithm="mtp"), [[1, 2, 3], [4, 5, 6]], 8)
    assert report.cause is None and list(report.changed) == ["rope theta 1e+06 in place of 10000"]
