"""What the families differ in: windows, ropes, biases, norms, soft caps, and how their files are read.

Numbers against transformers are in test_target_parity.py; here are the properties that need no torch.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny import make_target, random_tokens

from dspark_jax import ConfigError, load_target, rotary
from dspark_jax import target as target_lib
from dspark_jax.config import RopeScaling
from dspark_jax.target import Target
from dspark_jax.weights.hf_config import read_config

LENGTH, WINDOW = 10, 3
GEMMA3 = {
    "family": "gemma3",
    "tied_head": True,
    "local_rope_theta": 1e3,
    "attention_scale": 0.2,
    "embed_scale": 5.5,
    "layer_windows": (WINDOW, 0),
    "rope_scaling": RopeScaling("linear", factor=8.0),
}
GEMMA4 = GEMMA3 | {
    "family": "gemma4",
    "attention_scale": 1.0,
    "logit_softcap": 2.0,
    "full_head_dim": 24,
    "full_kv_heads": 1,
    "full_value_is_key": True,
    "rope_scaling": RopeScaling("proportional", fraction=0.25),
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"family": "mistral", "layer_windows": (WINDOW, WINDOW)},
    "qwen2, llama 3 rope": {
        "family": "qwen2",
        "qkv_bias": True,
        "rope_scaling": RopeScaling("llama3", factor=4.0, original_length=32),
    },
    "gemma 3": GEMMA3,
    "gemma 4": GEMMA4,
}
_features = jax.jit(target_lib.features, static_argnames=("config", "tap_layers"))


@functools.cache
def tiny(name: str) -> Target:
    return make_target(**FAMILIES[name])


@pytest.mark.parametrize("name", ["qwen2, llama 3 rope", "gemma 4"])
def test_token_by_token_decoding_gives_what_one_full_forward_gives(name):
    target, tokens = tiny(name), random_tokens(0, 2, LENGTH)
    full = target.forward(tokens, (0, 1))
    caches: Any = target_lib.init_caches(target.config, 2, LENGTH, jnp.float32)
    hidden, taps = [], []
    for position in range(LENGTH):
        at = np.full((2, 1), position)
        out = _features(target.config, target.params, tokens[:, position : position + 1], at, caches, tap_layers=(0, 1))
        caches = out.caches
        hidden.append(out.hidden_BSD)
        taps.append(out.taps_BSMD)
    np.testing.assert_allclose(np.concatenate(hidden, axis=1), full.hidden_BSD, atol=2e-5)
    np.testing.assert_allclose(np.concatenate(taps, axis=1), full.taps_BSMD, atol=2e-5)


@pytest.mark.parametrize("name", ["mistral", "gemma 4"])
def test_a_layer_sees_its_window_and_no_further(name):
    """Row p of the batch has another token at position p; the first layer's output tells what it sees."""
    target = tiny(name)
    tokens = np.repeat(random_tokens(1, 1, LENGTH), LENGTH, axis=0)
    changed = (tokens + np.eye(LENGTH, dtype=np.int32)) % target.config.vocab_size
    before, after = (np.asarray(target.forward(x, (0,)).taps_BSMD) for x in (tokens, changed))
    moved = np.any(before != after, axis=(2, 3))
    place, row = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :]
    np.testing.assert_array_equal(moved, (place <= row) & (place > row - WINDOW))


def test_logits_are_capped_and_their_order_kept():
    target = tiny("gemma 4")
    out = target.forward(random_tokens(2, 1, LENGTH))
    raw = np.asarray(target_lib.logits(target.params, out.hidden_BSD))
    np.testing.assert_allclose(out.logits_BSV, 2 * np.tanh(raw / 2), atol=1e-5)
    np.testing.assert_allclose(target_lib.logits(target.params, out.hidden_BSD, 2.0), out.logits_BSV, atol=1e-5)
    assert np.abs(out.logits_BSV).max() <= 2 < np.abs(raw).max()


def test_caches_have_each_layers_own_shape():
    shapes = [cache.k_BKHT.shape for cache in target_lib.init_caches(tiny("gemma 4").config, 3, 7, jnp.float32)]
    assert shapes == [(3, 2, 16, 7), (3, 1, 24, 7)]


def turned(scaling: RopeScaling | None, position: int, head_dim: int = 32) -> np.ndarray:
    """Angles of a position's pairs, from the table."""
    cos, sin = rotary.table(jnp.array([position]), head_dim, 1e4, scaling)
    return np.arctan2(np.asarray(sin), np.asarray(cos))[0]


def test_linear_scaling_stretches_positions():
    np.testing.assert_allclose(turned(RopeScaling("linear", factor=4.0), 40), turned(None, 10), atol=1e-5)


def test_proportional_rope_turns_the_first_pairs_only():
    angles = turned(RopeScaling("proportional", fraction=0.25), 3)
    np.testing.assert_allclose(angles[:4], turned(None, 3)[:4], atol=1e-6)
    np.testing.assert_array_equal(angles[4:], 0)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_blended_ropes_keep_fast_pairs_and_stretch_slow_ones(kind):
    scaling = RopeScaling(kind, factor=8.0, original_length=64, attention_factor=1.5 if kind == "yarn" else 1.0)
    plain = 1e4 ** (-np.arange(0, 32, 2) / 32)
    scaled = rotary.frequencies(32, 1e4, scaling)
    np.testing.assert_allclose(scaled[0], plain[0])
    np.testing.assert_allclose(scaled[-4:], plain[-4:] / 8)
    ratio = plain / scaled
    assert (np.diff(ratio) >= -1e-9).all()
    assert ((ratio > 1.01) & (ratio < 7.99)).any()  # the blend between
    cos, sin = rotary.table(jnp.array([5]), 32, 1e4, scaling)
    np.testing.assert_allclose(np.hypot(cos, sin), scaling.attention_factor, rtol=1e-6)


def test_llama3_rope_is_the_published_formula():
    """Llama 3.1's own numbers at its own shape, pair by pair."""
    scaling = RopeScaling("llama3", factor=8.0, original_length=8192, low_factor=1.0, high_factor=4.0)
    for pair, found in enumerate(rotary.frequencies(128, 5e5, scaling)):
        frequency = 5e5 ** (-2 * pair / 128)
        wavelength = 2 * np.pi / frequency
        smooth = (8192 / wavelength - 1) / (4 - 1)
        expected = (1 - smooth) * frequency / 8 + smooth * frequency
        expected = frequency if wavelength < 8192 / 4 else frequency / 8 if wavelength > 8192 else expected
        np.testing.assert_allclose(found, expected, rtol=1e-12)


BODY: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "head_dim": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


def config_of(directory: Path, **settings: Any) -> Any:
    (directory / "config.json").write_text(json.dumps(BODY | settings))
    return read_config(directory)


def test_settings_of_each_family(tmp_path: Path):
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 |= {"original_max_position_embeddings": 32}
    old = config_of(tmp_path, model_type="llama", rope_theta=5e5, rope_scaling=llama3)
    new = config_of(tmp_path, model_type="llama", rope_parameters=llama3 | {"rope_theta": 5e5})
    assert old == new
    assert old.rope_scaling == RopeScaling("llama3", factor=8.0, original_length=32)
    mistral = config_of(tmp_path, model_type="mistral", rope_theta=1e4, sliding_window=8)
    assert (mistral.family, mistral.layer_windows) == ("mistral", (8, 8))
    assert config_of(tmp_path, model_type="mistral", rope_theta=1e4, sliding_window=None).layer_windows == ()
    assert config_of(tmp_path, model_type="qwen2", rope_theta=1e4).qkv_bias
    qwen2 = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    assert config_of(tmp_path, model_type="qwen2", rope_theta=1e4, **qwen2).layer_windows == (0, 8)


def test_gemma_settings_old_and_new(tmp_path: Path):
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaling, "sliding_window_pattern": 2}
    nested = {"full_attention": scaling | {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    types = ["sliding_attention", "full_attention"]
    gemma = {"model_type": "gemma3_text", "sliding_window": 4, "query_pre_attn_scalar": 25}
    config = config_of(tmp_path, **gemma, **old)
    assert config == config_of(tmp_path, **gemma, rope_parameters=nested, layer_types=types)
    assert (config.layer_windows, config.attention_scale, config.embed_scale, config.tied_head) == (
        (4, 0),
        0.2,
        4.0,
        True,
    )
    assert config.layer(0)[2:5] == (4, 1e4, None)
    assert config.layer(1)[2:5] == (0, 1e6, RopeScaling("linear", factor=8.0))

    gemma = {"model_type": "gemma4_text", "sliding_window": 4, "layer_types": types, "attention_k_eq_v": True}
    gemma |= {"hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0}
    flat = config_of(tmp_path, **gemma, global_head_dim=8, num_global_key_value_heads=1)
    by_layer = {"1": {"head_dim": 8, "num_key_value_heads": 1}}
    assert flat == config_of(tmp_path, **gemma, per_layer_config=by_layer)
    assert flat.layer(0) == (2, 6, 4, 1e4, None, False)
    assert flat.layer(1) == (1, 8, 0, 1e6, RopeScaling("proportional", fraction=0.25), True)
    assert (flat.logit_softcap, flat.attention_scale) == (30.0, 1.0)
    # Public files nest the text model's settings; older ones leave defaults out.
    text = {
        "model_type": "gemma4",
        "text_config": gemma | {"model_type": "gemma4_text", "num_global_key_value_heads": 1},
    }
    nested_config = config_of(tmp_path, **text)
    assert nested_config.layer(1)[:2] == (1, 512)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model_type": "gemma4_text"}, "hidden_size_per_layer_input = 256"),
        ({"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 1}, "num_kv_shared"),
        ({"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "enable_moe_block": True}, "enable_moe_block"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50"),
        ({"model_type": "gemma3_text", "hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": "gemma3_text"}, "layer_types has 'sliding_attention', but sliding_window = None"),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], named: str):
    with pytest.raises(ConfigError, match=named):
        config_of(tmp_path, **settings)


def gemma_files(directory: Path, family: int, prefix: str) -> dict[str, np.ndarray]:
    """A tiny Gemma checkpoint, the second layer a full one."""
    settings = {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "tie_word_embeddings": True,
    }
    if family == 4:
        settings |= {"attention_k_eq_v": True, "global_head_dim": 8, "num_global_key_value_heads": 1}
        settings |= {"hidden_size_per_layer_input": 0}
    text = BODY | settings | {"model_type": f"gemma{family}_text"}
    nested = {"model_type": f"gemma{family}", "text_config": text}
    (directory / "config.json").write_text(json.dumps(text if prefix == "model." else nested))
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (20, 16), "norm.weight": (16,)}
    for i, (heads, kv, size) in enumerate([(4, 2, 6), (4, 1, 8) if family == 4 else (4, 2, 6)]):
        place = f"layers.{i}."
        shapes |= {place + f"{name}_layernorm.weight": (16,) for name in ("input", "post_attention")}
        shapes |= {place + f"{name}_feedforward_layernorm.weight": (16,) for name in ("pre", "post")}
        shapes |= {place + f"self_attn.{name}_norm.weight": (size,) for name in "qk"}
        shapes |= {
            place + "self_attn.q_proj.weight": (heads * size, 16),
            place + "self_attn.o_proj.weight": (16, heads * size),
        }
        for name in "k" if family == 4 and i else "kv":
            shapes[place + f"self_attn.{name}_proj.weight"] = (kv * size, 16)
        shapes |= {place + f"mlp.{name}_proj.weight": (24, 16) for name in ("gate", "up")}
        shapes[place + "mlp.down_proj.weight"] = (16, 24)
        if family == 4:
            shapes[place + "layer_scalar"] = (1,)
    tensors = {prefix + name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors | {"model.vision_tower.x": np.zeros(3, np.float32)}, directory / "model.safetensors")
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("family", [3, 4])
def test_gemma_tensors_land_in_the_tree(tmp_path: Path, family: int, prefix: str):
    tensors = gemma_files(tmp_path, family, prefix)
    params = load_target(tmp_path).params
    layer, place = params["layers_1"], "layers.1."
    offset = 1 if family == 3 else 0  # Gemma 3 stores what its norms add to one
    norms = {
        "attn_norm": "input_layernorm",
        "post_attn_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
    }
    for ours, theirs in norms.items():
        np.testing.assert_array_equal(layer[ours], tensors[f"{place}{theirs}.weight"] + offset)
    np.testing.assert_array_equal(params["final_norm"], tensors["norm.weight"] + offset)
    k = tensors[place + "self_attn.k_proj.weight"]
    if family == 4:
        assert layer["qkv"].shape == (1, 5, 8, 16)
        np.testing.assert_array_equal(layer["qkv"][0, -1], k)
        np.testing.assert_array_equal(layer["layer_scalar"], tensors[place + "layer_scalar"])
    else:
        assert layer["qkv"].shape == (2, 4, 6, 16)
        np.testing.assert_array_equal(layer["qkv"][:, -2], k.reshape(2, 6, 16))


def test_biases_of_qwen2_lie_beside_their_rows(tmp_path: Path):
    from test_weights_hf import tiny_tensors, write_hf

    tensors = tiny_tensors("llama")
    rng = np.random.default_rng(1)
    for i in range(2):
        for name, rows in (("q", 24), ("k", 12), ("v", 12)):
            tensors[f"model.layers.{i}.self_attn.{name}_proj.bias"] = rng.normal(size=rows).astype(np.float32)
    layer = load_target(write_hf(tmp_path / "m", tensors, {"model_type": "qwen2"})).params["layers_1"]
    assert layer["qkv_bias"].shape == (2, 4, 6)
    q, v = (tensors[f"model.layers.1.self_attn.{name}_proj.bias"] for name in "qv")
    np.testing.assert_array_equal(layer["qkv_bias"][:, :2].reshape(24), q)
    np.testing.assert_array_equal(layer["qkv_bias"][:, 3].reshape(12), v)
