"""The target against transformers' own Llama and Qwen3 (torch, float32) on tiny random models."""

import numpy as np
import pytest

from dspark_jax import load_target

pytestmark = pytest.mark.parity
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"},
    "initializer_range": 0.2,  # loud: a wrong detail shows
}


def build(family: str, tied: bool, head_dim: int, shards: bool, folder):
    torch = pytest.importorskip("torch", reason="torch is not installed: the extra `parity` brings it")
    import transformers

    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }
    config_class, model_class = kinds[family]
    torch.manual_seed(0)
    config = config_class(**SHAPE, head_dim=head_dim, tie_word_embeddings=tied)
    model = model_class(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder, **({"max_shard_size": "40KB"} if shards else {}))
    return torch, model


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("tied", "head_dim", "shards"),
    [pytest.param(True, 8, False, id="tied"), pytest.param(False, 20, True, id="untied, odd head size, sharded")],
)
def test_logits_and_all_hidden_states(family, tied, head_dim, shards, tmp_path):
    torch, model = build(family, tied, head_dim, shards, tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() == shards
    tokens = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (2, 33))
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens), output_hidden_states=True)
    layers = SHAPE["num_hidden_layers"]
    ours = load_target(tmp_path).forward(tokens, tuple(range(-1, layers)))
    np.testing.assert_allclose(ours.logits_BSV, theirs.logits.numpy(), atol=2e-4)
    # hidden_states[i + 1] is the output of layer i, but the last one is already past the final norm.
    for index in range(layers):
        np.testing.assert_allclose(ours.taps_BSMD[:, :, index], theirs.hidden_states[index].numpy(), atol=2e-4)
    np.testing.assert_allclose(ours.hidden_BSD, theirs.hidden_states[-1].numpy(), atol=2e-4)
