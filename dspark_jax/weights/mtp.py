"""MTP drafters: files of our own, with the tensor names that Qwen3.5 gives its module (`mtp.*`).

No public format holds an MTP module beside a target that was made without one. Norms are stored as they multiply.
"""

from typing import Any

from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.weights.config_keys import Keys
from dspark_jax.weights.drafter_format import (
    BACKBONE,
    HARMLESS,
    NOTES,
    Description,
    Entry,
    Format,
    backbone_fields,
    reduced_vocabulary,
    tap_fields,
    their_backbone,
    window_fields,
)
from dspark_jax.weights.eagle3_format import CONFIDENCE
from dspark_jax.weights.rope_keys import write_rope

ARCHITECTURE = "Qwen3MTPModel"
_LAYER = {f"mtp.{name}": entry for name, entry in BACKBONE.items() if name.startswith("layers.")}
TABLE = (
    _LAYER
    | CONFIDENCE
    | {
        "mtp.layers.{}.input_layernorm.weight": Entry("backbone/attn_norm"),
        "mtp.fc.weight": Entry("backbone/fc", "columns"),
        "mtp.pre_fc_norm_embedding.weight": Entry("backbone/embed_norm"),
        "mtp.pre_fc_norm_hidden.weight": Entry("backbone/hidden_norm"),
        "mtp.norm.weight": Entry("backbone/norm"),
    }
)


def normalise(keys: Keys, target: TargetConfig | None) -> DrafterConfig:
    fields = backbone_fields(keys, target)
    config = DrafterConfig(
        **fields,
        **window_fields(keys, fields["num_layers"], False, causal_windows=False),
        **tap_fields(keys, target, ()),
        algorithm="mtp",
        block_size=keys.take("block_size"),
        mask_token_id=-1,
        confidence_head=keys.take("enable_confidence_head", bool, False),
        draft_vocab_size=reduced_vocabulary(keys, fields["vocab_size"]),
        embed_scale=float(keys.take("input_embedding_scale", (int, float), 1.0)),
        logit_softcap=float(keys.take("final_logit_softcapping", (int, float), 0.0)),
        qk_norm=keys.take("qk_norm", bool),
    )
    keys.finish(HARMLESS)
    return config


def describe(config: DrafterConfig, description: Description) -> dict[str, Any]:
    return (
        {"architectures": [ARCHITECTURE], "dtype": description.dtype}
        | their_backbone(config)
        | {
            "rope_parameters": write_rope(config.rope_theta, config.rope_scaling),
            "tie_word_embeddings": False,
            "num_target_layers": config.num_target_layers,
            "block_size": config.block_size,
            "qk_norm": config.qk_norm,
            "enable_confidence_head": config.confidence_head,
            "draft_vocab_size": config.draft_vocab_size,
            "input_embedding_scale": config.embed_scale,
            "final_logit_softcapping": config.logit_softcap,
            NOTES: description.notes,
        }
    )


FORMAT = Format("mtp", "MTP", TABLE, normalise, describe, "mtp")
