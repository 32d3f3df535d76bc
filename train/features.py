"""Cached target features: worth it where the target's forward pass costs more than the drafter's step.

    python -m train.features --config configs/X.py --out DIR [--yes] [--GROUP.FIELD VALUE ...]
    python -m train.main --config configs/X.py --workdir RUN --data.features DIR

The cache is a folder of ArrayRecord shards and a manifest that says which target, layers, dtype and template made
them. Each entry holds one conversation, found again by a hash of its tokens and checked by one of its bytes when it is
read. What is still to be made is estimated first; a run that is killed goes on after its last whole shard.
"""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import contextlib
import dataclasses
import functools
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]
from jax.sharding import Mesh
from rich.progress import track

from dspark_jax import sharding
from dspark_jax.config import ConfigError, DrafterConfig
from dspark_jax.generate import bucket
from dspark_jax.target import Target
from dspark_jax.weights.fingerprint import weights_hash
from train import options
from train.conversations import Record
from train.objective import StepModels, TargetFeatures, target_features

_SHARD_RECORDS = 256
_BATCH = 8  # rows, or as many as the devices that rows are split over
Dtype = Literal["bfloat16", "float32"]


def record_key(record: Record) -> str:
    return hashlib.sha256(record.tokens.tobytes()).hexdigest()[:24]


def identity(target: Target, drafter: DrafterConfig) -> dict[str, Any]:
    """What the features of given tokens depend on: the target's shape, weights and compute dtype, the layers, and the
    template that made the tokens. Weights count by samples: a change of single numbers between those goes unseen."""
    return {
        "target": target.config.name,
        "shape": hashlib.sha256(repr(target.config).encode()).hexdigest()[:16],
        "weights": weights_hash(target.params),
        "target_dtype": str(target.dtype),
        "layers": list(drafter.target_layer_ids),
        "log_partition": bool(drafter.draft_vocab_size),
        "template": target.tokenizer.template_hash,
    }


@dataclasses.dataclass(frozen=True)
class Estimate:
    tokens: int
    bytes: int
    free: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.bytes / 1e9:.2f} GB; {self.free / 1e9:.2f} GB are free"


def estimate(records: Sequence[Record], target: Target, drafter: DrafterConfig, dtype: Dtype, out: Path) -> Estimate:
    """Bytes that the features of these records will take, before anything is computed."""
    tokens = sum(len(record.tokens) for record in records)
    width = (len(drafter.target_layer_ids) + 1) * target.config.d_model
    size = tokens * (width * (2 if dtype == "bfloat16" else 4) + 4)
    existing = next(parent for parent in [out, *out.absolute().parents] if parent.exists())
    return Estimate(tokens, size, shutil.disk_usage(existing).free)


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / "manifest.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{directory}: holds no feature cache (manifest.json is missing)") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON ({error}); make the cache anew") from error


def _write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    scratch = directory / "manifest.json.part"
    scratch.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    scratch.replace(directory / "manifest.json")


def _digest(entry: bytes) -> str:
    return hashlib.sha256(entry).hexdigest()[:16]


def _check_identity(manifest: dict[str, Any], wanted: dict[str, Any], directory: Path) -> None:
    for name, value in wanted.items():
        if manifest.get(name) != value:
            raise ConfigError(
                f"{directory}: this cache was made with {name} = {manifest.get(name)!r}, the run needs {value!r}:"
                " make another cache with train.features"
            )


@functools.partial(jax.jit, static_argnames=("models",))
def _compute(models: StepModels, params: Any, tokens_BS: jax.Array) -> TargetFeatures:
    start_BS = jax.numpy.zeros_like(tokens_BS)
    return target_features(models.target, models.drafter, params, tokens_BS, start_BS, models.scan_layers)


def open_manifest(target: Target, drafter: DrafterConfig, dtype: Dtype, out: Path) -> dict[str, Any]:
    """What the cache in `out` holds so far. Raises ConfigError for a cache of another identity or dtype."""
    wanted = identity(target, drafter) | {"dtype": dtype}
    if not (out / "manifest.json").exists():
        return wanted | {"records": 0, "tokens": 0, "max_length": 0, "shards": []}
    manifest = _read_manifest(out)
    _check_identity(manifest, wanted, out)
    return manifest


def missing(records: Sequence[Record], manifest: dict[str, Any]) -> list[Record]:
    """The records that a cache lacks, each once, the shortest first: batches of like length, little padding."""
    known = {key for shard in manifest["shards"] for key in shard["keys"]}
    todo = {record_key(record): record for record in records if record_key(record) not in known}
    return sorted(todo.values(), key=lambda record: len(record.tokens))


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{path}: cannot write it ({error}); free some space and run again") from error


def write_features(
    todo: Sequence[Record], models: StepModels, mesh: Mesh, params: Any, manifest: dict[str, Any], out: Path
) -> None:
    """Computes the features of records and adds them to the cache in `out`, of which `manifest` says what it holds.

    Raises ConfigError where something cannot be written.
    """
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
    shards = [todo[start : start + _SHARD_RECORDS] for start in range(0, len(todo), _SHARD_RECORDS)]
    for shard in track(shards, description="features", disable=not shards):
        path = out / f"shard-{len(manifest['shards']):05d}.array_record"
        scratch, digests = path.with_suffix(".part"), []
        with _writing(scratch):
            writer = array_record_module.ArrayRecordWriter(str(scratch), "group_size:1")
        for start in range(0, len(shard), _BATCH):
            for entry in _entries(shard[start : start + _BATCH], models, mesh, params, manifest["dtype"]):
                with _writing(scratch):
                    writer.write(entry)
                digests.append(_digest(entry))
        lengths = [len(record.tokens) for record in shard]
        keys = [record_key(record) for record in shard]
        with _writing(path):
            writer.close()
            scratch.replace(path)
            manifest["records"] += len(shard)
            manifest["tokens"] += sum(lengths)
            manifest["max_length"] = max(manifest["max_length"], *lengths)
            manifest["shards"].append(
                {"file": path.name, "bytes": path.stat().st_size, "keys": keys, "digests": digests}
            )
            _write_manifest(out, manifest)


def _entries(records: Sequence[Record], models: StepModels, mesh: Mesh, params: Any, dtype: Dtype) -> list[bytes]:
    longest = max(len(record.tokens) for record in records)
    rows = sharding.row_sharding(mesh)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    tokens_BS = np.zeros((-(-_BATCH // shards) * shards, bucket(longest, 32)), np.int32)
    for row, record in enumerate(records):
        tokens_BS[row, : len(record.tokens)] = record.tokens
    with jax.set_mesh(mesh):
        features = jax.device_get(_compute(models, params, jax.device_put(tokens_BS, rows)))
    number = jax.numpy.dtype(dtype)
    return [
        safetensors.numpy.save(
            {
                "taps": np.ascontiguousarray(features.taps_BSMD[row, : len(record.tokens)].astype(number)),
                "hidden": np.ascontiguousarray(features.hidden_BSD[row, : len(record.tokens)].astype(number)),
                "log_partition": np.ascontiguousarray(features.log_partition_BS[row, : len(record.tokens)]),
            }
        )
        for row, record in enumerate(records)
    ]


class CachedFeatures:
    """An opened cache: features of a record by its tokens."""

    def __init__(self, directory: Path, target: Target, drafter: DrafterConfig) -> None:
        """Raises ConfigError for a cache of another target or template or without a layer that the drafter taps, and
        for a shard that is not whole. Layers that the drafter does not tap are left out."""
        manifest, wanted = _read_manifest(directory), identity(target, drafter)
        there: list[int] = manifest.get("layers", [])
        enough = {"layers": wanted["layers"]} if set(wanted["layers"]) <= set(there) else {}
        _check_identity(manifest | enough, wanted, directory)
        self._taps = [there.index(layer) for layer in wanted["layers"]]
        self.directory = directory
        self._place: dict[str, tuple[int, int, str]] = {}
        self._shards: list[Path] = []
        self._readers: dict[int, Any] = {}
        for number, shard in enumerate(manifest["shards"]):
            path = directory / shard["file"]
            if not path.is_file() or path.stat().st_size != shard["bytes"]:
                raise ConfigError(f"{path}: missing or damaged (its size is not the manifest's); make the cache anew")
            self._shards.append(path)
            entries = zip(shard["keys"], shard["digests"], strict=True)
            self._place |= {key: (number, index, digest) for index, (key, digest) in enumerate(entries)}

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes, which open the shards themselves."""
        return self.__dict__ | {"_readers": {}}

    def _reader(self, number: int) -> Any:
        if number not in self._readers:
            self._readers[number] = array_record_module.ArrayRecordReader(str(self._shards[number]))
        return self._readers[number]

    def require(self, records: Sequence[Record]) -> None:
        """Raises ConfigError unless every record is there."""
        missing = sum(record_key(record) not in self._place for record in records)
        if missing:
            raise ConfigError(
                f"{self.directory}: lacks {missing} of {len(records)} conversations; run train.features again with"
                " the same config and folder"
            )

    def read(self, row: Sequence[Record], length: int) -> TargetFeatures:
        """Features of a row of records, padded with zeros to `length`: [S, M, D], [S, D], [S].

        Raises ConfigError for an entry that is not what was written, or not readable.
        """
        parts = [self._entry(record) for record in row]

        def join(name: str) -> np.ndarray:
            x = np.concatenate([part[name] for part in parts])
            return np.pad(x, [(0, length - len(x))] + [(0, 0)] * (x.ndim - 1))

        return TargetFeatures(join("taps"), join("hidden"), join("log_partition"))  # type: ignore[arg-type]

    def _entry(self, record: Record) -> dict[str, np.ndarray]:
        number, index, digest = self._place[record_key(record)]
        where = f"{self._shards[number]}: entry {index}"
        try:
            entry = self._reader(number).read([index])[0]
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{where} cannot be read ({reason}); make the cache anew") from error
        if _digest(entry) != digest:
            raise ConfigError(f"{where} is not what was written (its checksum differs); make the cache anew")
        # Read by hand: the numpy loader of safetensors knows no bfloat16.
        arrays = {name: _array(part) for name, part in safetensors.deserialize(entry)}
        return arrays | {"taps": arrays["taps"][:, self._taps]}


def _array(part: dict[str, Any]) -> np.ndarray:
    dtype = ml_dtypes.bfloat16 if part["dtype"] == "BF16" else np.float32
    return np.frombuffer(part["data"], dtype).reshape(part["shape"])


@dataclasses.dataclass(frozen=True)
class Command:
    """Caches target features of a run's conversations. With --config given, --help lists every setting of it too."""

    config: Path
    """Python file with get_config() -> Config."""
    out: Path
    """Folder of the cache."""
    dtype: Dtype = "bfloat16"
    """Of what is stored. float32 gives the loss of a run without a cache within 1e-5, bfloat16 takes half the space and
    stays within 0.02, absolute and relative (both tested)."""
    yes: bool = False
    """Go on even where the estimate exceeds the free space."""


def main(arguments: Sequence[str] | None = None) -> int:
    from train import hosts, setup

    try:
        if hosts.several():
            raise ConfigError("train.features runs as one process; unset the variables that make it one of several")
        command, config = options.parse(Command, arguments, "train.features")
        if command.out.is_file():
            raise ConfigError(f"--out {command.out}: is a file; name a folder")
        run = setup.build(dataclasses.replace(config, data=dataclasses.replace(config.data, features="")), None)
        records = run.conversations.records
        manifest = open_manifest(run.target, run.drafter, command.dtype, command.out)
        todo = missing(records, manifest)
        size = estimate(todo, run.target, run.drafter, command.dtype, command.out)
        print(f"{len(todo)} of {len(records)} conversations are to be made: {size}")
        if size.bytes > size.free and not command.yes:
            raise ConfigError(f"--out {command.out}: the cache would not fit; free some space, or insist with --yes")
        write_features(todo, run.models, run.mesh, run.target.params, manifest, command.out)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(todo)} made, {len(records) - len(todo)} were there already")
    return 0


if __name__ == "__main__":
    sys.exit(main())
