"""DeepSpec's EAGLE-3 drafters (`deepseek-ai/eagle3_qwen3_8b_ttt7`): one Qwen3 layer over the whole vocabulary.

`ttt_length` is the number of steps it was trained for, and the tokens it drafts. Embedding and head are the target's.
A confidence head, a reduced vocabulary, a scaled embedding and capped logits, which DeepSpec does not have here, are
stored as in its DSpark drafters.
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
from dspark_jax.weights.eagle3_format import CONFIDENCE, table
from dspark_jax.weights.rope_keys import write_rope

ARCHITECTURE = "Qwen3Eagle3Model"
TABLE = table("layers.{}.") | CONFIDENCE
_TRAINING = frozenset({"step_loss_decay", "target_model_name_or_path"})
_STEP_LOSS_DECAY = 0.8  # DeepSpec's own; it builds no model without one


def normalise(keys: Keys, target: TargetConfig | None) -> DrafterConfig:
    fields = backbone_fields(keys, target)
    keys.expect("draft_num_hidden_layers", fields["num_layers"])
    config = DrafterConfig(
        **fields,
        **window_fields(keys, fields["num_layers"], False, causal_windows=False),
        **tap_fields(keys, target, keys.ids("target_layer_ids")),
        algorithm="eagle3",
        block_size=keys.take("ttt_length"),
        mask_token_id=-1,
        confidence_head=keys.take("enable_confidence_head", bool, False),
        draft_vocab_size=reduced_vocabulary(keys, fields["vocab_size"]),
        embed_scale=float(keys.take("input_embedding_scale", (int, float), 1.0)),
        logit_softcap=float(keys.take("final_logit_softcapping", (int, float), 0.0)),
    )
    keys.finish(HARMLESS | _TRAINING)
    return config


def describe(config: DrafterConfig, description: Description) -> dict[str, Any]:
    refuse(FORMAT.title, {
        "a layer without norms of queries and keys": not config.qk_norm,
        "a residual stream that starts after the norm": config.norm_before_residual,
        "a head of the drafter's own": config.own_head,
    })  # fmt: skip
    raw = {"architectures": [ARCHITECTURE], "dtype": description.dtype} | their_backbone(config)
    raw |= {
        "rope_parameters": write_rope(config.rope_theta, config.rope_scaling),
        "tie_word_embeddings": False,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "draft_num_hidden_layers": config.num_layers,
        "ttt_length": config.block_size,
        "step_loss_decay": _STEP_LOSS_DECAY,
    }
    if config.confidence_head:
        raw["enable_confidence_head"] = True
    if config.draft_vocab_size:
        raw["draft_vocab_size"] = config.draft_vocab_size
    if config.embed_scale != 1:
        raw["input_embedding_scale"] = config.embed_scale
    if config.logit_softcap:
        raw["final_logit_softcapping"] = config.logit_softcap
    return raw | {NOTES: description.notes}


def extends(config: DrafterConfig) -> dict[str, bool]:
    return {
        "a reduced draft vocabulary": config.draft_vocab_size > 0,
        "a confidence head": config.confidence_head,
        "an embedding scale or a soft cap of the logits": (config.embed_scale, config.logit_softcap) != (1.0, 0.0),
    }


FORMAT = Format("deepspec", "DeepSpec EAGLE-3", TABLE, normalise, describe, "eagle3", extends=extends)
