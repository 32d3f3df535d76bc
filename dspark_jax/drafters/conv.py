"""DFlash 2's convolution: a row of a block takes up the row before it, on the way into and out of a sublayer.

    y[t, c] = sum over taps i of (base[side, i, c] + dynamic[t, side, i, c // group size]) x[t - i, c]

Side 0 works on what the sublayer reads, side 1 on what it gives, and the dynamic coefficients of both come from what it
reads. The row before a block's first counts as zero, so however many blocks are packed, none reaches into another.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import layers
from dspark_jax.config import DrafterConfig

TAPS = 2


def _pass_through(_: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Each row as it is: the first tap 1, the other 0."""
    return jnp.zeros(shape, jnp.float32).at[:, 0].set(1.0)


class BlockConv(nn.Module):
    """The convolution around one sublayer; fresh, it changes nothing."""

    config: DrafterConfig

    def setup(self) -> None:
        c = self.config
        groups = c.d_model // c.conv_group_size
        self.base_kernel = self.param("base_kernel", _pass_through, (2, TAPS, c.d_model))
        self.kernel_projection = self.param("kernel_projection", nn.initializers.zeros, (2, TAPS, groups, c.d_model))

    def __call__(self, x_BAGD: jax.Array, sublayer: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """The sublayer over block rows x, with both sides around it."""
        dynamic = layers.linear(x_BAGD, self.kernel_projection)  # [B, A, G, side, tap, group]
        dynamic = jnp.repeat(dynamic, self.config.conv_group_size, axis=-1)
        kernel = self.base_kernel.astype(jnp.float32)[None, None, None] + dynamic
        return _convolve(sublayer(_convolve(x_BAGD, kernel[..., 0, :, :])), kernel[..., 1, :, :])


def _convolve(x_BAGD: jax.Array, kernel_BAGtD: jax.Array) -> jax.Array:
    previous_BAGD = jnp.pad(x_BAGD, ((0, 0), (0, 0), (1, 0), (0, 0)))[:, :, :-1]
    return kernel_BAGtD[..., 0, :] * x_BAGD + kernel_BAGtD[..., 1, :] * previous_BAGD
