"""Checkpoints by Hugging Face Hub id: `org/name`, or `org/name@revision`. Local paths never touch the network."""

import re
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HFValidationError

from dspark_jax.config import ConfigError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model")


def is_hub_id(path: str | Path) -> bool:
    """Whether `path` can only be a Hub id: it looks like one, and nothing here begins with its first part."""
    return _ID.fullmatch(str(path)) is not None and not Path(str(path).split("/")[0]).exists()


def fetch(path: str | Path) -> Path:
    """The local folder of a Hub id: from the cache where it is complete, else downloaded (weights, configs, tokenizer).

    Without a network, or with HF_HUB_OFFLINE=1, the cached copy serves. Raises ConfigError where there is none either.
    """
    repository, _, revision = str(path).partition("@")
    try:
        folder = huggingface_hub.snapshot_download(repository, revision=revision or None, allow_patterns=list(_FILES))
        return Path(str(folder))
    except (OSError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{path}: not a folder here, and the Hugging Face Hub does not give it ({reason}); check the name, the"
            " revision and, for a private one, that you are logged in"
        ) from error
