"""EAGLE-3 in the speculators format (`RedHatAI/*-speculator.eagle3`), which vLLM serves.

The layer is Llama's, or Qwen3's with norms of queries and keys, by the `model_type` of `transformer_layer_config`.
Layer ids count from the embedding (theirs = ours + 1); a config without them means vLLM's usual three. The head is the
drafter's own, over the draft vocabulary.
"""

from typing import Any

from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.weights.config_keys import Keys
from dspark_jax.weights.drafter_format import (
    HARMLESS,
    NOTES,
    Description,
    Format,
    backbone_fields,
    reduced_vocabulary,
    refuse,
    tap_fields,
    their_backbone,
    window_fields,
)
from dspark_jax.weights.eagle3_format import OWN_HEAD, frozen_head, residual_fields, table, usual_taps
from dspark_jax.weights.rope_keys import write_rope
from dspark_jax.weights.speculators import speculative_tokens, speculators_config

KIND = "eagle3"
TABLE = table("layers.{}.") | OWN_HEAD
_STEPS = 3  # what speculators trains and proposes where nothing is said
_IGNORED = frozenset({"embed_requires_grad", "enable_sp_ulysses", "has_no_defaults_at_init", "speculators_version"})


def normalise(keys: Keys, target: TargetConfig | None) -> DrafterConfig:
    keys.take("speculators_model_type", str)
    layer = keys.section("transformer_layer_config")
    qk_norm = layer.rest().get("model_type") == "qwen3"
    layer.expect("model_type", "llama", "qwen3")
    fields = backbone_fields(layer, target)
    keys.expect("target_hidden_size", fields["d_model"])
    named = [key for key in ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids") if key in keys]
    ids = tuple(layer_id - 1 for layer_id in keys.ids(named[0])) if named else usual_taps(keys, target)
    config = DrafterConfig(
        **fields,
        **window_fields(layer, fields["num_layers"], False, causal_windows=False),
        **tap_fields(keys, target, ids),
        **residual_fields(keys),
        algorithm="eagle3",
        block_size=speculative_tokens(keys) or _STEPS,
        mask_token_id=-1,
        draft_vocab_size=reduced_vocabulary(keys, fields["vocab_size"]),
        qk_norm=qk_norm,
        own_head=not frozen_head(keys),
    )
    layer.finish(HARMLESS)
    keys.finish(HARMLESS | _IGNORED | {"eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"})
    return config


def describe(config: DrafterConfig, description: Description) -> dict[str, Any]:
    refuse(FORMAT.title, {
        "a confidence head": config.confidence_head,
        "an embedding scale or a soft cap of the logits": (config.embed_scale, config.logit_softcap) != (1.0, 0.0),
    })  # fmt: skip
    layer = their_backbone(config) | {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "rope_parameters": write_rope(config.rope_theta, config.rope_scaling),
        "tie_word_embeddings": False,
    }
    notes = description.notes | {"num_target_layers": config.num_target_layers}
    return {
        "architectures": ["Eagle3Speculator"],
        "dtype": description.dtype,
        "speculators_model_type": KIND,
        "speculators_config": speculators_config(KIND, config, description),
        "transformer_layer_config": layer,
        "tie_word_embeddings": False,
        "draft_vocab_size": config.head_rows,
        "target_hidden_size": config.d_model,
        "norm_before_residual": config.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in config.target_layer_ids],
        NOTES: notes | ({} if config.own_head else {"frozen_head": True}),
    }


FORMAT = Format("speculators", "speculators EAGLE-3", TABLE, normalise, describe, "eagle3")
