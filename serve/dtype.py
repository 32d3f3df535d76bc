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
# A head of a small model, and the rows of a plain step, of a verified block and of a few of them.
_SHAPE = 16384, 576
_ROWS = 1, 6, 16
_CALLS = 7


def seconds(dtype: str, rows: int) -> float:
    """Fastest of a few dots of `rows` rows with weights of `dtype`."""
    w_VD, x_TD = jnp.ones(_SHAPE, dtype), jnp.ones((rows, _SHAPE[1]), jnp.float32)
    dot = jax.jit(linear)
    dot(x_TD, w_VD).block_until_ready()
    times = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        dot(x_TD, w_VD).block_until_ready()
        times.append(time.perf_counter() - start)
    return min(times)


def fast_dtype() -> str:
    """The compute dtype that decodes fastest here, "float32" or "bfloat16"."""
    if jax.default_backend() != "cpu":
        return "bfloat16"
    spent = {dtype: sum(seconds(dtype, rows) for rows in _ROWS) for dtype in ("float32", "bfloat16")}
    return min(spent, key=lambda dtype: spent[dtype])
