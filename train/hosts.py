"""One run on several hosts: starting together, placing batches, gathering weights, stopping together.

With one process every function here is the plain operation.
"""

import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from dspark_jax import sharding
from dspark_jax.config import ConfigError, MeshSettings
from train.conversations import Share
from train.data import Shard
from train.objective import Batch

_PIECE = 1 << 22  # bytes of each process that are exchanged at a time


def several() -> bool:
    """Whether the environment says that this process is one of several."""
    environment = os.environ
    return (
        "JAX_COORDINATOR_ADDRESS" in environment
        or "," in environment.get("TPU_WORKER_HOSTNAMES", "")
        or int(environment.get("MEGASCALE_NUM_SLICES", "1")) > 1
        or int(environment.get("SLURM_NTASKS", "1")) > 1
    )


def start() -> None:
    """Joins the other processes of this run when there are `several`; call it before any other use of JAX.

    JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and JAX_PROCESS_ID names them outright; the workers of a TPU slice
    and the tasks of a SLURM job are found by JAX itself. Raises ConfigError where a part of this is missing.
    """
    environment = os.environ
    if "JAX_COORDINATOR_ADDRESS" in environment:
        try:
            count, index = int(environment["JAX_NUM_PROCESSES"]), int(environment["JAX_PROCESS_ID"])
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"JAX_COORDINATOR_ADDRESS is set: JAX_NUM_PROCESSES and JAX_PROCESS_ID must be numbers too ({error})"
            ) from error
        jax.distributed.initialize(environment["JAX_COORDINATOR_ADDRESS"], count, index)
    elif several():
        jax.distributed.initialize()


def is_first() -> bool:
    """Whether this process is the one that writes and speaks."""
    return jax.process_index() == 0


def shard(mesh: Mesh) -> Shard:
    """This host's rows of every batch. Raises ConfigError where the devices of a row lie on several hosts."""
    count = jax.process_count()
    if count == 1:
        return Shard()
    for row in mesh.devices.reshape(-1, mesh.shape["tensor"]):
        if len({device.process_index for device in row}) > 1:
            raise ConfigError(f"mesh tensor = {mesh.shape['tensor']} reaches over hosts: use fsdp between them")
    return Shard(jax.process_index(), count)


def tokenising() -> Share:
    """This host's share of the conversations while they are tokenised."""
    if jax.process_count() == 1:
        return Share()
    return Share(jax.process_index(), jax.process_count(), exchange)


def place_batch(mesh: Mesh, batch: Batch, parts: int) -> Batch:
    """This host's rows of a batch onto its devices; with several `parts` (accumulation) as [parts, B, ...]."""
    leading = int(parts > 1)
    rows = sharding.row_sharding(mesh, leading)

    def one(x: np.ndarray) -> jax.Array:
        x = x.reshape(parts, -1, *x.shape[1:]) if leading else x
        if jax.process_count() == 1:
            return jax.device_put(x, rows)
        return jax.make_array_from_process_local_data(rows, x)

    return jax.tree.map(one, batch)


def to_host(tree: Any) -> Any:
    """Whole arrays in the memory of every host."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), tree)


def of_first(tree: Any) -> Any:
    """The first host's arrays on all hosts, where each has computed its own."""
    return tree if jax.process_count() == 1 else multihost_utils.broadcast_one_to_all(tree)


def exchange(own: bytes) -> list[bytes]:
    """The bytes of every process, in order, in the memory of all; a piece of each at a time over the devices."""
    if jax.process_count() == 1:
        return [own]
    sizes = multihost_utils.process_allgather(np.asarray(divmod(len(own), _PIECE), np.int32))
    rounds = int(sizes[:, 0].max()) + 1
    padded = np.zeros(rounds * _PIECE, np.uint8)
    padded[: len(own)] = np.frombuffer(own, np.uint8)
    pieces = [multihost_utils.process_allgather(piece) for piece in np.split(padded, rounds)]
    return [
        b"".join(piece[index].tobytes() for piece in pieces)[: int(whole) * _PIECE + int(rest)]
        for index, (whole, rest) in enumerate(sizes)
    ]


def local_copy(tree: Any) -> Any:
    """The arrays on this host's devices alone, for what every host computes by itself. One process: as they are."""
    if jax.process_count() == 1:
        return tree
    mesh = sharding.make_mesh(MeshSettings(fsdp=jax.local_device_count()), jax.local_devices())
    return jax.device_put(to_host(tree), sharding.shardings(tree, mesh))


def agreed(asked: Callable[[], bool], step: int) -> bool:
    """Whether to stop after this step: the signal of this process or, with several, the step that all agreed on."""
    if jax.process_count() == 1:
        return asked()
    return multihost_utils.reached_preemption_sync_point(step)
