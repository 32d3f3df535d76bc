"""Which dtype a model decodes in on this machine: measured at start on a CPU, bfloat16 elsewhere.

A CPU with matrix units (AMX, AVX512_BF16) multiplies bfloat16 several times faster than float32, one without them
several times slower, and no flag that Python can read everywhere says which.
"""

import time
from typing import Literal

import jax
import jax.numpy as jnp

from dspark_jax.layers import linear

Dtype = Literal["fast", "float32", "bfloat16"]
# Dots of a small model, more weights than a cache holds, since those of a step are read once: the narrower dtype would
# look fast for fitting in. And the rows of a plain step, of a verified block and of a few of them.
_SHAPE, _WEIGHTS = (8192, 576), 16
_ROWS = 1, 6, 16
_CALLS = 3


def seconds(dtype: str, rows: int) -> float:
    """Fastest of a few passes of `rows` rows through weights of `dtype`."""
    weights = [jnp.full(_SHAPE, i, dtype) for i in range(_WEIGHTS)]
    x_TD, dot = jnp.ones((rows, _SHAPE[1]), jnp.float32), jax.jit(linear)
    times = []
    for _ in range(1 + _CALLS):  # the first compiles
        start = time.perf_counter()
        jax.block_until_ready([dot(x_TD, w_VD) for w_VD in weights])
        times.append(time.perf_counter() - start)
    return min(times)


def fast_dtype() -> str:
    """The compute dtype that decodes fastest here, "float32" or "bfloat16"."""
    if jax.default_backend() != "cpu":
        return "bfloat16"
    spent = {dtype: sum(seconds(dtype, rows) for rows in _ROWS) for dtype in ("float32", "bfloat16")}
    return min(spent, key=lambda dtype: spent[dtype])
