"""What the three EAGLE-3 formats share: tensor names, the taps where a file names none, and settings not built here."""

from typing import Any

from dspark_jax.config import ConfigError, TargetConfig
from dspark_jax.weights.config_keys import Keys
from dspark_jax.weights.drafter_format import BACKBONE, HEAD, HEADS, NOTES, Entry

CONFIDENCE = {name: entry for name, entry in HEADS.items() if name.startswith("confidence_head")}
OWN_HEAD = {HEAD: Entry("head")}


def table(layer: str) -> dict[str, Entry]:
    """Tensor names, those of the layer beginning with `layer`."""
    names = {name: BACKBONE[name] for name in ("fc.weight", "norm.weight")}
    for name, entry in BACKBONE.items():
        if name.startswith("layers."):
            names[name.replace("layers.{}.", layer)] = entry
    names[layer + "input_layernorm.weight"] = Entry("backbone/embed_norm")
    names[layer + "hidden_norm.weight"] = Entry("backbone/hidden_norm")
    return names


def usual_taps(keys: Keys, target: TargetConfig | None) -> tuple[int, ...]:
    """The layers that servers tap where a checkpoint names none: 1, the middle one and the fourth from the end."""
    if target is None:
        raise ConfigError(
            f"{keys.where}: names no eagle_aux_hidden_state_layer_ids, so they follow from the target's number of"
            " layers; give the target"
        )
    return 1, target.num_layers // 2 - 1, target.num_layers - 4


def residual_fields(keys: Keys) -> dict[str, Any]:
    """Where the residual stream starts. EAGLE 3.1's further norms are refused."""
    for key in ("fc_norm", "norm_before_fc", "norm_output"):
        keys.expect(key, False)
    return {"norm_before_residual": keys.take("norm_before_residual", bool, False)}


def frozen_head(keys: Keys) -> bool:
    """Whether our own note says that the drafter uses its target's head; elsewhere these formats bring one."""
    notes = keys.rest().get(NOTES)
    return bool(isinstance(notes, dict) and notes.get("frozen_head"))
