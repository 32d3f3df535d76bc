"""Configs shaped like those that lie in public: every key that such a file has, and the sizes of real models.

Only config.json is read here; tests/formats.py has whole checkpoints of tiny drafters.
"""

from typing import Any

import pytest

from dspark_jax.config import RopeScaling
from dspark_jax.weights.config_keys import Keys
from dspark_jax.weights.drafter_files import recognise

TRANSFORMERS: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "pad_token_id": 248044,
    "rms_norm_eps": 1e-6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
}
QWEN_27B = TRANSFORMERS | {
    "head_dim": 128,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 262144,
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 64,
    "vocab_size": 248320,
}
YARN = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 8192}
TAPS = [5, 19, 33, 47, 61]
SPECFORGE = QWEN_27B | {
    "architectures": ["DSparkDraftModel"],
    "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
    "block_size": 7,
    "dflash_config": {
        "attention_mode": "gqa",
        "confidence_head_alpha": 1.0,
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": 256,
        "mask_token_id": 248070,
        "projector_type": "dspark",
        "target_layer_ids": TAPS,
    },
    "rope_parameters": YARN | {"rope_theta": 10000000, "rope_type": "yarn"},
    "rope_theta": 10000000,
    "target_hidden_size": None,
}
ZLAB_2 = QWEN_27B | {
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": {
        "block_size": 8,
        "conv_group_size": 16,
        "conv_kernel_size": 2,
        "mask_token_id": 248070,
        "selector_rank": 256,
        "selector_top_k": 16,
        "target_layer_ids": TAPS,
    },
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 5,
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "sliding_window": 2048,
    "transformers_version": "5.8.1",
    "use_sliding_window": True,
}
# Of other writers than DeepSpec: the whole vocabulary counted as the draft's, and the kind of drafter said once more.
DEEPSPEC = QWEN_27B | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "confidence_head_with_markov": True,
    "draft_vocab_size": 248320,
    "enable_confidence_head": True,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "mask_token_id": 248070,
    "num_anchors": 512,
    "projector_type": "dspark",
    "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "target_layer_ids": TAPS,
}
SPECULATORS = {
    "architectures": ["DSparkDraftModel"],
    "aux_hidden_state_layer_ids": [layer + 1 for layer in TAPS],
    "block_size": 8,
    "confidence_head_with_markov": True,
    "draft_vocab_size": 32000,
    "dtype": "bfloat16",
    "enable_confidence_head": True,
    "markov_head_type": "vanilla",
    "markov_rank": 256,
    "mask_token_id": 248070,
    "max_anchors": 3072,
    "sample_from_anchor": False,
    "sliding_window_non_causal": False,
    "speculators_config": {
        "algorithm": "dspark",
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 7, "verifier_accept_k": 1}
        ],
        "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "Qwen/Qwen3.6-27B"},
    },
    "speculators_model_type": "dspark",
    "speculators_version": "0.7.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformer_layer_config": {key: value for key, value in QWEN_27B.items() if key != "num_target_layers"}
    | {"rope_parameters": {"mrope_interleaved": True, "rope_theta": 10000000, "rope_type": "default"}},
    "transformers_version": "5.8.1",
}
# As the authors' own, of transformers 4.28: no rope at all, and layers that servers know by heart.
EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "bos_token_id": 128000,
    "draft_vocab_size": 32000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": 128256,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28], "use_aux_hidden_state": True},
}
MARKOV = {"markov_rank": 256, "confidence_head": True, "confidence_with_markov": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SpecForge DSpark": (
        SPECFORGE,
        MARKOV
        | {
            "layout": "anchor_first",
            "num_drafts": 7,
            "target_layer_ids": tuple(TAPS),
            "num_target_layers": 64,
            "rope_theta": 1e7,
            "rope_scaling": RopeScaling("yarn", 32.0, 8192, attention_factor=1.3465735902799727),
            "max_length": 262144,
        },
    ),
    "z-lab DFlash 2": (
        ZLAB_2,
        {
            "algorithm": "dflash2",
            "layout": "fill_in",
            "num_drafts": 7,
            "layer_windows": (2048,) * 5,
            "layer_causal": (),
            "selector_rank": 256,
            "mask_token_id": 248070,
        },
    ),
    "z-lab DFlash 2, logits scaled and capped": (
        ZLAB_2
        | {
            "dflash_config": ZLAB_2["dflash_config"]
            | {"final_logit_softcapping": 20.0, "output_multiplier": 0.19611613513818404}
        },
        {"embed_scale": 1.0, "logit_scale": 0.19611613513818404, "logit_softcap": 20.0},
    ),
    "DeepSpec's, by others": (DEEPSPEC, MARKOV | {"draft_vocab_size": 0, "layout": "anchor_first", "num_drafts": 7}),
    "speculators dspark": (
        SPECULATORS,
        MARKOV
        | {
            "layout": "fill_in",
            "num_drafts": 7,
            "draft_vocab_size": 32000,
            "target_layer_ids": tuple(TAPS),
            "rope_scaling": None,
        },
    ),
    "EAGLE-3": (
        EAGLE3,
        {
            "algorithm": "eagle3",
            "rope_theta": 1e4,
            "head_dim": 128,
            "draft_vocab_size": 32000,
            "own_head": True,
            "qk_norm": False,
            "target_layer_ids": (1, 15, 28),
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_config_as_it_lies_in_public_is_read(name: str) -> None:
    raw, expected = CASES[name]
    normalise = recognise(raw, "config.json").normalise
    assert normalise is not None
    config = normalise(Keys(raw, "config.json"), None)
    assert {field: getattr(config, field) for field in expected} == expected
