"""Checkpoints of the other public formats, written by hand from their descriptions: what each config.json says and the
tensors beside it, spelt out once more, independent of the tables.

Only names, shapes and settings are compared: the network behind them is the one of every other test.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file
from tiny import DFLASH2

from dspark_jax.config import RopeScaling
from dspark_jax.drafters import Drafter

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
        for name in {"attention_conv", "mlp_conv"} & layer.keys():
            tensors[f"{place}{name}.base_kernel"] = layer[name]["base_kernel"]
            tensors[f"{place}{name}.kernel_projection.weight"] = layer[name]["kernel_projection"].reshape(-1, 32)
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
    for name, leaf in drafter.params.get("selector", {}).items():
        theirs = f"{name}.weight" if name.endswith("projection") else f"{name}_codebook"
        tensors[f"candidate_selector.{theirs}"] = np.asarray(leaf)
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
# As released: the block size lies in the section, and sliding layers see all of their block.
ZLAB_2: dict[str, Any] = {key: value for key, value in ZLAB.items() if key != "block_size"} | {
    "architectures": ["DFlash2DraftModel"],
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 7,
    "is_causal": False,
    "dflash_config": {
        "block_size": 5,
        "conv_group_size": 8,
        "conv_kernel_size": 2,
        "mask_token_id": 39,
        "selector_rank": 6,
        "selector_top_k": 5,
        "target_layer_ids": [-1, 0],
    },
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
FILL_IN_2 = DFLASH2 | {"layout": "fill_in", "block_size": 5, "layer_windows": (7, 7)}
# What a DFlash 2 drafter may be here, and z-lab's are not.
OURS_2 = DFLASH2 | {"selector_tied": True, "confidence_head": True, "ids": IDS}
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
