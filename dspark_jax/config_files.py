"""Config files: Python whose functions return settings. What is wrong with one is said with its name, in one line."""

import importlib.util
from pathlib import Path
from typing import TypeVar

from dspark_jax.config import Config, ConfigError, TargetConfig

_T = TypeVar("_T")


def load_config(path: Path, option: str = "--config") -> Config:
    """What `get_config()` of the Python file at `path` returns. Raises ConfigError with the option, the file and what
    is wrong."""
    return _call(path, "get_config", Config, option)


def load_target_shape(path: Path, option: str = "--config") -> TargetConfig:
    """What `get_target()` of the Python file at `path` returns: the target's shape, where no weights are read."""
    return _call(path, "get_target", TargetConfig, option)


def load_drafters(path: Path, option: str = "--config") -> dict[str, Config]:
    """What `get_drafters()` of the Python file at `path` returns: the runs of a comparison, by name."""
    return _call(path, "get_drafters", dict, option)


def _call(path: Path, name: str, kind: type[_T], option: str) -> _T:
    spec = importlib.util.spec_from_file_location("dspark_jax_run_config", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{option} {path}: no such Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        function = getattr(module, name, None)
        if function is None:
            raise ConfigError(f"defines no {name}()")
        made = function()
    except Exception as error:
        raise ConfigError(f"{option} {path}: {error or type(error).__name__}") from error
    if not isinstance(made, kind):
        raise ConfigError(f"{option} {path}: {name}() returned {type(made).__name__}, expected {kind.__name__}")
    return made
