"""Batches on their way to the devices: the next ones are placed while the step before them runs."""

import collections
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from dspark_jax.config import DataSettings, TrainSettings
from train import data, hosts
from train.evaluate import to_batch
from train.features import CachedFeatures
from train.objective import Batch

_AHEAD = 2


class Fed(NamedTuple):
    """A placed batch, and how many of its tokens and of all its places are real (on this host)."""

    batch: Batch
    tokens: int
    places: int


class Feed:
    """Endless batches, from number `place` on. `place` is always the number of the batch that `next` returns."""

    def __init__(
        self,
        made: Sequence[data.Group],
        settings: DataSettings,
        train: TrainSettings,
        mesh: Mesh,
        seed: int,
        place: int,
        features: CachedFeatures | None,
    ) -> None:
        self.place = place
        self._mesh, self._parts = mesh, train.accumulation_steps
        self._source: Iterator[data.Element] = data.batches(
            made, train.batch_size, seed, features, place, hosts.shard(mesh), settings.workers
        )
        self._ready: collections.deque[Fed] = collections.deque()

    def __next__(self) -> Fed:
        while len(self._ready) <= _AHEAD:
            self._ready.append(self._placed(next(self._source)))
        self.place += 1
        return self._ready.popleft()

    def _placed(self, element: data.Element) -> Fed:
        batch = hosts.place_batch(self._mesh, to_batch(element), self._parts)
        return Fed(batch, int(np.sum(element["used"])), int(element["tokens"].size))
