"""The target against transformers' own models (torch, float32) on tiny random weights: every family, every rope, whole
and through a cache, further than the sliding windows reach."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import load_target
from dspark_jax import target as target_lib

pytestmark = pytest.mark.parity
SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,  # loud: a wrong detail shows
}
LENGTH, WINDOW, PREFILL = 33, 7, 19


def rope(kind: str = "default", **more: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 50000.0, "rope_type": kind, **more}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=32)
MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": WINDOW}
GEMMA3 = {
    "head_dim": 12,
    "query_pre_attn_scalar": 20,
    "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GEMMA4 = {
    "head_dim": 12,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": True,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
}
# A name, transformers' configuration and model, and the settings.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("Llama", rope() | {"tie_word_embeddings": True, "head_dim": 8}),
    "llama, untied, odd head size, sharded": ("Llama", rope() | {"head_dim": 20, "shards": True}),
    "llama 3": ("Llama", LLAMA3 | {"head_dim": 16}),
    "llama, linear rope": ("Llama", rope("linear", factor=3.0)),
    "llama, yarn": ("Llama", YARN | {"head_dim": 16}),
    "llama, yarn, not truncated": (
        "Llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=32, truncate=False) | {"head_dim": 16},
    ),
    "mistral, window": ("Mistral", rope() | {"sliding_window": WINDOW, "head_dim": 12}),
    "mistral, no window": ("Mistral", rope() | {"sliding_window": None}),
    "qwen2": ("Qwen2", rope() | {"tie_word_embeddings": True}),
    "qwen2, some windows": ("Qwen2", rope() | MIXED | {"use_sliding_window": True}),
    "qwen3, tied": ("Qwen3", rope() | {"tie_word_embeddings": True, "head_dim": 8}),
    "qwen3, untied, odd head size, sharded": ("Qwen3", rope() | {"head_dim": 20, "shards": True}),
    "gemma 3": ("Gemma3Text", GEMMA3),
    "gemma 3, soft cap, plain rope, untied": (
        "Gemma3Text",
        GEMMA3 | {"final_logit_softcapping": 2.0, "tie_word_embeddings": False, "rope_parameters": None},
    ),
    "gemma 4": ("Gemma4Text", GEMMA4),
    "gemma 4, values of their own": (
        "Gemma4Text",
        GEMMA4 | {"attention_k_eq_v": False, "final_logit_softcapping": None},
    ),
}  # fmt: skip


def build(kind: str, settings: dict[str, Any], folder: Any) -> tuple[Any, Any]:
    torch = pytest.importorskip("torch", reason="torch is not installed: the extra `parity` brings it")
    import transformers

    settings = dict(settings)
    shards = settings.pop("shards", False)
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SHAPE | settings)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("norm.weight"):
                weight.copy_((0 if kind.startswith("Gemma3") else 1) + 0.3 * torch.randn_like(weight))
            elif name.endswith("layer_scalar"):
                weight.copy_(1 + 0.3 * torch.randn_like(weight))
            elif name.endswith("bias"):
                weight.copy_(0.5 * torch.randn_like(weight))
    model.save_pretrained(folder, **({"max_shard_size": "40KB"} if shards else {}))
    assert (folder / "model.safetensors.index.json").exists() == shards
    return torch, model


@pytest.mark.parametrize("name", CASES)
def test_logits_and_all_hidden_states_whole_and_through_a_cache(name, tmp_path):
    torch, model = build(*CASES[name], tmp_path)
    tokens = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (2, LENGTH))
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens), output_hidden_states=True)
    layers = tuple(range(-1, SHAPE["num_hidden_layers"]))
    target = load_target(tmp_path)
    ours = target.forward(tokens, layers)
    # hidden_states[i + 1] is the output of layer i, but the last one is already past the final norm.
    states = [state.numpy() for state in theirs.hidden_states]
    np.testing.assert_allclose(ours.logits_BSV, theirs.logits.numpy(), atol=2e-4)
    for index in range(len(layers) - 1):
        np.testing.assert_allclose(ours.taps_BSMD[:, :, index], states[index], atol=2e-4)
    np.testing.assert_allclose(ours.hidden_BSD, states[-1], atol=2e-4)

    caches = target_lib.init_caches(target.config, 2, LENGTH + 3, jnp.float32)
    start = 0
    for stop in (PREFILL, PREFILL + 1, PREFILL + 5, LENGTH):
        position = np.tile(np.arange(start, stop), (2, 1))
        out = target_lib.features(target.config, target.params, tokens[:, start:stop], position, caches, layers)
        caches = out.caches
        for index in range(len(layers) - 1):
            np.testing.assert_allclose(out.taps_BSMD[:, :, index], states[index][:, start:stop], atol=2e-4)
        logits = target_lib.logits(target.params, out.hidden_BSD, target.config.logit_softcap)
        np.testing.assert_allclose(logits, theirs.logits.numpy()[:, start:stop], atol=2e-4)
        start = stop


def test_the_text_model_of_a_checkpoint_that_also_sees(tmp_path):
    """Gemma 3's public files hold a vision tower beside the language model, and nest the text settings."""
    torch = pytest.importorskip("torch", reason="torch is not installed: the extra `parity` brings it")
    import transformers

    text = SHAPE | GEMMA3 | {"model_type": "gemma3_text"}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).to(torch.float32).eval()
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (2, LENGTH))
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(load_target(tmp_path).forward(tokens).logits_BSV, theirs, atol=2e-4)
