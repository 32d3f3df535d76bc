"""EAGLE-3 and MTP: one layer of the drafter's own, used again for each further draft."""

import dataclasses

from dspark_jax.kinds.base import Kind


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """The layer of a chain drafter."""

    qk_norm: bool = True
    """It normalises queries and keys."""


@dataclasses.dataclass(frozen=True)
class Eagle3Shape:
    """What public EAGLE-3 drafters may have."""

    norm_before_residual: bool = False
    """The residual stream starts after the norm."""
    own_head: bool = False
    """A trained head of its own in place of the target's."""


_ONE_LAYER = {
    "num_layers": 1,
    "layout": "anchor_first",
    "mask_token_id": -1,
    "layer_windows": (),
    "layer_causal": (),
    "family": "qwen3",
    "logit_scale": 1.0,
}

EAGLE3 = Kind("EAGLE-3", shapes=(LayerShape, Eagle3Shape), fixed=_ONE_LAYER, chain=True)
MTP = Kind("MTP", shapes=(LayerShape,), fixed=_ONE_LAYER, chain=True, taps=False, reads_hidden=True)
