"""Records to batches: split, packed rows, row lengths, anchors, draft vocabulary, and batches found by number (grain).

A batch is a function of its number: the same for any number of hosts, workers and devices. The place of a run in its
data is therefore one number, and a resumed run neither repeats nor skips a record.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grain
import jax
import numpy as np
from absl import flags

from dspark_jax.config import ConfigError, DataSettings
from dspark_jax.generate import bucket
from train.conversations import Record
from train.features import CachedFeatures

Element = dict[str, Any]
Row = tuple[Record, ...]  # the conversations of one row of a batch, one behind the other


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One shape of a batch's rows: sequence length and anchors. The step is compiled once for each."""

    length: int
    anchors: int


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Rows of one source that share a shape, and how often a batch is made of them, relative to other groups."""

    rows: list[Row]
    size: Sizes
    weight: float


@dataclasses.dataclass(frozen=True)
class Shard:
    """The rows of every batch that this host feeds to its devices: `index`, `index` + `count`, ..."""

    index: int = 0
    count: int = 1


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


def pack(records: Sequence[Record], length: int) -> list[Row]:
    """Rows of at most `length` tokens that hold every record once: longest first, each into the fullest row with room
    for it (best fit). Deterministic, and the same in every epoch: conversations of a row never meet."""
    rows: list[list[Record]] = []
    by_room: list[list[int]] = [[] for _ in range(length + 1)]
    there = 0  # bit r is set where some row has r tokens of room left
    for record in sorted(records, key=lambda record: (-len(record.tokens), record.number)):
        size = len(record.tokens)
        fitting = there >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                there &= ~(1 << room)
            rows[row].append(record)
        else:
            room, row = length, len(rows)
            rows.append([record])
        by_room[room - size].append(row)
        there |= 1 << (room - size)
    return [tuple(row) for row in rows]


def sizes(records: Sequence[Record], settings: DataSettings) -> list[Sizes]:
    """The shapes of a run, ascending: of `settings.buckets`, else one that holds the longest record (or a full pack).

    Without packing no shape has more anchors than some row of it can use.
    """
    if settings.packing:
        return [Sizes(settings.max_length, settings.num_anchors)]
    longest = max(len(record.tokens) for record in records)
    lengths = settings.buckets or (min(bucket(longest, 32), settings.max_length),)
    found: dict[int, int] = {}
    for record in records:
        length = next(length for length in lengths if length >= len(record.tokens))
        found[length] = max(found.get(length, 1), len(record.anchors))
    return [Sizes(length, min(settings.num_anchors, most)) for length, most in sorted(found.items())]


def groups(records: Sequence[Record], settings: DataSettings, shapes: Sequence[Sizes]) -> list[Group]:
    """Rows of the records by source and shape. Without `settings.weights` every row comes equally often.

    Raises ConfigError for a weighted source that has no record here: its share would go to the others.
    """
    made: list[Group] = []
    sources = sorted({record.source for record in records})
    for source, path in enumerate(settings.paths if settings.weights else ()):
        if source not in sources:
            raise ConfigError(
                f"{path}: has a weight of data weights, but all of its conversations are held out; add some, or change"
                " data validation_fraction"
            )
    for source in sources:
        own = [record for record in records if record.source == source]
        rows = pack(own, shapes[-1].length) if settings.packing else [(record,) for record in own]
        by_shape: dict[Sizes, list[Row]] = {}
        for row in rows:
            by_shape.setdefault(_shape_of(row, shapes), []).append(row)
        share = settings.weights[source] / len(rows) if settings.weights else 1.0
        made += [Group(part, shape, share * len(part)) for shape, part in by_shape.items()]
    if settings.weights or len(made) == 1:
        return made
    merged = {shape: [row for group in made if group.size == shape for row in group.rows] for shape in shapes}
    return [Group(rows, shape, float(len(rows))) for shape, rows in merged.items() if rows]


def _shape_of(row: Row, shapes: Sequence[Sizes]) -> Sizes:
    length = sum(len(record.tokens) for record in row)
    return next(shape for shape in shapes if shape.length >= length)


def padding(made: Sequence[Group]) -> tuple[float, float]:
    """Shares of an epoch that are filler: of its tokens, and of its anchors."""
    tokens = sum(len(record.tokens) for group in made for row in group.rows for record in row)
    anchors = sum(
        min(sum(len(record.anchors) for record in row), group.size.anchors) for group in made for row in group.rows
    )
    room = sum(len(group.rows) * group.size.length for group in made)
    slots = sum(len(group.rows) * group.size.anchors for group in made)
    return 1 - tokens / room, 1 - anchors / slots


def draft_vocabulary(
    records: Sequence[Record], size: int, vocab_size: int, always: Iterable[int], known: np.ndarray | None = None
) -> np.ndarray:
    """The `size` most frequent ids of the supervised tokens, ascending, with `always` among them.

    An id of `known`, the vocabulary of an earlier run, counts two more: it was frequent in answers that are not here.
    """
    forced = np.unique(np.fromiter(always, np.int64))
    if not len(forced) <= size <= vocab_size:
        raise ConfigError(
            f"draft draft_vocab_size = {size}: expected at least the {len(forced)} special ids and at most {vocab_size}"
        )
    counts = np.zeros(vocab_size, np.int64)
    for record in records:
        counts += np.bincount(record.tokens[record.supervised], minlength=vocab_size)
    if known is not None:
        counts[known] += 2
    counts[forced] = counts.max() + 1
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def coverage(records: Sequence[Record], vocabulary: np.ndarray) -> float:
    """Share of the supervised tokens that a draft vocabulary holds."""
    supervised = np.concatenate([record.tokens[record.supervised] for record in records])
    return float(np.isin(supervised, vocabulary).mean())


def element(row: Row, size: Sizes, rng: np.random.Generator, features: CachedFeatures | None = None) -> Element:
    """A padded row with fresh anchors: uniform without replacement, ascending; `keep` marks the real ones.

    `start` is where a token's conversation begins; the filler behind the last one is a conversation of its own. With a
    cache the target features of the row come along, as "features".
    """
    tokens, supervised = np.zeros(size.length, np.int32), np.zeros(size.length, bool)
    start, valid, end = np.zeros(size.length, np.int32), [], 0
    for record in row:
        begin, end = end, end + len(record.tokens)
        tokens[begin:end], supervised[begin:end], start[begin:end] = record.tokens, record.supervised, begin
        valid.append(record.anchors + begin)
    start[end:] = end
    possible = np.concatenate(valid)
    count = min(len(possible), size.anchors)
    anchors = np.zeros(size.anchors, np.int32)
    anchors[:count] = np.sort(rng.choice(possible, count, replace=False))
    made = {
        "tokens": tokens, "supervised": supervised, "start": start, "anchors": anchors,
        "keep": np.arange(size.anchors) < count, "used": np.int32(end),
    }  # fmt: skip
    return made if features is None else made | {"features": features.read(row, size.length)}


@dataclasses.dataclass(frozen=True)
class _MakeElement:
    """`element` as something that worker processes can be given."""

    size: Sizes
    features: CachedFeatures | None

    def __call__(self, row: Row, rng: np.random.Generator) -> Element:
        return element(row, self.size, rng, self.features)


def batches(
    made: Sequence[Group],
    batch_size: int,
    seed: int,
    features: CachedFeatures | None = None,
    first: int = 0,
    shard: Shard = Shard(),
    workers: int = 0,
) -> Iterator[Element]:
    """Endless batches from number `first` on: every epoch in a new order with new anchors, all determined by `seed`.

    Each holds this host's rows of one group; groups take turns by their weights.
    """
    parts = []
    for group in made:
        rows = grain.MapDataset.source(group.rows).seed(seed).shuffle().repeat()
        rows = rows.random_map(_MakeElement(group.size, features))[shard.index :: shard.count]
        parts.append(rows.batch(batch_size // shard.count, drop_remainder=True))
    weights = [group.weight for group in made]
    dataset = parts[0] if len(parts) == 1 else grain.MapDataset.mix(parts, weights)
    stream = dataset[first:].to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))
    if workers:
        if not flags.FLAGS.is_parsed():  # grain's workers read absl's flags, and nothing here parses a command line so
            flags.FLAGS.mark_as_parsed()
        stream = stream.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2))
    return iter(stream)


def held_out_batches(
    rows: Sequence[Row],
    size: Sizes,
    batch_size: int,
    seed: int,
    features: CachedFeatures | None = None,
    shard: Shard = Shard(),
) -> Iterator[Element]:
    """The rows once, always with the same anchors; fillers of the last batch supervise nothing."""
    elements = [element(row, size, np.random.default_rng([seed, row[0].number]), features) for row in rows]
    filler = jax.tree.map(np.zeros_like, elements[0])
    elements += [filler] * (-len(elements) % batch_size)
    for start in range(0, len(elements), batch_size):
        part = elements[start + shard.index : start + batch_size : shard.count]
        yield jax.tree.map(lambda *leaves: np.stack(leaves), *part)


def fingerprint(made: Sequence[Group], **settings: Any) -> str:
    """Names what a place in the data refers to: the rows in order, and how batches are made of them."""
    digest = hashlib.sha256(repr(sorted(settings.items())).encode())
    for group in made:
        digest.update(f"{group.size} {group.weight} {len(group.rows)}".encode())
        for row in group.rows:
            digest.update(len(row).to_bytes(4, "big"))
            for record in row:
                digest.update(record.tokens.tobytes())
                digest.update(record.supervised.tobytes())
    return digest.hexdigest()[:16]
