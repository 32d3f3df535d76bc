"""The export and inspect commands: nothing is lost, what vLLM reads is there, and bad input ends in one line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import DFLASH2, make_drafter, make_target

from dspark_jax.target import Target
from dspark_jax.weights import export, inspect
from dspark_jax.weights.drafter_files import open_drafter, write_drafter
from dspark_jax.weights.safetensor_files import TensorFiles

TARGET = make_target()
IDS = np.asarray([0, 3, 4, 9, 17, 20, 39], np.int32)
FILL_IN: dict[str, Any] = {
    "markov_rank": 0,
    "confidence_head": False,
    "confidence_with_markov": False,
    "layout": "fill_in",
    "block_size": 5,
}
NOTES = {
    "step": 7,
    "chat_template": "872be49dbb638044",
    "thinking": False,
    "config": {"target": {"path": "tiny-target"}, "loss": {"ce": 0.1, "tv": 0.9}},
}
TRAINED_ON = {
    "target": "tiny-target",
    "chat_template": "872be49dbb638044",
    "thinking": False,
    "layout": "anchor_first",
    "loss": {"ce": 0.1, "tv": 0.9},
}


def written(folder: Path, name: str = "deepspec", ids: np.ndarray | None = None, **changes: Any) -> Path:
    drafter = make_drafter(TARGET, draft_to_target=ids, **changes)
    write_drafter(folder, name, drafter.config, drafter.params, ids, NOTES)
    return folder


def target_folder(folder: Path, target: Target = TARGET) -> Path:
    """A tiny target as a Hugging Face checkpoint."""
    c, params = target.config, target.params
    folder.mkdir()
    raw = {
        "model_type": "qwen3",
        "vocab_size": c.vocab_size,
        "hidden_size": c.d_model,
        "intermediate_size": c.d_ff,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rope_theta": c.rope_theta,
        "rms_norm_eps": c.norm_eps,
        "max_position_embeddings": c.max_length,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = {"model.embed_tokens.weight": params["embed"], "model.norm.weight": params["final_norm"]}
    tensors["lm_head.weight"] = params["head"]
    for i in range(c.num_layers):
        layer, place = {k: np.asarray(v) for k, v in params[f"layers_{i}"].items()}, f"model.layers.{i}."
        for name, rows in (("q", slice(0, 2)), ("k", slice(2, 3)), ("v", slice(3, 4))):
            tensors[f"{place}self_attn.{name}_proj.weight"] = layer["qkv"][:, rows].reshape(-1, c.d_model)
        tensors[place + "self_attn.o_proj.weight"] = layer["o"].reshape(c.d_model, -1)
        for ours, theirs in (("attn_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm")):
            tensors[f"{place}{theirs}.weight"] = layer[ours]
        tensors |= {f"{place}self_attn.{name}_norm.weight": layer[f"{name}_norm"] for name in "qk"}
        tensors |= {f"{place}mlp.{name}_proj.weight": layer[name] for name in ("gate", "up", "down")}
    save_file({name: np.ascontiguousarray(np.asarray(x)) for name, x in tensors.items()}, folder / "model.safetensors")
    return folder


def run(*arguments: str | Path) -> int:
    return export.main([str(argument) for argument in arguments])


def tensor_bytes(folder: Path) -> dict[str, bytes]:
    return {name: tensor.tobytes() for name, tensor in load_file(folder / "model.safetensors").items()}


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepspec, speculators": ("deepspec", "speculators", {}),
    "deepspec, speculators, rnn": ("deepspec", "speculators", {"markov_head_type": "rnn"}),
    "speculators, deepspec": ("speculators", "deepspec", {}),
    "zlab, speculators": ("zlab", "speculators", FILL_IN | {"layer_windows": (7, 0), "layer_causal": (True, False)}),
    "zlab, zlab 2": ("zlab", "zlab", DFLASH2 | {"layout": "fill_in", "block_size": 5, "layer_windows": (7, 7)}),
    "deepspec, deepspec": ("deepspec", "deepspec", {"layer_windows": (0, 5)}),
}


@pytest.mark.parametrize("name", CASES)
def test_there_and_back_is_bit_equal(tmp_path: Path, name: str) -> None:
    first, second, changes = CASES[name]
    written(tmp_path / "a", first, **changes)
    assert run(tmp_path / "a", "--format", first, tmp_path / "a1") == 0
    assert run(tmp_path / "a1", "--format", second, tmp_path / "b") == 0
    assert run(tmp_path / "b", "--format", first, tmp_path / "a2") == 0
    assert tensor_bytes(tmp_path / "a") == tensor_bytes(tmp_path / "b") == tensor_bytes(tmp_path / "a2")
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a1" / file).read_bytes() == (tmp_path / "a2" / file).read_bytes()
    assert open_drafter(tmp_path / "a").config == open_drafter(tmp_path / "b").config


# What the format's description says must be there: a type, or a nested schema.
INTEGER, FLAG, TEXT, NUMBER = (int,), (bool,), (str,), (int, float)
SCHEMA: dict[str, Any] = {
    "speculators_model_type": TEXT,
    "architectures": (list,),
    "block_size": INTEGER,
    "draft_vocab_size": INTEGER,
    "target_hidden_size": INTEGER,
    "mask_token_id": INTEGER,
    "aux_hidden_state_layer_ids": (list,),
    "sample_from_anchor": FLAG,
    "sliding_window_non_causal": FLAG,
    "markov_rank": INTEGER,
    "markov_head_type": TEXT,
    "enable_confidence_head": FLAG,
    "confidence_head_with_markov": FLAG,
    "tie_word_embeddings": FLAG,
    "dtype": TEXT,
    "dspark_jax": (dict,),
    "transformer_layer_config": {
        "model_type": TEXT,
        "vocab_size": INTEGER,
        "hidden_size": INTEGER,
        "intermediate_size": INTEGER,
        "num_hidden_layers": INTEGER,
        "num_attention_heads": INTEGER,
        "num_key_value_heads": INTEGER,
        "head_dim": INTEGER,
        "hidden_act": TEXT,
        "attention_bias": FLAG,
        "rms_norm_eps": NUMBER,
        "max_position_embeddings": INTEGER,
        "layer_types": (list,),
        "sliding_window": (int, type(None)),
        "use_sliding_window": FLAG,
        "tie_word_embeddings": FLAG,
        "rope_parameters": {"rope_theta": NUMBER, "rope_type": TEXT},
    },
    "speculators_config": {
        "algorithm": TEXT,
        "default_proposal_method": TEXT,
        "proposal_methods": (list,),
        "verifier": {"name_or_path": TEXT, "architectures": (list,)},
    },
}


def assert_fits(raw: dict[str, Any], schema: dict[str, Any], where: str = "") -> None:
    assert raw.keys() == schema.keys(), where
    for key, kinds in schema.items():
        if isinstance(kinds, dict):
            assert_fits(raw[key], kinds, f"{where}{key}.")
        else:
            assert isinstance(raw[key], kinds), f"{where}{key}"
            assert isinstance(raw[key], bool) == (kinds == FLAG), f"{where}{key}"


@pytest.mark.parametrize("reduced", [False, True], ids=["full vocabulary", "reduced vocabulary"])
def test_the_speculators_export_fits_its_schema(tmp_path: Path, reduced: bool) -> None:
    written(tmp_path / "a", ids=IDS if reduced else None)
    target = target_folder(tmp_path / "target")
    assert run(tmp_path / "a", "--format", "speculators", tmp_path / "b", "--target", target) == 0
    raw = json.loads((tmp_path / "b" / "config.json").read_text())
    assert_fits(raw, SCHEMA)
    assert raw["aux_hidden_state_layer_ids"] == [0, 1]  # ours are -1 and 0
    assert (raw["sample_from_anchor"], raw["block_size"]) == (True, 4)
    assert raw["draft_vocab_size"] == (7 if reduced else 40)
    config = raw["speculators_config"]
    assert config["proposal_methods"] == [{"proposal_type": "greedy", "speculative_tokens": 4}]
    assert (config["algorithm"], config["verifier"]["name_or_path"]) == ("dspark", "tiny-target")
    shapes = {name: tensor.shape for name, tensor in load_file(tmp_path / "b" / "model.safetensors").items()}
    rows, layer = 7 if reduced else 40, "layers.1.self_attn."
    assert {shapes["embed_tokens.weight"], shapes["markov_head.markov_w1.weight"]} == {(40, 32)}
    assert {shapes["lm_head.weight"], shapes["markov_head.markov_w2.weight"]} == {(rows, 32)}
    assert (shapes["fc.weight"], shapes[layer + "q_proj.weight"], shapes[layer + "o_proj.weight"]) == (
        (32, 64),
        (64, 32),
        (32, 64),
    )
    assert (shapes["confidence_head.proj.weight"], shapes["confidence_head.proj.bias"]) == ((1, 64), (1,))
    assert ("t2d" in shapes, "d2t" in shapes) == (reduced, reduced)
    head = load_file(tmp_path / "b" / "model.safetensors")["lm_head.weight"].astype(np.float32)
    own = np.asarray(TARGET.params["head"])[IDS if reduced else slice(None)]
    np.testing.assert_allclose(head, own, rtol=2**-8)


def test_a_dflash_export_has_no_keys_of_heads_it_lacks(tmp_path: Path) -> None:
    written(tmp_path / "a", "zlab", **FILL_IN)
    assert run(tmp_path / "a", "--format", "speculators", tmp_path / "b") == 0
    raw = json.loads((tmp_path / "b" / "config.json").read_text())
    heads = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
    assert_fits(raw, {key: kind for key, kind in SCHEMA.items() if key not in heads})
    assert (raw["speculators_model_type"], raw["sample_from_anchor"]) == ("dflash", False)
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4


def test_what_it_was_trained_on_goes_with_it(tmp_path: Path) -> None:
    written(tmp_path / "a")
    for name in ("speculators", "deepspec"):
        assert run(tmp_path / "a", "--format", name, tmp_path / name) == 0
        assert json.loads((tmp_path / name / "config.json").read_text())["dspark_jax"]["trained_on"] == TRAINED_ON
        assert open_drafter(tmp_path / name).notes == NOTES | {"trained_on": TRAINED_ON}


def test_what_only_we_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "plain")
    written(tmp_path / "ours", ids=IDS, markov_head_type="ngram", ngram_tokens=2)
    for name, said in (("plain", []), ("ours", ["a reduced draft vocabulary, a ngram head in the deepspec format"])):
        assert run(tmp_path / name, "--format", "deepspec", tmp_path / f"{name}-out") == 0
        lines = capsys.readouterr().err.splitlines()
        assert [line.partition("only dspark_jax reads ")[2] for line in lines] == said


def test_a_training_runs_folder_will_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "run" / "drafter")
    written(tmp_path / "run" / "drafter_best")
    assert run(tmp_path / "run", "--format", "speculators", tmp_path / "out") == 0
    assert "a training run; taking drafter_best" in capsys.readouterr().err
    assert inspect.main([str(tmp_path / "run")]) == 0


def test_bad_input_ends_with_two_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "full")
    written(tmp_path / "reduced", ids=IDS)
    written(tmp_path / "second", "zlab", **DFLASH2)
    (tmp_path / "busy").mkdir()
    (tmp_path / "busy" / "file").touch()
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "config.json").write_text("{")
    out = tmp_path / "out"
    for arguments, message in (
        ((tmp_path / "none", "--format", "deepspec", out), "no such drafter directory"),
        ((tmp_path / "junk", "--format", "deepspec", out), "cannot be read as JSON"),
        ((tmp_path / "full", "--format", "zlab", out), "cannot hold the layout 'anchor_first'"),
        (
            (tmp_path / "second", "--format", "deepspec", out),
            "cannot be written for dflash2 drafters",
        ),
        ((tmp_path / "full", "--format", "deepspec", tmp_path / "busy"), "not an empty folder"),
        ((tmp_path / "full", "--format", "deepspec", tmp_path / "junk" / "config.json"), "not an empty folder"),
        ((tmp_path / "reduced", "--format", "speculators", out), "name its target with --target"),
        ((tmp_path / "full", "--format", "deepspec", out, "--target", tmp_path / "none"), "no such file or directory"),
    ):
        assert run(*arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert message in line
        assert not out.exists()
    with pytest.raises(SystemExit) as caught:
        run(tmp_path / "full", "--format", "other", out)
    assert caught.value.code == 2
    capsys.readouterr()
    assert inspect.main([str(tmp_path / "none")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_target_makes_tables_of_tied_codebooks(tmp_path: Path) -> None:
    """The public form of a DFlash 2 drafter that was trained on projections of the embedding."""
    target = target_folder(tmp_path / "target")
    written(tmp_path / "a", "zlab", **DFLASH2 | {"selector_tied": True, "layout": "fill_in", "block_size": 5})
    for name, options in (("same", ()), ("tables", ("--target", target))):
        assert run(tmp_path / "a", "--format", "zlab", tmp_path / name, *options) == 0
    assert tensor_bytes(tmp_path / "same") == tensor_bytes(tmp_path / "a")
    tied, tables = (load_file(tmp_path / name / "model.safetensors") for name in ("same", "tables"))
    place = "candidate_selector."
    assert tied.keys() - tables.keys() == {f"{place}{name}_projection.weight" for name in ("predecessor", "successor")}
    for name in ("predecessor", "successor"):
        table, projection = tables[f"{place}{name}_codebook"], tied[f"{place}{name}_projection.weight"]
        exact = np.asarray(TARGET.params["embed"]) @ projection.astype(np.float32).T
        np.testing.assert_allclose(table.astype(np.float32), exact, rtol=0.02, atol=0.02)  # bfloat16
    assert "selector_tied" not in json.loads((tmp_path / "tables" / "config.json").read_text())["dflash_config"]


def test_inspect_shows_a_selector(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    written(tmp_path / "a", "zlab", **DFLASH2 | {"layer_windows": (7, 7)})
    assert inspect.main([str(tmp_path / "a")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "z-lab DFlash 2",
        "selector, rank 6, 5 candidates a draft; codebooks are tables of their own",
        "around attention and MLP, coefficients shared by 8 channels",
        "window 7",
        "can be written as │ zlab │",
    ):
        assert text in shown, text


def test_inspect_shows_what_matters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    written(tmp_path / "a", ids=IDS, markov_head_type="gated", layer_windows=(5, 0))
    assert inspect.main([str(tmp_path / "a")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "DeepSpec",
        "anchor_first: 4 rows, 4 drafts a block (every row is a draft)",
        "bfloat16",
        "2: width 32, MLP 48, 4 heads, 2 key/value heads, head size 16",
        "layer 0: window 5; layer 1: full",
        "-1, 0 of 2",
        "Markov, gated, rank 32",
        "yes, from the hidden state and previous token",
        "7 of 40 ids; mask token 39",
        "theta 10000",
        "872be49dbb638044",
        "ce 0.1, tv 0.9",
        "tiny-target; in shape, any target of width 32, 40 ids and 2 layers",
        "can be written as │ deepspec, speculators │",
    ):
        assert text in shown, text


def test_inspect_leaves_the_targets_matrices_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "a")
    target = target_folder(tmp_path / "target")
    assert run(tmp_path / "a", "--format", "deepspec", tmp_path / "b", "--target", target) == 0
    read: list[str] = []
    whole = TensorFiles.read
    monkeypatch.setattr(TensorFiles, "read", lambda self, name, index=(): read.append(name) or whole(self, name, index))
    assert inspect.main([str(tmp_path / "b")]) == 0
    assert "fc.weight" in read and not {"embed_tokens.weight", "lm_head.weight"} & set(read)


@pytest.mark.slow
def test_the_shipped_drafter_goes_to_vllms_format_with_its_targets_head(tmp_path: Path, smollm2_path: Path) -> None:
    shipped = Path(__file__).resolve().parents[1] / "assets/smollm2-135m-dspark"
    assert smollm2_path.exists()
    assert run(shipped, "--format", "speculators", tmp_path / "out") == 0
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert_fits(raw, SCHEMA)
    size = json.loads((shipped / "config.json").read_text())["draft_vocab_size"]
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].shape == (size, 576)
    assert run(tmp_path / "out", "--format", "deepspec", tmp_path / "back", "--target", "smollm2-135m") == 0
    first, last = (tensor_bytes(folder) for folder in (shipped, tmp_path / "back"))
    assert {name: last[name] for name in first} == first
