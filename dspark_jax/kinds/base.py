"""What settings and their checks must know of an algorithm: the half of a drafter that has no jax in it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from dspark_jax.config import DraftSettings
    from dspark_jax.drafter_shape import DrafterConfig


@dataclasses.dataclass(frozen=True)
class Kind:
    """An algorithm in words. `title` is its name in prose. `shapes` are the parts of DrafterConfig that only such
    drafters read (several kinds may share one); in all others their fields stand as by default. `fixed` are fields
    that have one value in such drafters.

    `check` raises ConfigError for a shape that contradicts itself; `fields` turns settings into own fields, where they
    are not simply those of the same names.
    """

    title: str = ""
    shapes: tuple[type[DataclassInstance], ...] = ()
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    check: Callable[[DrafterConfig], None] = lambda config: None
    fields: Callable[[DraftSettings], dict[str, Any]] | None = None
    chain: bool = False
    """Each draft is fed the one before it, through layers of the drafter's own."""
    taps: bool = True
    """It reads layers of the target."""
    reads_hidden: bool = False
    """It reads the target's hidden states after the final norm."""
    whole_model: bool = False
    """It is a decoder of its own (`DrafterConfig.language_model`), and has the sizes of that."""
    can_grow: bool = False
    """Layers whose two output projections are zero add nothing, so a trained drafter can get more of them."""

    @property
    def own(self) -> tuple[str, ...]:
        """Names of the fields of its shapes."""
        return tuple(field.name for shape in self.shapes for field in dataclasses.fields(shape))

    def own_fields(self, settings: DraftSettings) -> dict[str, Any]:
        """Its own fields of DrafterConfig."""
        if self.fields is not None:
            return self.fields(settings)
        return {name: getattr(settings, name) for name in self.own if hasattr(settings, name)}
