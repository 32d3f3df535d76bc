"""The tensors of a checkpoint directory: one safetensors file or several with an index, read whole or in part.

Each read opens and closes its file, so the memory map and what it keeps resident never outlive one tensor.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from dspark_jax.config import ConfigError

FLOATS = ("F32", "F16", "BF16")
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class TensorFiles:
    """Names, shapes and storage types of all tensors in `directory`, known from the headers alone.

    Raises ConfigError where there are no files, one cannot be read, or the index and the files disagree.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shapes: dict[str, list[int]] = {}
        self._dtypes: dict[str, str] = {}
        self._files = _named_files(directory)
        for path in sorted(set(self._files.values())):
            with _open(path) as handle:
                for name in handle.keys():
                    if self._files.setdefault(name, path) != path:
                        raise ConfigError(f"{path}: tensor {name!r} is also in {self._files[name].name}")
                    part = handle.get_slice(name)
                    self.shapes[name], self._dtypes[name] = list(part.get_shape()), part.get_dtype()
        for name, path in self._files.items():
            if name not in self.shapes:
                raise ConfigError(f"{path}: tensor {name!r} is missing, though the index names it")

    def read(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """A tensor, or the part of it that `index` cuts out, as it is stored."""
        with _open(self._files[name]) as handle:
            return np.asarray(handle.get_slice(name)[index] if index else handle.get_tensor(name))

    def weight(self, name: str, index: tuple[slice, ...] = ()) -> np.ndarray:
        """`read` of a weight. Raises ConfigError where it is not stored as one of FLOATS."""
        if self._dtypes[name] not in FLOATS:
            readable = ", ".join(FLOATS)
            raise ConfigError(
                f"{self._files[name]}: tensor {name!r} is stored as {self._dtypes[name]}; readable: {readable}"
            )
        return self.read(name, index)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ConfigError where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return content


def _named_files(directory: Path) -> dict[str, Path]:
    """File of each tensor that the index names, or of every tensor of the single file."""
    single, index = directory / _SINGLE, directory / _INDEX
    if single.exists():
        with _open(single) as handle:
            return dict.fromkeys(handle.keys(), single)
    if not index.exists():
        raise ConfigError(f"{directory}: neither {_SINGLE} nor {_INDEX} is there")
    weight_map: Mapping[str, str] | None = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: key 'weight_map' is missing or empty")
    return {name: directory / Path(file).name for name, file in weight_map.items()}


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: not a readable safetensors file ({error}); download it again") from error
