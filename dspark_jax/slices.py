"""TPU slices that are not here: their chips, a description to compile for, and what a traced program computes.

`train.compile` and `serve.compile` prove with it that a step or a round fits a slice, and predict its time.
"""

import dataclasses
import math
import re
from collections.abc import Collection
from typing import Any

import jax
from jax.experimental import topologies

from dspark_jax.config import ConfigError


@dataclasses.dataclass(frozen=True)
class Chip:
    """A kind of TPU: bytes of main memory that a program can use, dense bfloat16 FLOP/s, bytes/s of main memory, and
    bytes/s that a chip sends along one axis of the torus (both directions)."""

    memory: float
    flops: float
    memory_bandwidth: float
    link_bandwidth: float


# By jax's name of the device. Rates: the vendor's system pages of each generation (cloud.google.com/tpu/docs/v4, v5e,
# v5p, v6e) and the published scaling guide. Memory: what the compiler reports as usable.
CHIPS = {
    "TPU v4": Chip(30.75 * 2**30, 2.75e14, 1.2e12, 0.9e11),
    "TPU v5 lite": Chip(15.75 * 2**30, 1.97e14, 8.19e11, 0.9e11),
    "TPU v5": Chip(95.74 * 2**30, 4.59e14, 2.765e12, 1.8e11),
    "TPU v6 lite": Chip(31.25 * 2**30, 9.18e14, 1.64e12, 1.8e11),
}


def describe(topology: str) -> list[Any]:
    """Descriptions of the devices of a slice such as v5p:2x2x4. Raises ConfigError where there is none of that name, or
    its chip is not in the table."""
    try:
        found = topologies.get_topology_desc(topology_name=topology, platform="tpu").devices
    except Exception as error:  # plain ones of several kinds, from libtpu
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"--topology {topology}: cannot be described ({reason}); expected a name like v5e:2x4, v5p:2x2x4 or"
            " v6e:4x4, and libtpu (the extra `tpu`)"
        ) from error
    if found[0].device_kind not in CHIPS:
        raise ConfigError(f"--topology {topology}: {found[0].device_kind} is none of {', '.join(CHIPS)}")
    return list(found)


def device_bytes(tree: Any) -> int:
    """Bytes of a tree of shapes with shardings on one device. What two leaves share, as tied heads do, counts twice."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def bytes_needed(error: Exception, arguments: float) -> float | None:
    """The bytes of a device that a program would take, where it was refused for taking too many; None for another
    error. `arguments`: bytes of the program's arguments, which one of the two messages leaves out."""
    whole = re.search(r"Used ([\d.]+)([KMGT]) of", str(error))
    used = whole or re.search(r"memory required for HLO temporaries \(([\d.]+)([KMGT])\)", str(error))
    if used is None:
        return None
    return float(used[1]) * 2 ** (10 * (1 + "KMGT".index(used[2]))) + (0 if whole else arguments)


def flops(jaxpr: Any, without: Collection[str] = ()) -> float:
    """Multiply-adds times two of all dots of a traced program, on all devices, loops as often as they run; a loop
    without a length known beforehand counts once. `without`: primitives whose inside is left out."""
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name in without:
            continue
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)
            continue
        inner = [
            flops(getattr(p, "jaxpr", p), without)
            for p in jax.tree.leaves(list(params.values()), is_leaf=_is_jaxpr)
            if _is_jaxpr(p)
        ]
        if name == "cond":
            total += max(inner, default=0.0)
        else:
            total += sum(inner) * _times(name, params)
    return total


def _times(name: str, params: dict[str, Any]) -> int:
    """How often an equation's inner program runs: turns of a loop, blocks of a kernel (those that it skips for being
    masked too), or devices that each run it on their own part."""
    if name == "pallas_call":
        return math.prod(params["grid_mapping"].grid)
    if name == "shard_map":
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    return params["length"] if name == "scan" else 1


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns")
