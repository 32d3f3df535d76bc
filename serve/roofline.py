"""What a round must take on a TPU: its work, its bytes and what it sends, against what a chip can do. No jax."""

import dataclasses

from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.slices import Chip


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one device and round: operations, bytes of main memory, bytes sent over links."""

    flops: float
    bytes: float
    links: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.links + other.links)


def times(work: Work, chip: Chip) -> dict[str, float]:
    """Seconds that each resource alone needs."""
    return {
        "compute": work.flops / chip.flops,
        "memory": work.bytes / chip.memory_bandwidth,
        "links": work.links / chip.link_bandwidth,
    }


def seconds(work: Work, chip: Chip) -> float:
    """At least so long: compute, memory and links overlap, the slowest sets the time (Williams et al. 2009)."""
    return max(times(work, chip).values())


def attention_work(
    config: TargetConfig | DrafterConfig, requests: int, queries: int, context: int, bytes_each: int, tensor: int
) -> Work:
    """Attention of `queries` rows in all over contexts of `context` keys each: every request's keys and values are read
    once, every query meets its keys in two products."""
    keys = 2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_each
    products = 4 * config.num_layers * config.num_heads * config.head_dim
    return Work(queries * context * products / tensor, requests * context * keys / tensor)
