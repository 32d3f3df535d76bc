"""EAGLE-3 as its authors, SpecForge and SGLang store it: a Llama layer called `midlayer` and a head of its own.

Layer ids count as ours do; a config without them means the servers' usual three. How many tokens to draft is up to
whoever serves it; `ttt_length`, DeepSpec's key, says it in files written here, 7 stands for SpecForge's training. A
config without `draft_vocab_size` has no head of its own: SGLang takes the target's.
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

ARCHITECTURE = "LlamaForCausalLMEagle3"
TABLE = table("midlayer.") | OWN_HEAD
_STEPS = 7
_THETA = 1e4  # what transformers gives a Llama whose config has none, as the first public drafters do
_IGNORED = frozenset({"target_model_type"})


def normalise(keys: Keys, target: TargetConfig | None) -> DrafterConfig:
    fields = backbone_fields(keys, target, usual_theta=_THETA)
    section = keys.section("eagle_config")
    for key, value in (
        ("use_aux_hidden_state", True),
        ("use_input_layernorm_in_first_layer", True),
        ("use_last_layernorm", True),
        ("use_mtp_layernorm", False),
    ):
        section.expect(key, value)
    named = "eagle_aux_hidden_state_layer_ids"
    ids = section.ids(named) if named in section else usual_taps(keys, target)
    section.finish()
    keys.expect("target_hidden_size", fields["d_model"])
    own_head = "draft_vocab_size" in keys and not frozen_head(keys)
    config = DrafterConfig(
        **fields,
        **window_fields(keys, fields["num_layers"], False, causal_windows=False),
        **tap_fields(keys, target, ids),
        **residual_fields(keys),
        algorithm="eagle3",
        block_size=keys.take("ttt_length", default=_STEPS),
        mask_token_id=-1,
        draft_vocab_size=reduced_vocabulary(keys, fields["vocab_size"]),
        qk_norm=False,
        own_head=own_head,
    )
    keys.finish(HARMLESS | _IGNORED)
    return config


def describe(config: DrafterConfig, description: Description) -> dict[str, Any]:
    refuse(FORMAT.title, {
        "norms of queries and keys": config.qk_norm,
        "a confidence head": config.confidence_head,
        "an embedding scale or a soft cap of the logits": (config.embed_scale, config.logit_softcap) != (1.0, 0.0),
    })  # fmt: skip
    raw = {"architectures": [ARCHITECTURE], "dtype": description.dtype} | their_backbone(config)
    rope = write_rope(config.rope_theta, config.rope_scaling)
    notes = description.notes | {"num_target_layers": config.num_target_layers}
    return raw | {
        "model_type": "llama",
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope if config.rope_scaling else None,
        "tie_word_embeddings": False,
        "draft_vocab_size": config.head_rows if config.own_head or config.draft_vocab_size else None,
        "target_hidden_size": config.d_model,
        "norm_before_residual": config.norm_before_residual,
        "ttt_length": config.block_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.target_layer_ids),
            "use_aux_hidden_state": True,
        },
        NOTES: notes | ({} if config.own_head else {"frozen_head": True}),
    }


FORMAT = Format("specforge", "SpecForge EAGLE-3", TABLE, normalise, describe, "eagle3")
