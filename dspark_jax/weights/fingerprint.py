"""Names a model's weights by samples of them, to tell whether two runs or files speak of the same target."""

import hashlib
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dspark_jax.sharding import mesh_of

_SAMPLES = 64  # of each array


def weights_hash(params: Any) -> str:
    """16 hexadecimal characters: the same on any mesh, on every host and in either dtype. A change of single numbers
    between the samples goes unseen."""
    mesh = mesh_of(params)
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    digest = hashlib.sha256()
    for sample in jax.tree.leaves(jax.jit(_samples, out_shardings=everywhere)(params)):
        digest.update(np.asarray(sample).tobytes())
    return digest.hexdigest()[:16]


def _samples(params: Any) -> Any:
    """A few numbers of every array, evenly spaced; in bfloat16, so that it does not matter what they are held in."""

    def one(x: jax.Array) -> jax.Array:
        place = np.linspace(0, x.size - 1, _SAMPLES).astype(np.int64)
        return x[np.unravel_index(place, x.shape)].astype(jax.numpy.bfloat16)

    return jax.tree.map(one, params)
