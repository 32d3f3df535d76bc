"""Drafters: what proposes the tokens that the target verifies."""

from dspark_jax.drafters.drafter import Drafter, load_drafter

__all__ = ["Drafter", "load_drafter"]
