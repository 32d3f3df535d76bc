"""Conversations for tests, in files, as train.conversations reads them with the tiny tokenizer."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dspark_jax.config import DataSettings
from train.conversations import Conversations, load_conversations
from train.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
VOCAB = 512


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def talk(*contents: str) -> dict[str, Any]:
    """A conversation in which user and assistant take turns."""
    return {"messages": [turn(("user", "assistant")[i % 2], content) for i, content in enumerate(contents)]}


def write(path: Path, records: Iterable[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return str(path)


def load(path: Path, records: Iterable[dict[str, Any]], **settings: Any) -> Conversations:
    chosen = {"max_length": 256, "num_anchors": 8, "min_supervised": 2} | settings
    return load_conversations(DataSettings((write(path, records),), **chosen), TOKENIZER, VOCAB)


def own_text(record: Any) -> str:
    return TOKENIZER.decode(record.tokens[record.supervised].tolist(), keep_special=True)
