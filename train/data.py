"""Records to batches of one shape: split, sizes, anchors, draft vocabulary and a resumable iterator (grain)."""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np

from dspark_jax.config import ConfigError, DataSettings
from dspark_jax.generate import bucket
from train.conversations import Record
from train.features import CachedFeatures

Element = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The one shape of a run, so that the step is compiled once: sequence length and anchors a conversation."""

    length: int
    anchors: int


def split(records: Sequence[Record], validation_fraction: float) -> tuple[list[Record], list[Record]]:
    """Training and held-out records. A record's side depends on its prompt only, so more data moves none across."""
    train = [record for record in records if record.split_key >= validation_fraction]
    held_out = [record for record in records if record.split_key < validation_fraction]
    for name, side in (("training", train), ("held-out evaluation", held_out)):
        if not side:
            raise ConfigError(
                f"data validation_fraction = {validation_fraction} leaves none of {len(records)} conversations for"
                f" {name}: change it, or add conversations"
            )
    return train, held_out


def sizes(records: Sequence[Record], settings: DataSettings) -> Sizes:
    """The smallest bucket that holds the longest record, and no more anchors than some record can use."""
    longest = max(len(record.tokens) for record in records)
    most = max(len(record.anchors) for record in records)
    return Sizes(min(bucket(longest, 32), settings.max_length), min(settings.num_anchors, most))


def padding(records: Sequence[Record], size: Sizes) -> tuple[float, float]:
    """Shares of a batch that are filler: of its tokens, and of its anchors."""
    tokens = sum(len(record.tokens) for record in records)
    anchors = sum(min(len(record.anchors), size.anchors) for record in records)
    return 1 - tokens / (len(records) * size.length), 1 - anchors / (len(records) * size.anchors)


def _counts(records: Sequence[Record], vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, np.int64)
    for record in records:
        counts += np.bincount(record.tokens[record.supervised], minlength=vocab_size)
    return counts


def draft_vocabulary(records: Sequence[Record], size: int, vocab_size: int, always: Iterable[int]) -> np.ndarray:
    """The `size` most frequent ids of the supervised tokens, ascending, with `always` among them."""
    forced = np.unique(np.fromiter(always, np.int64))
    if not len(forced) <= size <= vocab_size:
        raise ConfigError(
            f"draft draft_vocab_size = {size}: expected at least the {len(forced)} special ids and at most {vocab_size}"
        )
    counts = _counts(records, vocab_size)
    counts[forced] = counts.max() + 1
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def coverage(records: Sequence[Record], vocabulary: np.ndarray) -> float:
    """Share of the supervised tokens that a draft vocabulary holds."""
    supervised = np.concatenate([record.tokens[record.supervised] for record in records])
    return float(np.isin(supervised, vocabulary).mean())


def element(record: Record, size: Sizes, rng: np.random.Generator, features: CachedFeatures | None = None) -> Element:
    """A padded record with fresh anchors: uniform without replacement, ascending; `keep` marks the real ones.

    With a cache its target features come along, as "features".
    """
    tokens, supervised = np.zeros(size.length, np.int32), np.zeros(size.length, bool)
    tokens[: len(record.tokens)] = record.tokens
    supervised[: len(record.supervised)] = record.supervised
    valid = record.anchors
    count = min(len(valid), size.anchors)
    anchors = np.zeros(size.anchors, np.int32)
    anchors[:count] = np.sort(rng.choice(valid, count, replace=False))
    row = {"tokens": tokens, "supervised": supervised, "anchors": anchors, "keep": np.arange(size.anchors) < count}
    return row if features is None else row | {"features": features.read(record, size.length)}


def batches(
    records: Sequence[Record], size: Sizes, batch_size: int, seed: int, features: CachedFeatures | None = None
) -> grain.DatasetIterator:
    """Endless batches, every epoch in a new order with new anchors, all determined by `seed`.

    `get_state` and `set_state` of the iterator restore its place exactly.
    """
    dataset = grain.MapDataset.source(records).seed(seed).shuffle().repeat()
    dataset = dataset.random_map(lambda record, rng: element(record, size, rng, features))
    dataset = dataset.batch(batch_size, drop_remainder=True)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)))


def held_out_batches(
    records: Sequence[Record], size: Sizes, batch_size: int, seed: int, features: CachedFeatures | None = None
) -> Iterator[Element]:
    """The records once, always with the same anchors; rows that fill up the last batch supervise nothing."""
    rows = [element(record, size, np.random.default_rng([seed, record.number]), features) for record in records]
    filler = jax.tree.map(np.zeros_like, rows[0])
    rows += [filler] * (-len(rows) % batch_size)
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        yield jax.tree.map(lambda *leaves: np.stack(leaves), *part)


def fingerprint(records: Sequence[Record], **settings: Any) -> str:
    """Names what an iterator's place refers to: the training records in order, and how batches are made of them."""
    digest = hashlib.sha256(repr(sorted(settings.items())).encode())
    for record in records:
        digest.update(record.tokens.tobytes())
        digest.update(record.supervised.tobytes())
    return digest.hexdigest()[:16]
