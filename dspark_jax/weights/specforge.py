"""SpecForge's DSpark drafters: DeepSpec's tensors without embedding and head, the settings in `dflash_config`.

Some writers keep the head's settings, or all of them, at the top level, others in `dspark_config`; both rope
spellings occur. This format is read, not written: SpecForge reads DeepSpec's.
"""

from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.weights.config_keys import Keys
from dspark_jax.weights.drafter_format import (
    BACKBONE,
    HARMLESS,
    HEADS,
    Format,
    backbone_fields,
    head_fields,
    tap_fields,
    window_fields,
)

ARCHITECTURE = "DSparkDraftModel"
TABLE = BACKBONE | HEADS
_MOVED = (
    *("block_size", "mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type"),
    *("enable_confidence_head", "confidence_head_with_markov"),
)


def normalise(keys: Keys, target: TargetConfig | None) -> DrafterConfig:
    fields = backbone_fields(keys, target)
    keys.expect("target_hidden_size", fields["d_model"])
    for name in ("dflash_config", "dspark_config"):
        section = keys.section(name)
        section.expect("projector_type", "dspark")
        section.expect("attention_mode", "gqa")
        keys.move(section, *_MOVED)
        section.finish({"confidence_head_alpha"})
    config = DrafterConfig(
        **fields,
        **window_fields(keys, fields["num_layers"], keys.take("is_causal", bool, None), causal_windows=True),
        **tap_fields(keys, target, keys.ids("target_layer_ids")),
        **head_fields(keys),
        block_size=keys.take("block_size"),
        mask_token_id=keys.take("mask_token_id"),
        layout="anchor_first",
    )
    keys.finish(HARMLESS)
    return config


FORMAT = Format("specforge", "SpecForge DSpark", TABLE, normalise)
