"""DFlash 2: convolutions in every layer, and a selector in place of a Markov head."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dspark_jax.kinds.base import Kind
from dspark_jax.shapes import require

if TYPE_CHECKING:
    from dspark_jax.drafter_shape import DrafterConfig


@dataclasses.dataclass(frozen=True)
class Shape:
    """Convolution and selector of a drafter."""

    conv_group_size: int = 0
    """Channels that share the coefficients of a convolution."""
    selector_rank: int = 0
    """Rank of the selector."""
    selector_top_k: int = 0
    """The tokens that it chooses among, those that the backbone ranks highest."""
    selector_tied: bool = False
    """Its two codebooks are projections of the target's embedding in place of tables of their own."""


@dataclasses.dataclass(frozen=True)
class Settings(Shape):
    """Those of a training run."""

    conv_group_size: int = 16
    """Channels that share the coefficients of a convolution."""
    selector_rank: int = 256
    """Rank of the selector."""
    selector_top_k: int = 16
    """The tokens that it chooses among, those that the backbone ranks highest."""


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
    shapes=(Shape,),
    fixed={"family": "qwen3"},
    check=_check,
)
