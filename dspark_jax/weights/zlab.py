"""z-lab's DFlash drafters (`z-lab/Qwen3-8B-DFlash-b16`): no sequential head, no embedding, no head of their own.

The first row of a block stands for the anchor and is no draft (fill_in), so block_size 16 gives 15 drafts. Layers
with a sliding window are causal inside the block unless `is_causal` says otherwise.
"""

from typing import Any

from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.weights.config_keys import Keys
from dspark_jax.weights.drafter_format import (
    BACKBONE,
    HARMLESS,
    NOTES,
    Description,
    Format,
    backbone_fields,
    refuse,
    tap_fields,
    their_backbone,
    window_fields,
)
from dspark_jax.weights.rope_keys import write_rope

ARCHITECTURE = "DFlashDraftModel"
TABLE = BACKBONE


def normalise(keys: Keys, target: TargetConfig | None) -> DrafterConfig:
    fields = backbone_fields(keys, target)
    section = keys.section("dflash_config")
    section.expect("projector_type", "dflash")
    section.expect("output_multiplier", 1, 1.0)
    section.move(keys, "block_size", "mask_token_id", "target_layer_ids")
    config = DrafterConfig(
        **fields,
        **window_fields(keys, fields["num_layers"], keys.take("is_causal", bool, None), causal_windows=True),
        **tap_fields(keys, target, section.ids("target_layer_ids")),
        block_size=section.take("block_size"),
        mask_token_id=section.take("mask_token_id"),
        embed_scale=float(section.take("input_embedding_scale", (int, float), 1.0)),
        logit_softcap=float(section.take("final_logit_softcapping", (int, float), 0.0)),
        layout="fill_in",
    )
    section.finish()
    keys.finish(HARMLESS)
    return config


def describe(config: DrafterConfig, description: Description) -> dict[str, Any]:
    windowed = tuple(window > 0 for window in config.layer_windows)
    uniform, by_window = len(set(config.layer_causal)) <= 1, config.layer_causal == windowed
    refuse(FORMAT.title, {
        "the layout 'anchor_first'": config.layout != "fill_in",
        "Gemma layers": config.family != "qwen3",
        "a Markov head": config.markov_rank > 0,
        "a confidence head": config.confidence_head,
        "a reduced draft vocabulary": config.draft_vocab_size > 0,
        "layers of which only some are causal": not (uniform or by_window),
    })  # fmt: skip
    section: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.embed_scale != 1:
        section["input_embedding_scale"] = config.embed_scale
    if config.logit_softcap:
        section["final_logit_softcapping"] = config.logit_softcap
    raw = {"architectures": [ARCHITECTURE], "dtype": description.dtype} | their_backbone(config)
    rope = write_rope(config.rope_theta, config.rope_scaling)
    raw |= {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope if config.rope_scaling else None,
        "tie_word_embeddings": False,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dflash_config": section,
    }
    if any(windowed) and not by_window:
        raw["is_causal"] = any(config.layer_causal)
    elif any(config.layer_causal) and uniform:
        raw["is_causal"] = True
    return raw | {NOTES: description.notes}


FORMAT = Format("zlab", "z-lab DFlash", TABLE, normalise, describe)
