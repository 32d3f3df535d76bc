"""The speculators format (`RedHatAI/*-speculator.dspark`), which vLLM serves: dspark, and dflash without heads.

The transformer's settings lie in `transformer_layer_config`, its layer ids count from the embedding (theirs = ours + 1)
and a reduced draft vocabulary comes as `t2d`, `d2t` and the head's rows for it.
"""

from typing import Any

from dspark_jax.config import ConfigError, DrafterConfig, Layout, TargetConfig
from dspark_jax.weights.config_keys import Keys
from dspark_jax.weights.drafter_format import (
    BACKBONE,
    HARMLESS,
    HEADS,
    NOTES,
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

KINDS = ("dspark", "dflash")
TABLE = BACKBONE | HEADS
_ARCHITECTURES = {"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel"}

# Training settings, and what only the Domino head reads.
_IGNORED = frozenset({
    "auf", "ce_loss_alpha", "confidence_head_alpha", "emb_dim", "gru_hidden_dim", "has_no_defaults_at_init",
    "l1_loss_alpha", "lambda_base_decay_ratio", "lambda_base_start", "loss_decay_gamma", "pure_draft_prefix_len",
    "speculators_version",
})  # fmt: skip


def normalise(keys: Keys, target: TargetConfig | None) -> DrafterConfig:
    keys.take("speculators_model_type", str)
    for key, value in (("projector_type", "dflash"), ("shift_label", False), ("norm_output", False)):
        keys.expect(key, value)
    layer = keys.section("transformer_layer_config")
    fields = backbone_fields(layer, target)
    keys.expect("target_hidden_size", fields["d_model"])
    block = keys.take("block_size")
    causal_windows = not keys.take("sliding_window_non_causal", bool, False)
    config = DrafterConfig(
        **fields,
        **window_fields(layer, fields["num_layers"], None, causal_windows),
        **tap_fields(keys, target, tuple(layer_id - 1 for layer_id in keys.ids("aux_hidden_state_layer_ids"))),
        **head_fields(keys),
        block_size=block,
        mask_token_id=keys.take("mask_token_id"),
        draft_vocab_size=reduced_vocabulary(keys, fields["vocab_size"]),
        layout=_layout(keys, block),
    )
    if _carries_the_anchor(config):
        raise ConfigError(
            f"{keys.where}: markov_head_type = 'rnn' with the layout 'fill_in': speculators trains its state on the"
            " anchor's row too, which is no draft and no step of the head here; supported here: anchor_first, or"
            " 'vanilla' or 'gated'"
        )
    layer.finish(HARMLESS)
    keys.finish(HARMLESS | _IGNORED)
    return config


def _carries_the_anchor(config: DrafterConfig) -> bool:
    """Whether a head in this format has a state that a block's first row, the anchor's own, has gone into."""
    return config.markov_head_type == "rnn" and config.layout == "fill_in"


def _layout(keys: Keys, block: int) -> Layout:
    """By how many tokens a block proposes; `sample_from_anchor`, which old files lack, must say the same."""
    tokens = speculative_tokens(keys)
    flag = keys.take("sample_from_anchor", bool, None)
    by_tokens = {block: True, block - 1: False}.get(tokens) if isinstance(tokens, int) else None
    if flag is None and by_tokens is None and tokens is not None:
        raise ConfigError(
            f"{keys.where}: speculative_tokens = {tokens!r} with block_size = {block}: expected {block} (anchor_first)"
            f" or {block - 1} (fill_in), or a key 'sample_from_anchor'"
        )
    if flag is not None and by_tokens is not None and flag != by_tokens:
        raise ConfigError(
            f"{keys.where}: sample_from_anchor = {flag}, but block_size - speculative_tokens = {block - (tokens or 0)}:"
            " expected 0 where it is true, 1 where it is false"
        )
    return "anchor_first" if (by_tokens if flag is None else flag) else "fill_in"


def speculative_tokens(keys: Keys) -> Any:
    """What the default proposal method, or the first one, says of the tokens a block proposes; None: nothing."""
    section = keys.section("speculators_config")
    methods, chosen = section.take("proposal_methods", list, []), section.take("default_proposal_method", str, None)
    named = [method for method in methods if chosen in (None, method.get("proposal_type"))] or methods
    return named[0].get("speculative_tokens") if named else None


def speculators_config(kind: str, config: DrafterConfig, description: Description) -> dict[str, Any]:
    """What the format says of serving: how many tokens to propose, and for which target."""
    return {
        "algorithm": kind,
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_drafts}],
        "verifier": {"name_or_path": description.notes.get("trained_on", {}).get("target"), "architectures": []},
    }


def describe(config: DrafterConfig, description: Description) -> dict[str, Any]:
    windowed = tuple(window > 0 for window in config.layer_windows)
    refuse(FORMAT.title, unpublished_heads(config) | {
        "Gemma layers": config.family != "qwen3",
        "an rnn head that starts behind the anchor's row (layout 'fill_in')": _carries_the_anchor(config),
        "causal layers without a window, or only some with one": any(config.layer_causal)
        and config.layer_causal != windowed,
        "an embedding scale or a soft cap of the logits": (config.embed_scale, config.logit_softcap) != (1.0, 0.0),
        "a scale of the logits": config.logit_scale != 1,
    })  # fmt: skip
    kind = "dspark" if config.markov_rank or config.confidence_head else "dflash"
    layer = their_backbone(config)
    layer |= {
        "rope_parameters": write_rope(config.rope_theta, config.rope_scaling),
        "tie_word_embeddings": False,
    }
    raw = {
        "architectures": [_ARCHITECTURES[kind]],
        "dtype": description.dtype,
        "speculators_model_type": kind,
        "speculators_config": speculators_config(kind, config, description),
        "transformer_layer_config": layer,
        "tie_word_embeddings": False,
        "block_size": config.block_size,
        "draft_vocab_size": config.head_rows,
        "target_hidden_size": config.d_model,
        "mask_token_id": config.mask_token_id,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in config.target_layer_ids],
        "sample_from_anchor": config.layout == "anchor_first",
        "sliding_window_non_causal": any(windowed) and not any(config.layer_causal),
    }
    # The format does not count the target's layers; our own reader finds them among the notes.
    notes = description.notes | {"num_target_layers": config.num_target_layers}
    return raw | (their_heads(config) if kind == "dspark" else {}) | {NOTES: notes}


FORMAT = Format("speculators", "speculators", TABLE, normalise, describe)
