"""EAGLE-3 and MTP: one layer of the drafter's own, used again for each further draft."""

from dspark_jax.kinds.base import Kind

_ONE_LAYER = {
    "num_layers": 1,
    "layout": "anchor_first",
    "mask_token_id": -1,
    "layer_windows": (),
    "layer_causal": (),
    "family": "qwen3",
    "logit_scale": 1.0,
}

EAGLE3 = Kind("EAGLE-3", own=("qk_norm", "norm_before_residual", "own_head"), fixed=_ONE_LAYER, chain=True)
MTP = Kind("MTP", own=("qk_norm",), fixed=_ONE_LAYER, chain=True, taps=False, reads_hidden=True)
