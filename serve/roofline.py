"""What a round must take on a TPU: its work and its bytes against what a chip can do. No jax."""

import dataclasses

from dspark_jax.config import DrafterConfig, TargetConfig


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of TPU: bytes of main memory that a program can use, dense bfloat16 FLOP/s, bytes/s of main memory."""

    memory: float
    flops: float
    bandwidth: float


# Peak FLOP/s and bandwidth: the vendor's system pages of each generation (cloud.google.com/tpu/docs/v4, v5e, v5p, v6e).
# Memory: their capacity less what the compiler reports as reserved.
CHIPS = {
    "TPU v4": Chip(30.75 * 2**30, 2.75e14, 1.2e12),
    "TPU v5 lite": Chip(15.75 * 2**30, 1.97e14, 8.19e11),
    "TPU v5": Chip(95.74 * 2**30, 4.59e14, 2.765e12),
    "TPU v6 lite": Chip(31.25 * 2**30, 9.18e14, 1.64e12),
}


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one device and round."""

    flops: float
    bytes: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)


def seconds(work: Work, chip: Chip) -> float:
    """At least so long: compute and memory overlap, the slower one sets the time (Williams et al. 2009)."""
    return max(work.flops / chip.flops, work.bytes / chip.bandwidth)


def attention_work(
    config: TargetConfig | DrafterConfig, requests: int, queries: int, context: int, bytes_each: int, tensor: int
) -> Work:
    """Attention of `queries` rows in all over contexts of `context` keys each: every request's keys and values are read
    once, every query meets its keys in two products."""
    keys = 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    products = 4 * config.num_layers * config.num_heads * config.head_dim
    return Work(queries * context * products / tensor, requests * context * keys / tensor)
