"""Drafter checkpoints of every format: recognised by config.json, read and written by their format's table."""

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from dspark_jax.config import ConfigError, DrafterConfig, TargetConfig
from dspark_jax.weights import (
    deepspec,
    deepspec_eagle3,
    deepspec_gemma,
    hub,
    language_model,
    mtp,
    specforge,
    specforge_eagle3,
    speculators,
    speculators_eagle3,
    zlab,
)
from dspark_jax.weights.config_keys import Keys
from dspark_jax.weights.drafter_format import (
    EMBEDDING,
    HEAD,
    NOTES,
    Description,
    Entry,
    Format,
    leaf_shapes,
    name_table,
    their_shape,
)
from dspark_jax.weights.safetensor_files import TensorFiles, read_json
from dspark_jax.weights.tokenizer import ChatTokenizer

_MODULES = (
    deepspec, deepspec_eagle3, zlab, specforge, specforge_eagle3, speculators, speculators_eagle3, mtp, language_model,
)  # fmt: skip
FORMATS = {(form.name, form.algorithm): form for form in (*(one.FORMAT for one in _MODULES), zlab.FORMAT_2)}
_BY_ARCHITECTURE = {
    deepspec.ARCHITECTURE: deepspec.FORMAT,
    deepspec_eagle3.ARCHITECTURE: deepspec_eagle3.FORMAT,
    deepspec_gemma.ARCHITECTURE: deepspec_gemma.FORMAT,
    zlab.ARCHITECTURE: zlab.FORMAT,
    zlab.ARCHITECTURE_2: zlab.FORMAT_2,
    specforge.ARCHITECTURE: specforge.FORMAT,
    specforge_eagle3.ARCHITECTURE: specforge_eagle3.FORMAT,
    mtp.ARCHITECTURE: mtp.FORMAT,
}
# Known by name, read by no table here.
_NOT_READ = {
    "dflash2": "DFlash 2 as speculators stores it",
}
# May a copy of a frozen matrix have been rounded to bfloat16 on the way? It may.
_ROUNDING: dict[str, float] = {"rtol": 2**-7, "atol": 1e-5}


@dataclasses.dataclass(frozen=True, eq=False)
class DrafterCheckpoint:
    """A drafter as it lies in its files. `params` keep their stored dtype; `draft_to_target` is the target id of every
    draft id (None: all of them); `copies` names its copies of the target's embedding and head, which may outweigh the
    drafter and stay in `files`; `notes` what the file says of how the drafter came about. A plain draft model has no
    such files, and may bring a `tokenizer`."""

    where: Path
    form: Format
    config: DrafterConfig
    params: dict[str, Any]
    draft_to_target: np.ndarray | None
    copies: tuple[str, ...]
    notes: dict[str, Any]
    files: TensorFiles | None = None
    tokenizer: ChatTokenizer | None = None

    @property
    def summary(self) -> str:
        """One line: what it was taken for."""
        c = self.config
        if c.language_model:
            whole = f"{c.language_model.family}, {c.num_layers} layers of width {c.d_model}"
            return f"a language model ({whole}) as a plain draft model, {c.num_drafts} drafts a block"
        block = "DSpark" if c.markov_rank or c.confidence_head else "DFlash"
        kind = c.kind.title or block
        taps = ", ".join(map(str, c.target_layer_ids))
        return f"{self.form.title} format, {kind}, {c.layout}, {c.num_drafts} drafts a block, target layers {taps}"

    def copy(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """One of `copies`, or the part of it that `index` cuts out."""
        assert self.files is not None
        return self.files.weight(name, index)


def writable(algorithm: str) -> tuple[str, ...]:
    """The names of the formats that are written for drafters of a kind."""
    return tuple(name for (name, kind), form in FORMATS.items() if kind == algorithm and form.describe)


def recognise(raw: dict[str, Any], where: object) -> Format:
    """The format that a config.json is written in. Raises ConfigError for one that is not read here, by name."""
    kind, architectures = raw.get("speculators_model_type"), raw.get("architectures") or []
    for name in (kind, *architectures):
        if name in _NOT_READ:
            raise ConfigError(f"{where}: {name!r} is {_NOT_READ[name]}, a kind of drafter that is not read here")
    if kind in speculators.KINDS:
        return speculators.FORMAT
    if kind == speculators_eagle3.KIND:
        return speculators_eagle3.FORMAT
    if kind is None and len(architectures) == 1 and architectures[0] in _BY_ARCHITECTURE:
        return _BY_ARCHITECTURE[architectures[0]]
    found = f"speculators_model_type = {kind!r}" if kind is not None else f"architectures = {architectures}"
    kinds = " or ".join((*speculators.KINDS, speculators_eagle3.KIND))
    known = f"{', '.join(_BY_ARCHITECTURE)}, or speculators_model_type {kinds}"
    raise ConfigError(f"{where}: {found} is no drafter known here; known: {known}")


def open_drafter(
    path: str | Path, target: TargetConfig | None = None, block_size: int = 0, dtype: str = "float32"
) -> DrafterCheckpoint:
    """Reads a drafter checkpoint: a folder, or a Hub id (`org/name` or `org/name@revision`). A language model, in any
    form in which a target is read, is a plain draft model: it alone has no block size of its own, so `block_size` may
    say it (0: see `language_model`), and is read in `dtype`.

    With `target` it must fit that target. Raises ConfigError naming the file, key or tensor that is missing, unknown,
    misshapen or made for another target, its value and what was expected.
    """
    directory = hub.fetch(path) if hub.is_hub_id(path) else Path(path)
    if language_model.is_language_model(directory):
        whole = language_model.read_language_model(directory, block_size, dtype)
        config, params, tokenizer, notes = whole
        if target is not None:
            language_model.check_tokens(directory, config, None, target, None)
        return DrafterCheckpoint(directory, language_model.FORMAT, config, params, None, (), notes, None, tokenizer)
    if block_size:
        raise ConfigError(f"{directory}: block_size = {block_size}: only a plain draft model leaves that open")
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such drafter directory")
    where = directory / "config.json"
    if not where.is_file():
        raise ConfigError(f"{directory}: config.json is missing, so this is no drafter checkpoint")
    raw = read_json(where)
    form = recognise(raw, where)
    assert form.normalise is not None
    config = form.normalise(Keys(raw, where), target)
    if target is not None:
        _check_target(config, target, where)
    files = TensorFiles(directory)
    table = name_table(form.table, config)
    draft_to_target = _read_vocabulary(config, files)
    params = _read_params(config, table, files)
    copies = tuple(name for name in (EMBEDDING, HEAD) if name in files.shapes and name not in table)
    for name in sorted(set(files.shapes) - set(table) - {"d2t", "t2d", EMBEDDING, HEAD}):
        raise ConfigError(f"{directory}: tensor {name!r} is not used by this drafter, so it is another one")
    notes = dict(raw.get(NOTES) or {})
    for key in ("num_target_layers", "frozen_head"):
        notes.pop(key, None)
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    if verifier.get("name_or_path") and "trained_on" not in notes:
        notes["trained_on"] = {"target": verifier["name_or_path"]}
    return DrafterCheckpoint(directory, form, config, params, draft_to_target, copies, notes, files)


def read_drafter(path: str | Path, target: Any) -> tuple[DrafterConfig, dict[str, Any], np.ndarray | None]:
    """The drafter at `path` for a loaded `target`: config, float32 parameters, target ids of the draft vocabulary."""
    checkpoint = open_drafter(path, target.config)
    check_fits(checkpoint, target)
    params = jax.tree.map(lambda leaf: leaf.astype(np.float32), checkpoint.params)
    return checkpoint.config, params, checkpoint.draft_to_target


def check_fits(checkpoint: DrafterCheckpoint, target: Any) -> None:
    """Raises ConfigError where what a checkpoint brings of its own is not this loaded target's: copies, tokens."""
    check_copies(checkpoint, target.params)
    if checkpoint.config.kind.whole_model:
        tokenizers = checkpoint.tokenizer, target.config, target.tokenizer
        language_model.check_tokens(checkpoint.where, checkpoint.config, *tokenizers)


def check_copies(checkpoint: DrafterCheckpoint, target_params: dict[str, Any]) -> None:
    """Raises ConfigError where a checkpoint's copy of the embedding or the head is not this target's."""
    own = {EMBEDDING: target_params["embed"], HEAD: target_params.get("head", target_params["embed"])}
    for name in checkpoint.copies:
        expected = np.asarray(own[name])
        if name == HEAD and checkpoint.draft_to_target is not None:
            expected = expected[checkpoint.draft_to_target]
        assert checkpoint.files is not None
        same = tuple(checkpoint.files.shapes[name]) == expected.shape
        # A slice at a time: whole copies of a large vocabulary in float32 would outweigh the drafter.
        for start in range(0, len(expected), 4096):
            if not same:
                break
            rows = slice(start, min(start + 4096, len(expected)))
            copy = checkpoint.copy(name, (rows,)).astype(np.float32)
            same = np.allclose(copy, expected[rows].astype(np.float32), **_ROUNDING)  # type: ignore[arg-type]
        if not same:
            raise ConfigError(
                f"{checkpoint.where}: {name!r} is not the target's, so this drafter was made for another target"
            )


def write_drafter(
    directory: str | Path,
    format_name: str,
    config: DrafterConfig,
    params: dict[str, Any],
    draft_to_target: np.ndarray | None,
    notes: dict[str, Any],
    dtype: str | None = "bfloat16",
    copies: dict[str, np.ndarray] | None = None,
) -> None:
    """Writes a drafter in the named format; `notes` record what it was trained on. `dtype` None stores each weight as
    it is. `copies` are the target's matrices to put beside it, by their name, as they are.

    Both files are written beside the directory first and then moved into it. Raises ConfigError for a format that is
    not written here, or that cannot hold this drafter, and where the disk does not take it.
    """
    check_writable(format_name, config)
    form, describe = _writer(format_name, config)
    number = None if dtype is None else np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    leaves = form.cut(config, params) if form.cut else _by_table(form, config, params)
    tensors = {name: leaf.astype(number or leaf.dtype, copy=False) for name, leaf in leaves.items()}
    stored = str(number or next(leaf for leaf in leaves.values() if leaf.ndim > 1).dtype)
    if draft_to_target is not None:
        ids = np.asarray(draft_to_target, np.int64)
        tensors["d2t"] = ids - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(config.vocab_size), ids)
    raw = describe(config, Description(stored, notes))
    tensors = {name: np.ascontiguousarray(tensor) for name, tensor in (tensors | (copies or {})).items()}
    directory = Path(directory)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
            save_file(tensors, Path(scratch) / "model.safetensors")
            (Path(scratch) / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
            directory.mkdir(exist_ok=True)
            for name in ("model.safetensors", "config.json"):
                (Path(scratch) / name).replace(directory / name)
    except (OSError, SafetensorError) as error:  # a full disk is the latter, which is no OSError
        raise ConfigError(
            f"{directory}: cannot write the drafter ({error}); free some space, or name a folder that can be written"
        ) from error


def _by_table(form: Format, config: DrafterConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a drafter by the names that the format's table gives them."""
    tensors = {}
    for name, entry in name_table(form.table, config).items():
        leaf = np.asarray(_leaf(params, entry.path))
        shape = their_shape(entry, leaf.shape)
        tensors[name] = (leaf if entry.index is None else leaf[entry.index]).reshape(shape)
    return tensors


def native_format(config: DrafterConfig) -> str:
    """The format in which a training run writes its drafter: DeepSpec's where it can say what the drafter is."""
    names, usual = writable(config.algorithm), [speculators.FORMAT.name]
    if config.layout == "anchor_first":
        usual = [deepspec.FORMAT.name, *usual]
    return next((name for name in usual if name in names), names[0])


def check_writable(format_name: str, config: DrafterConfig) -> None:
    """Raises ConfigError where `write_drafter` would, before there is anything to write."""
    _, describe = _writer(format_name, config)
    describe(config, Description("float32", {}))


def extensions(format_name: str, config: DrafterConfig) -> list[str]:
    """What of a drafter other readers of the named format do not know (see `Format`)."""
    extends = _writer(format_name, config)[0].extends
    return [name for name, there in extends(config).items() if there] if extends else []


def _writer(format_name: str, config: DrafterConfig) -> tuple[Format, Any]:
    """The format of this name that stores drafters of this kind, and its `describe`."""
    form = FORMATS.get((format_name, config.algorithm))
    if form is deepspec.FORMAT and config.family == "gemma4":
        form = deepspec_gemma.FORMAT
    if form is None or form.describe is None:
        raise ConfigError(
            f"format {format_name!r} cannot be written for {config.algorithm} drafters; choose one of"
            f" {', '.join(writable(config.algorithm))}"
        )
    return form, form.describe


def _check_target(config: DrafterConfig, target: TargetConfig, where: Path) -> None:
    """Refuses a drafter whose width, vocabulary or number of target layers are not this target's."""
    for ours, theirs, name in (
        (config.d_model, target.d_model, "hidden_size"),
        (config.vocab_size, target.vocab_size, "vocab_size"),
        (config.num_target_layers, target.num_layers, "num_target_layers"),
    ):
        if ours != theirs:
            raise ConfigError(f"{where}: {name} = {ours}, but the target {target.name!r} has {theirs}: another target")


def _read_params(config: DrafterConfig, table: dict[str, Entry], files: TensorFiles) -> dict[str, Any]:
    shapes = leaf_shapes(config)
    parts: dict[str, list[np.ndarray]] = {}
    for name, entry in table.items():
        expected = their_shape(entry, shapes[entry.path])
        if name not in files.shapes:
            raise ConfigError(f"{files.directory}: tensor {name!r} is missing (expected shape {list(expected)})")
        if tuple(files.shapes[name]) != expected:
            width = f", {len(config.target_layer_ids)} target layers times hidden_size {config.d_model}"
            raise ConfigError(
                f"{files.directory}: tensor {name!r} has shape {files.shapes[name]}, expected {list(expected)}"
                f"{width if name == 'fc.weight' else ''}"
            )
        parts.setdefault(entry.path, []).append(files.weight(name))
    tree: dict[str, Any] = {}
    for path, shape in shapes.items():
        *places, name = path.split("/")
        node = tree
        for place in places:
            node = node.setdefault(place, {})
        tensors = parts.pop(path)  # in the order of the table, which is the order on the leaf's first axis
        if len({tensor.dtype for tensor in tensors}) > 1:
            tensors = [tensor.astype(np.float32) for tensor in tensors]
        node[name] = (tensors[0] if len(tensors) == 1 else np.stack(tensors)).reshape(shape)
    return tree


def _read_vocabulary(config: DrafterConfig, files: TensorFiles) -> np.ndarray | None:
    """Target ids of the draft ids, from `d2t` (offsets) and checked against `t2d` (which ids there are)."""
    where, size = files.directory, config.draft_vocab_size
    d2t, t2d = (files.read(name) if name in files.shapes else None for name in ("d2t", "t2d"))
    if d2t is None:
        if size:
            raise ConfigError(f"{where}: tensor 'd2t' is missing (draft_vocab_size = {size})")
        return None
    ids = np.arange(len(d2t)) + d2t
    if not size and np.array_equal(ids, np.arange(config.vocab_size)):
        return None
    if not size:
        raise ConfigError(f"{where}: has 'd2t', but the config names no draft_vocab_size below the vocabulary's")
    if len(d2t) != size or ids.min() < 0 or ids.max() >= config.vocab_size:
        reach = f" pointing at ids {ids.min()}..{ids.max()}" if len(ids) else ""
        raise ConfigError(
            f"{where}: 'd2t' has {len(d2t)} entries{reach}: expected {size} entries within 0..{config.vocab_size - 1}"
        )
    unique, times = np.unique(ids, return_counts=True)
    if len(unique) < size:
        # The law of a draft would then count one of the two places only.
        raise ConfigError(f"{where}: 'd2t' points at id {unique[times > 1][0]} more than once: expected different ids")
    if t2d is not None and not np.array_equal(np.flatnonzero(t2d), ids):
        raise ConfigError(f"{where}: 'd2t' and 't2d' name different ids")
    return ids.astype(np.int32)


def _leaf(params: dict[str, Any], path: str) -> Any:
    for place in path.split("/"):
        params = params[place]
    return params
