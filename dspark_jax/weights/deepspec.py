"""DeepSpec's drafters (`deepseek-ai/dspark_qwen3_8b_block7`): DSpark, and DFlash as DSpark without heads.

config.json is the target's own with the drafter's keys beside it; every row of a block is a draft (anchor_first). The
frozen embedding and head may be left out. What DeepSpec itself does not have is stored as in other formats: a reduced
draft vocabulary as in speculators (`d2t` and `t2d`), a scaled embedding and capped logits by z-lab's keys. Sequential
heads beyond vanilla, gated and rnn are an extension of ours (docs/checkpoints.md): DeepSpec itself does not read them.
"""

from typing import Any

from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.weights.config_keys import Keys
from dspark_jax.weights.drafter_format import (
    BACKBONE,
    HARMLESS,
    HEADS,
    NOTES,
    OWN_HEADS,
    Description,
    Format,
    backbone_fields,
    head_fields,
    reduced_vocabulary,
    refuse,
    tap_fields,
    their_backbone,
    their_heads,
    unpublished_heads,
    window_fields,
)
from dspark_jax.weights.rope_keys import write_rope

ARCHITECTURE = "Qwen3DSparkModel"
TABLE = BACKBONE | HEADS | OWN_HEADS
_ANCHORS = 512


def normalise(keys: Keys, target: TargetConfig | None) -> DrafterConfig:
    keys.expect("projector_type", "dspark")  # said by writers that know other drafters too
    fields = backbone_fields(keys, target)
    config = DrafterConfig(
        **fields,
        **window_fields(keys, fields["num_layers"], keys.take("is_causal", bool, False), causal_windows=False),
        **tap_fields(keys, target, keys.ids("target_layer_ids")),
        **head_fields(keys, own=True),
        block_size=keys.take("block_size"),
        mask_token_id=keys.take("mask_token_id"),
        draft_vocab_size=reduced_vocabulary(keys, fields["vocab_size"]),
        embed_scale=float(keys.take("input_embedding_scale", (int, float), 1.0)),
        logit_softcap=float(keys.take("final_logit_softcapping", (int, float), 0.0)),
        layout="anchor_first",
    )
    keys.finish(HARMLESS)
    return config


def num_anchors(description: Description) -> int:
    """Anchors a sequence in training, without which DeepSpec builds no model: as our own notes say, else its usual."""
    run = description.notes.get("config") or {}
    return (run.get("data") or {}).get("num_anchors", _ANCHORS)


def describe(config: DrafterConfig, description: Description) -> dict[str, Any]:
    refuse(FORMAT.title, {
        "the layout 'fill_in'": config.layout != "anchor_first",
        "Gemma layers": config.family != "qwen3",
        "a scale of the logits": config.logit_scale != 1,
        "layers of which only some are causal": len(set(config.layer_causal)) > 1,
    })  # fmt: skip
    raw = {"architectures": [ARCHITECTURE], "dtype": description.dtype} | their_backbone(config)
    raw |= {
        "rope_parameters": write_rope(config.rope_theta, config.rope_scaling),
        "tie_word_embeddings": False,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "num_anchors": num_anchors(description),
    }
    if any(config.layer_causal):
        raw["is_causal"] = True
    if config.draft_vocab_size:
        raw["draft_vocab_size"] = config.draft_vocab_size
    if config.embed_scale != 1:
        raw["input_embedding_scale"] = config.embed_scale
    if config.logit_softcap:
        raw["final_logit_softcapping"] = config.logit_softcap
    return raw | their_heads(config) | {NOTES: description.notes}


def extends(config: DrafterConfig) -> dict[str, bool]:
    return {
        "a reduced draft vocabulary": config.draft_vocab_size > 0,
        "causal layers": any(config.layer_causal),
        "an embedding scale or a soft cap of the logits": (config.embed_scale, config.logit_softcap) != (1.0, 0.0),
    } | unpublished_heads(config)


FORMAT = Format("deepspec", "DeepSpec", TABLE, normalise, describe, extends=extends)
