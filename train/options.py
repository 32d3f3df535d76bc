"""Command lines that name a config: options of the command itself, and every field of the config as one more."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import tyro

from dspark_jax.config import Config
from dspark_jax.config_files import load_config


class _WithConfig(Protocol):
    @property
    def config(self) -> Path: ...


_Command = TypeVar("_Command", bound=_WithConfig)
_HELP = {"-h", "--help"}


@dataclasses.dataclass(frozen=True)
class _Where:
    config: Path


def parse(kind: type[_Command], arguments: Sequence[str] | None, program: str) -> tuple[_Command, Config]:
    """The command and its config, with what the command line changes in it. With --config, --help lists the fields.

    Raises ConfigError for a config that cannot be read or has no such field; ends the program after help.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if _HELP & set(given) and any(option.split("=")[0] == "--config" for option in given):
        others = [option for option in given if option not in _HELP]
        where, _ = tyro.cli(_Where, args=others, prog=program, return_unknown_args=True)
        tyro.cli(Config, args=["--help"], default=load_config(where.config), prog=program)
    command, settings = tyro.cli(kind, args=given, prog=program, return_unknown_args=True)
    return command, tyro.cli(Config, args=settings, default=load_config(command.config), prog=program)
