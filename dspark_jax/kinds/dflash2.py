"""DFlash 2: convolutions in every layer, and a selector in place of a Markov head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dspark_jax.kinds.base import Kind
from dspark_jax.shapes import require

if TYPE_CHECKING:
    from dspark_jax.drafter_shape import DrafterConfig


def _check(config: DrafterConfig) -> None:
    size, candidates = config.conv_group_size, config.selector_top_k
    require(
        size > 0 and config.d_model % size == 0,
        f"drafter conv_group_size = {size}: expected a divisor of d_model = {config.d_model}",
    )
    require(config.selector_rank > 0, f"drafter selector_rank = {config.selector_rank}: expected a positive number")
    require(
        0 < candidates <= config.head_rows,
        f"drafter selector_top_k = {candidates}: expected 1 to {config.head_rows}, the size of the draft vocabulary",
    )


KIND = Kind(
    title="DFlash 2",
    own=("conv_group_size", "selector_rank", "selector_top_k", "selector_tied"),
    fixed={"family": "qwen3"},
    check=_check,
)
