"""DeepSpec's drafters for Gemma 4 (`deepseek-ai/dspark_gemma4_12b_block7`): Gemma layers, all of them full ones.

Head size, key/value heads and rope are those of the target's full layers; embeddings are scaled by the root of the
width, and the head's logits are capped before the Markov bias.
"""

from typing import Any

from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.weights import rope_keys
from dspark_jax.weights.config_keys import Keys
from dspark_jax.weights.deepspec import num_anchors
from dspark_jax.weights.drafter_format import (
    BACKBONE,
    HARMLESS,
    HEADS,
    NOTES,
    OWN_HEADS,
    Description,
    Entry,
    Format,
    head_fields,
    reduced_vocabulary,
    refuse,
    tap_fields,
    their_heads,
    unpublished_heads,
)
from dspark_jax.weights.hf_config import full_layers

ARCHITECTURE = "Gemma4DSparkModel"
_GEMMA: dict[str, Entry] = {
    "layers.{}.post_attention_layernorm.weight": Entry("backbone/layers_{}/post_attn_norm"),
    "layers.{}.pre_feedforward_layernorm.weight": Entry("backbone/layers_{}/mlp_norm"),
    "layers.{}.post_feedforward_layernorm.weight": Entry("backbone/layers_{}/post_mlp_norm"),
    "layers.{}.layer_scalar": Entry("backbone/layers_{}/layer_scalar"),
}
TABLE = BACKBONE | _GEMMA | HEADS | OWN_HEADS

# Of the target's settings those that its full, dense layers do not read.
_IGNORED = HARMLESS | {
    *("head_dim", "moe_intermediate_size", "num_experts", "num_key_value_heads", "num_kv_shared_layers"),
    *("sliding_window", "target_model_type", "target_text_model_type", "top_k_experts"),
    *("use_bidirectional_attention", "use_double_wide_mlp", "vocab_size_per_layer_input"),
}


def normalise(keys: Keys, target: TargetConfig | None) -> DrafterConfig:
    settings = keys.rest()
    (theta, scaling), _ = rope_keys.read_two_ropes(keys.where, settings, 4)
    full = full_layers(keys.where, settings)
    own = ("attention_k_eq_v", "global_head_dim", "num_global_key_value_heads", "per_layer_config", "rope_parameters")
    for key in own:
        keys.take(key, (bool, int, dict), None)
    for key, value in (
        ("hidden_activation", "gelu_pytorch_tanh"),
        ("attention_bias", False),
        ("enable_moe_block", False),
        ("hidden_size_per_layer_input", 0),
    ):
        keys.expect(key, value)
    num_layers, d_model = keys.take("num_hidden_layers"), keys.take("hidden_size")
    vocab_size = keys.take("vocab_size")
    keys.expect("layer_types", ["full_attention"] * num_layers)
    config = DrafterConfig(
        **tap_fields(keys, target, keys.ids("target_layer_ids")),
        **head_fields(keys, own=True),
        family="gemma4",
        vocab_size=vocab_size,
        d_model=d_model,
        d_ff=keys.take("intermediate_size"),
        num_layers=num_layers,
        num_heads=keys.take("num_attention_heads"),
        num_kv_heads=full["full_kv_heads"] or settings["num_key_value_heads"],
        head_dim=full["full_head_dim"] or settings["head_dim"],
        value_is_key=full["full_value_is_key"],
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=float(keys.take("rms_norm_eps", (int, float))),
        max_length=keys.take("max_position_embeddings", default=target.max_length if target else 131072),
        block_size=keys.take("block_size"),
        mask_token_id=keys.take("mask_token_id"),
        draft_vocab_size=reduced_vocabulary(keys, vocab_size),
        embed_scale=d_model**0.5,
        logit_softcap=float(keys.take("final_logit_softcapping", (int, float), 0.0)),
        layout="anchor_first",
    )
    keys.finish(_IGNORED)
    return config


def describe(config: DrafterConfig, description: Description) -> dict[str, Any]:
    refuse(FORMAT.title, {
        "the layout 'fill_in'": config.layout != "anchor_first",
        "causal layers or windows": any(config.layer_causal) or any(config.layer_windows),
        "a scale of the logits": config.logit_scale != 1,
        "another embedding scale than the root of the width": config.embed_scale != config.d_model**0.5,
    })  # fmt: skip
    full = rope_keys.write_rope(config.rope_theta, config.rope_scaling)
    raw = {
        "architectures": [ARCHITECTURE],
        "model_type": "gemma4_text",
        "dtype": description.dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "num_global_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "global_head_dim": config.head_dim,
        "attention_k_eq_v": config.value_is_key,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {"full_attention": full},
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_length,
        "layer_types": ["full_attention"] * config.num_layers,
        "final_logit_softcapping": config.logit_softcap or None,
        "tie_word_embeddings": False,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "num_anchors": num_anchors(description),
    }
    if config.draft_vocab_size:
        raw["draft_vocab_size"] = config.draft_vocab_size
    return raw | their_heads(config) | {NOTES: description.notes}


def extends(config: DrafterConfig) -> dict[str, bool]:
    return {"a reduced draft vocabulary": config.draft_vocab_size > 0} | unpublished_heads(config)


FORMAT = Format("deepspec", "DeepSpec (Gemma 4)", TABLE, normalise, describe, extends=extends)
