"""A plain draft model: a whole decoder that is fed nothing of its target but tokens."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dspark_jax.kinds.base import Kind
from dspark_jax.shapes import TargetConfig, require

if TYPE_CHECKING:
    from dspark_jax.drafter_shape import DrafterConfig

# Sizes that the drafter repeats.
SHARED = (
    "vocab_size", "d_model", "d_ff", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rope_theta", "norm_eps",
    "max_length",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Shape:
    """The decoder that a plain draft model is."""

    language_model: TargetConfig | None = None
    """Its sizes are repeated in the drafter's own (`plain_drafter`)."""


def _check(config: DrafterConfig) -> None:
    whole = config.language_model
    if whole is None:
        require(False, "drafter language_model = None: a drafter of algorithm 'lm' is one")
        return
    for field in SHARED:
        found, value = getattr(config, field), getattr(whole, field)
        require(found == value, f"drafter {field} = {found!r}: this plain draft model has {value!r} and nothing else")


KIND = Kind(
    shapes=(Shape,),
    fixed={
        "layout": "anchor_first", "mask_token_id": -1, "num_target_layers": 0, "draft_vocab_size": 0,
        "layer_windows": (), "layer_causal": (), "rope_scaling": None, "embed_scale": 1.0, "logit_scale": 1.0,
        "logit_softcap": 0.0, "family": "qwen3",
    },
    check=_check,
    chain=True,
    taps=False,
    whole_model=True,
)  # fmt: skip
