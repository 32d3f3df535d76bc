"""Rotary tables for every rope that the supported models use. Positions are turned, lengths are kept."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import layers
from dspark_jax.config import RopeScaling


def table(
    positions: jax.Array, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [..., H/2], float32, of integer `positions` [...], for `layers.rotate`."""
    if scaling is None:
        return layers.rotary_table(positions, head_dim, theta)
    frequency_h = jnp.asarray(frequencies(head_dim, theta, scaling), jnp.float32)
    angle = positions[..., None].astype(jnp.float32) * frequency_h.reshape((1,) * positions.ndim + frequency_h.shape)
    scale = scaling.attention_factor
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Radians a position for each of the H/2 pairs, float64.

    linear (Chen et al. 2023): all wavelengths times the factor. llama3 (Llama 3.1): long wavelengths only, with a
    blend between. yarn (Peng et al. 2023): the same idea over a ramp of pairs. proportional (Gemma 4): only the
    first pairs turn at all.
    """
    plain_h = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    stretched_h = plain_h / scaling.factor
    if scaling.kind == "linear":
        return stretched_h
    if scaling.kind == "proportional":
        turning = int(scaling.fraction * head_dim // 2)
        return np.where(np.arange(head_dim // 2) < turning, stretched_h, 0.0)
    if scaling.kind == "llama3":
        turns_h = scaling.original_length * plain_h / (2 * math.pi)
        kept_h = (turns_h - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
    else:

        def pair(turns: float) -> float:
            """The pair, as a real number, that turns so often over the original length."""
            return head_dim * math.log(scaling.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair(scaling.fast), pair(scaling.slow)
        if scaling.whole_pairs:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        kept_h = 1 - (np.arange(head_dim // 2) - low) / max(high - low, 0.001)
    kept_h = np.clip(kept_h, 0, 1)
    return plain_h * kept_h + stretched_h * (1 - kept_h)
