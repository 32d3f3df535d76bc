"""Hugging Face targets: tiny checkpoints written here, in one file and in shards, and refusals by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dspark_jax.config import ConfigError
from dspark_jax.weights.hf_files import read_hf
from dspark_jax.weights.locate import read_target

D, F, N, K, H, V, LAYERS = 16, 24, 4, 2, 6, 20, 2
SETTINGS: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": N,
    "num_key_value_heads": K,
    "head_dim": H,
    "vocab_size": V,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
}


def tiny_tensors(family: str = "qwen3", width: int = D, kv_heads: int = K) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, width), "model.norm.weight": (width,)}
    shapes["lm_head.weight"] = (V, width)
    layer: dict[str, tuple[int, ...]] = {"input_layernorm": (width,), "post_attention_layernorm": (width,)}
    layer |= {"self_attn.q_proj": (N * H, width), "self_attn.o_proj": (width, N * H)}
    layer |= {f"self_attn.{name}_proj": (kv_heads * H, width) for name in "kv"}
    layer |= {"mlp.gate_proj": (F, width), "mlp.up_proj": (F, width), "mlp.down_proj": (width, F)}
    if family == "qwen3":
        layer |= {"self_attn.q_norm": (H,), "self_attn.k_norm": (H,)}
    for index in range(LAYERS):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_hf(directory: Path, tensors: Mapping[str, np.ndarray], changes: Mapping[str, Any] = {}) -> Path:
    """A checkpoint of the tiny shape; `changes` overrides settings of config.json (None leaves a key out)."""
    directory.mkdir(exist_ok=True)
    settings = {key: value for key, value in (SETTINGS | dict(changes)).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(settings))
    save_file(dict(tensors), directory / "model.safetensors")
    return directory


def assert_same_tree(left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, dict):
            assert_same_tree(value, right[name])
        else:
            np.testing.assert_array_equal(value, right[name], err_msg=name)


def test_tensors_land_in_the_tree(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    config, params, tokenizer = read_target(write_hf(tmp_path / "tiny-model", tensors))
    assert (config.family, config.name, config.tied_head, config.eos_token_ids) == ("qwen3", "tiny-model", False, (2,))
    assert (config.head_dim, config.rope_theta, config.norm_eps, config.max_length) == (H, 5000.0, 1e-6, 128)
    assert tokenizer is None
    layer, prefix = params["layers_1"], "model.layers.1."
    assert layer["qkv"].shape == (K, N // K + 2, H, D)
    q = tensors[prefix + "self_attn.q_proj.weight"].reshape(N, H, D)
    for head in range(N):
        np.testing.assert_array_equal(layer["qkv"][head // (N // K), head % (N // K)], q[head])
    for offset, name in ((2, "k_proj"), (1, "v_proj")):
        stored = tensors[f"{prefix}self_attn.{name}.weight"].reshape(K, H, D)
        np.testing.assert_array_equal(layer["qkv"][:, -offset], stored)
    np.testing.assert_array_equal(layer["o"], tensors[prefix + "self_attn.o_proj.weight"].reshape(D, N, H))
    np.testing.assert_array_equal(layer["gate"], tensors[prefix + "mlp.gate_proj.weight"])
    np.testing.assert_array_equal(layer["up"], tensors[prefix + "mlp.up_proj.weight"])
    np.testing.assert_array_equal(layer["down"], tensors[prefix + "mlp.down_proj.weight"])
    np.testing.assert_array_equal(layer["attn_norm"], tensors[prefix + "input_layernorm.weight"])
    np.testing.assert_array_equal(layer["mlp_norm"], tensors[prefix + "post_attention_layernorm.weight"])
    np.testing.assert_array_equal(layer["q_norm"], tensors[prefix + "self_attn.q_norm.weight"])
    np.testing.assert_array_equal(layer["k_norm"], tensors[prefix + "self_attn.k_norm.weight"])
    np.testing.assert_array_equal(params["embed"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["final_norm"], tensors["model.norm.weight"])
    np.testing.assert_array_equal(params["head"], tensors["lm_head.weight"])


def write_shards(directory: Path, tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Splits the single file of `directory` in two with an index, whose map of names is returned."""
    (directory / "model.safetensors").unlink()
    weight_map = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_shards_read_as_one_file(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    directory = write_hf(tmp_path / "m", tensors)
    single = read_hf(directory)[1]
    weight_map = write_shards(directory, tensors)
    assert_same_tree(read_hf(directory)[1], single)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors"):
        read_hf(directory)
    weight_map = dict.fromkeys(weight_map, "model-00001-of-00002.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match="is missing, though the index names it"):
        read_hf(directory)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_is_widened(tmp_path: Path, dtype: Any) -> None:
    narrow = {name: tensor.astype(dtype) for name, tensor in tiny_tensors().items()}
    wide = {name: tensor.astype(np.float32) for name, tensor in narrow.items()}
    params = read_hf(write_hf(tmp_path / "narrow", narrow))[1]
    assert params["layers_0"]["qkv"].dtype == np.float32
    assert_same_tree(params, read_hf(write_hf(tmp_path / "wide", wide))[1])


def test_llama_with_defaults_and_tied_head(tmp_path: Path) -> None:
    changes = {"model_type": "llama", "tie_word_embeddings": True, "hidden_size": N * H, "rope_theta": 7000.0}
    changes |= {"head_dim": None, "num_key_value_heads": None, "rope_parameters": None}
    tensors = tiny_tensors("llama", width=N * H, kv_heads=N)
    del tensors["lm_head.weight"]
    directory = write_hf(tmp_path / "m", tensors, changes)
    config, params, _ = read_hf(directory)
    assert (config.family, config.head_dim, config.num_kv_heads, config.rope_theta) == ("llama", H, N, 7000.0)
    assert config.tied_head
    assert "head" not in params
    assert params["layers_0"].keys() == {"attn_norm", "qkv", "o", "mlp_norm", "gate", "up", "down"}
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, directory / "model.safetensors")
    assert_same_tree(read_hf(directory)[1], params)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, directory / "model.safetensors")
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        read_hf(directory)


def test_generation_config_adds_end_ids(tmp_path: Path) -> None:
    directory = write_hf(tmp_path / "m", tiny_tensors())
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert read_hf(directory)[0].eos_token_ids == (2, 5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "phi3"}, "model_type 'phi3'"),
        ({"rope_theta": 6000.0}, "rope_theta"),
        ({"rope_parameters": None}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_theta": 5e3, "rope_type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"rope_theta": 5e3, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_parameters and rope_scaling disagree"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling of type linear lacks 'factor'"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "rope_scaling of type llama3 lacks 'high_freq_factor'"),
        ({"rope_parameters": {"rope_theta": 5e3, "surprise": 1}}, "unknown key 'rope_parameters.surprise' = 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has .* use_sliding_window is off"),
        ({"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}, "sliding_window = None"),
        ({"use_sliding_window": True, "layer_types": ["other"] * 2}, "layer_types"),
        ({"model_type": "llama", "sliding_window": 8}, "sliding_window = 8"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "16"}, "hidden_size = '16'"),
        ({"num_hidden_layers": 3}, r"model\.layers\.2\.input_layernorm\.weight' is missing"),
        ({"num_hidden_layers": 1}, r"model\.layers\.1\..*is not used"),
        ({"intermediate_size": 12}, r"gate_proj\.weight' has shape \[24, 16\], expected \[12, 16\]"),
        ({"model_type": "llama"}, "_norm.weight' is not used"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused_by_name(tmp_path: Path, changes: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_hf(write_hf(tmp_path / "m", tiny_tensors(), changes))


def test_a_window_that_is_switched_off_is_fine(tmp_path: Path) -> None:
    changes = {"use_sliding_window": False, "sliding_window": 8, "rope_theta": 5000.0}
    assert read_hf(write_hf(tmp_path / "m", tiny_tensors(), changes))[0].rope_theta == 5000.0


def test_directories_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_target(tmp_path)
    directory = write_hf(tmp_path / "m", tiny_tensors())
    whole = (directory / "model.safetensors").read_bytes()
    for size in (0, 5, 100, len(whole) - 4):
        (directory / "model.safetensors").write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"model\.safetensors: not a readable"):
            read_hf(directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"neither model\.safetensors nor"):
        read_hf(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_hf(directory)


def test_other_storage_types_are_refused(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.float64)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight' is stored as F64"):
        read_hf(write_hf(tmp_path / "m", tensors))


@pytest.mark.parametrize("name", ["qwen3_markov", "qwen3_dflash"])
def test_golden_targets_load(shared: Path, name: str) -> None:
    config, params, tokenizer = read_target(shared / "golden" / name / "target")
    stored = load_file(shared / "golden" / name / "target" / "model.safetensors")
    assert (config.num_layers, config.d_model, config.vocab_size, config.head_dim) == (6, 64, 320, 32)
    assert (config.rope_theta, config.eos_token_ids, tokenizer) == (1e6, (2,), None)
    assert ("head" in params) == (name == "qwen3_markov") == (not config.tied_head)
    np.testing.assert_array_equal(params["layers_5"]["down"], stored["model.layers.5.mlp.down_proj.weight"])
