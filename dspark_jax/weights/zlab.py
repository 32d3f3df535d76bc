"""z-lab's drafters: DFlash (`z-lab/Qwen3-8B-DFlash-b16`) and DFlash 2 (`z-lab/Qwen3.8-27B-DFlash2`), which store
neither embedding nor head.

The first row of a block stands for the anchor and is no draft (fill_in), so block_size 16 gives 15 drafts. Layers
with a sliding window are causal inside the block unless `is_causal` says otherwise, as it does in DFlash 2.

A DFlash 2 drafter may be more here than z-lab's own are, which is then stored in words of other formats: every row a
draft (`sample_from_anchor`), a reduced vocabulary (`draft_vocab_size`, `d2t`, `t2d`: speculators), a confidence head
(`enable_confidence_head`: DeepSpec). Tied codebooks are stored as their projections under `selector_tied`.
"""

from typing import Any

from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.drafters.conv import TAPS
from dspark_jax.weights.config_keys import Keys
from dspark_jax.weights.drafter_format import (
    BACKBONE,
    HARMLESS,
    HEADS,
    NOTES,
    Description,
    Entry,
    Format,
    backbone_fields,
    reduced_vocabulary,
    refuse,
    tap_fields,
    their_backbone,
    window_fields,
)
from dspark_jax.weights.rope_keys import write_rope

ARCHITECTURE, ARCHITECTURE_2 = "DFlashDraftModel", "DFlash2DraftModel"
TABLE = BACKBONE
_CONVOLUTIONS: dict[str, Entry] = {}
for _conv in ("attention_conv", "mlp_conv"):
    _theirs, _ours = f"layers.{{}}.{_conv}.", f"backbone/layers_{{}}/{_conv}/"
    _CONVOLUTIONS[_theirs + "base_kernel"] = Entry(_ours + "base_kernel")
    _CONVOLUTIONS[_theirs + "kernel_projection.weight"] = Entry(_ours + "kernel_projection", "rows")
_SELECTOR: dict[str, Entry] = {
    "candidate_selector.predecessor_codebook": Entry("selector/predecessor"),
    "candidate_selector.successor_codebook": Entry("selector/successor"),
    "candidate_selector.predecessor_projection.weight": Entry("selector/predecessor_projection"),
    "candidate_selector.successor_projection.weight": Entry("selector/successor_projection"),
    "candidate_selector.hidden_projection.weight": Entry("selector/hidden_projection"),
}
_CONFIDENCE = {name: entry for name, entry in HEADS.items() if name.startswith("confidence_head.")}
TABLE_2 = BACKBONE | _CONVOLUTIONS | _SELECTOR | _CONFIDENCE
_SCALES = ("input_embedding_scale", "final_logit_softcapping", "output_multiplier")


def _fields(keys: Keys, section: Keys, target: TargetConfig | None) -> dict[str, Any]:
    """What the two kinds have in common. Some writers put the section's keys at the top."""
    fields = backbone_fields(keys, target)
    section.move(keys, "block_size", "mask_token_id", "target_layer_ids", *_SCALES)
    return {
        **fields,
        **window_fields(keys, fields["num_layers"], keys.take("is_causal", bool, None), causal_windows=True),
        **tap_fields(keys, target, section.ids("target_layer_ids")),
        "block_size": section.take("block_size"),
        "mask_token_id": section.take("mask_token_id"),
        "embed_scale": float(section.take("input_embedding_scale", (int, float), 1.0)),
        "logit_scale": float(section.take("output_multiplier", (int, float), 1.0)),
        "logit_softcap": float(section.take("final_logit_softcapping", (int, float), 0.0)),
    }


def normalise(keys: Keys, target: TargetConfig | None) -> DrafterConfig:
    section = keys.section("dflash_config")
    section.expect("projector_type", "dflash")
    config = DrafterConfig(**_fields(keys, section, target), layout="fill_in")
    section.finish()
    keys.finish(HARMLESS)
    return config


def normalise_2(keys: Keys, target: TargetConfig | None) -> DrafterConfig:
    section = keys.section("dflash_config")
    section.expect("projector_type", "dflash2")
    section.move(keys, "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    section.expect("conv_kernel_size", TAPS)
    fields = _fields(keys, section, target)
    config = DrafterConfig(
        **fields,
        algorithm="dflash2",
        layout="anchor_first" if keys.take("sample_from_anchor", bool, False) else "fill_in",
        draft_vocab_size=reduced_vocabulary(keys, fields["vocab_size"]),
        confidence_head=keys.take("enable_confidence_head", bool, False),
        conv_group_size=section.take("conv_group_size"),
        selector_rank=section.take("selector_rank"),
        selector_top_k=section.take("selector_top_k"),
        selector_tied=section.take("selector_tied", bool, False),
    )
    section.finish()
    keys.finish(HARMLESS)
    return config


def _describe(config: DrafterConfig, description: Description, title: str, architecture: str) -> dict[str, Any]:
    """What the two kinds have in common, the way back."""
    windowed = tuple(window > 0 for window in config.layer_windows)
    uniform, by_window = len(set(config.layer_causal)) <= 1, config.layer_causal == windowed
    refuse(title, {"layers of which only some are causal": not (uniform or by_window)})
    section: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.embed_scale != 1:
        section["input_embedding_scale"] = config.embed_scale
    if config.logit_scale != 1:
        section["output_multiplier"] = config.logit_scale
    if config.logit_softcap:
        section["final_logit_softcapping"] = config.logit_softcap
    raw = {"architectures": [architecture], "dtype": description.dtype} | their_backbone(config)
    rope = write_rope(config.rope_theta, config.rope_scaling)
    raw |= {
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope if config.rope_scaling else None,
        "tie_word_embeddings": False,
        "num_target_layers": config.num_target_layers,
        "dflash_config": section,
    }
    if any(windowed) and not by_window:
        raw["is_causal"] = any(config.layer_causal)
    elif any(config.layer_causal) and uniform:
        raw["is_causal"] = True
    return raw | {NOTES: description.notes}


def describe(config: DrafterConfig, description: Description) -> dict[str, Any]:
    refuse(FORMAT.title, {
        "the layout 'anchor_first'": config.layout != "fill_in",
        "Gemma layers": config.family != "qwen3",
        "a Markov head": config.markov_rank > 0,
        "a confidence head": config.confidence_head,
        "a reduced draft vocabulary": config.draft_vocab_size > 0,
    })  # fmt: skip
    raw = _describe(config, description, FORMAT.title, ARCHITECTURE)
    return raw | {"block_size": config.block_size}


def describe_2(config: DrafterConfig, description: Description) -> dict[str, Any]:
    raw = _describe(config, description, FORMAT_2.title, ARCHITECTURE_2)
    raw["dflash_config"] |= {
        "block_size": config.block_size,
        "conv_group_size": config.conv_group_size,
        "conv_kernel_size": TAPS,
        "selector_rank": config.selector_rank,
        "selector_top_k": config.selector_top_k,
    }
    if config.selector_tied:
        raw["dflash_config"]["selector_tied"] = True
    if config.layout == "anchor_first":
        raw["sample_from_anchor"] = True
    if config.draft_vocab_size:
        raw["draft_vocab_size"] = config.draft_vocab_size
    if config.confidence_head:
        raw["enable_confidence_head"] = True
    return raw


def extends_2(config: DrafterConfig) -> dict[str, bool]:
    return {
        "tied codebooks (--target multiplies them out)": config.selector_tied,
        "the layout 'anchor_first'": config.layout == "anchor_first",
        "a reduced draft vocabulary": config.draft_vocab_size > 0,
        "a confidence head": config.confidence_head,
    }


FORMAT = Format("zlab", "z-lab DFlash", TABLE, normalise, describe)
FORMAT_2 = Format("zlab", "z-lab DFlash 2", TABLE_2, normalise_2, describe_2, "dflash2", extends=extends_2)
