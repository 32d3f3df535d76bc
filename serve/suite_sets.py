"""Prompt sets of an evaluation: files of a folder, or the built-in prompts, each with the domain it counts for."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from dspark_jax import ConfigError, Target
from serve.prompts import DOMAINS, Prompt, builtin_prompts, encode_text, load_prompts

# The nine public sets of the paper's table 1, by domain. A file of another name is a domain of its own.
PUBLIC = {
    "gsm8k": "math",
    "math500": "math",
    "aime25": "math",
    "mbpp": "code",
    "humaneval": "code",
    "livecodebench": "code",
    "mt-bench": "chat",
    "alpaca": "chat",
    "arena-hard-v2": "chat",
}


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """Prompts as token ids. `left_out` were passed over on the way for being too long."""

    name: str
    domain: str
    ids: tuple[tuple[int, ...], ...]
    left_out: int = 0

    def first(self, limit: int) -> "PromptSet":
        """The set cut to its first prompts."""
        return dataclasses.replace(self, ids=self.ids[:limit])

    @property
    def digest(self) -> str:
        """The same for the same prompts, whatever their file."""
        return hashlib.sha256(json.dumps(self.ids).encode()).hexdigest()[:16]


def find_sets(data: Path | None, names: Sequence[str], public: Sequence[str]) -> dict[str, list[Prompt]]:
    """The texts of the wanted sets, `public` or the built-in domains where none are named.

    Raises ConfigError for a folder or a file that is not there, and what `load_prompts` raises.
    """
    if data is None:
        if unknown := set(names) - set(DOMAINS):
            raise ConfigError(
                f"--sets {' '.join(sorted(unknown))}: give their folder with --data; built in are {DOMAINS}"
            )
        return {name: builtin_prompts(name) for name in names or DOMAINS}
    if not data.is_dir():
        raise ConfigError(f"--data {data}: no such folder; expected one with files like gsm8k.jsonl")
    names = names or public
    if missing := [name for name in names if not (data / f"{name}.jsonl").is_file()]:
        there = sorted(path.stem for path in data.glob("*.jsonl"))
        raise ConfigError(
            f"--data {data}: has no {', '.join(f'{name}.jsonl' for name in missing)}; choose with --sets among"
            f" {' '.join(there) or 'nothing: there are no .jsonl files'}"
        )
    return {name: load_prompts(data / f"{name}.jsonl") for name in names}


def encode_sets(
    target: Target, texts: dict[str, list[Prompt]], limit: int, longest: int, tokens: int
) -> dict[str, PromptSet]:
    """The first `limit` prompts of each set with at most `longest` tokens.

    Raises ConfigError where none is that short, or the target's context is shorter.
    """
    if longest + tokens > target.config.max_length:
        raise ConfigError(
            f"prompts of {longest} tokens with {tokens} new ones exceed the target's context of"
            f" {target.config.max_length}: lower --max-prompt-tokens or --tokens"
        )
    sets = {}
    for name, prompts in texts.items():
        ids: list[tuple[int, ...]] = []
        left_out = 0
        for prompt in prompts:
            encoded = tuple(encode_text(target, prompt.text))
            if len(encoded) > longest:
                left_out += 1
                continue
            ids.append(encoded)
            if len(ids) == limit:
                break
        if not ids:
            raise ConfigError(f"set {name}: no prompt has at most {longest} tokens: raise --max-prompt-tokens")
        sets[name] = PromptSet(name, PUBLIC.get(name, name), tuple(ids), left_out)
    return sets
