"""Conversations in files to token rows with a mask of what the target itself would have said."""

import collections
import dataclasses
import hashlib
import itertools
import json
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

from dspark_jax.config import ConfigError, DataSettings
from dspark_jax.weights.tokenizer import ChatTokenizer

_ROLES = {
    "system": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
_ENTRIES = 1024  # of an ArrayRecord file at a time
_PASSED_ON = ("tool_calls", "tool_call_id", "name")  # what chat templates read beside role and content


@dataclasses.dataclass(frozen=True, eq=False)
class Record:
    """One conversation: ids [S] int32, and whether each is the assistant's own, hence supervised [S] bool.

    `number` counts kept records in the order of the files; `split_key` in [0, 1) depends on the prompt's text alone.
    `regenerated` says that train.regenerate wrote the answer with the run's target and template, so it is the target's
    own; `thinking` that the assistant thinks aloud in it; `source` which of the paths it is from.
    """

    tokens: np.ndarray
    supervised: np.ndarray
    number: int
    split_key: float
    regenerated: bool
    thinking: bool
    source: int

    @property
    def prompt(self) -> list[int]:
        """Ids up to the first answer, open for it: what the target is given when it decodes."""
        return self.tokens[: int(np.argmax(self.supervised))].tolist()

    @property
    def anchors(self) -> np.ndarray:
        """Positions where a block may start: the anchor and its first label are supervised (DeepSpec)."""
        return np.flatnonzero(self.supervised[:-1] & self.supervised[1:]).astype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class Conversations:
    """What was kept of the files, and how many conversations were skipped for which reason."""

    records: list[Record]
    skipped: dict[str, int]
    truncated: int


@dataclasses.dataclass(frozen=True)
class Share:
    """Which conversations this process tokenises: every `count`-th, from `index` on. `exchange` hands every process's
    bytes to all of them, in order."""

    index: int = 0
    count: int = 1
    exchange: Callable[[bytes], list[bytes]] | None = None


class _Entry(NamedTuple):
    """A conversation before it is tokenised. `thinking` is what the record says of itself."""

    messages: list[dict[str, Any]]
    cut_off: bool
    thinking: bool | None
    tools: list[dict[str, Any]]
    split_key: float
    regenerated: bool
    source: int


class _Tokens(NamedTuple):
    """A tokenised conversation, cut to the longest length and to its last supervised token."""

    tokens: np.ndarray
    supervised: np.ndarray
    truncated: bool


class _Skip(Exception):
    """This conversation cannot be used; the text is the reason that is counted."""


def read_jsonl(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers (from 1) and objects of a JSONL file, empty lines left out.

    Lines end at a newline only, for strings may hold U+2028. Raises ConfigError naming file and line for what is not
    UTF-8, not JSON or not an object.
    """
    path = Path(path)
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read it ({error.strerror})") from error
    with file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path}:{number}: not UTF-8 ({error.reason}); convert the file") from error
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}:{number}: not JSON ({error.msg}); fix or remove the line") from error
            if not isinstance(record, dict):
                raise ConfigError(f"{path}:{number}: expected a JSON object, found {type(record).__name__}")
            yield number, record


def read_array_record(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Entry numbers (from 1) and JSON objects of an ArrayRecord file. Raises ConfigError naming file and entry."""
    if not Path(path).is_file():
        raise ConfigError(f"{path}: cannot read it (no such file)")
    try:
        reader = array_record_module.ArrayRecordReader(str(path))
        count = reader.num_records()
        if not count:
            raise ValueError("it has no record that can be read")
        parts = [reader.read(start, min(start + _ENTRIES, count)) for start in range(0, count, _ENTRIES)]
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path}: not a whole ArrayRecord file ({reason}); copy or make it anew") from error
    for number, entry in enumerate(itertools.chain.from_iterable(parts), start=1):
        try:
            record = json.loads(entry)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise ConfigError(f"{path}:{number}: expected a JSON object, found {type(record).__name__}")
        yield number, record


def load_conversations(
    settings: DataSettings, tokenizer: ChatTokenizer, vocab_size: int, share: Share = Share(), target: str = ""
) -> Conversations:
    """Reads, renders and tokenises all files of `settings.paths`; of several processes each tokenises its share.

    `target` is the name by which train.regenerate marks the target's own answers. A conversation that cannot be used is
    skipped and counted under its reason. Raises ConfigError for a broken file, no file, a tokenizer without chat
    template, and when nothing is left.
    """
    if not settings.paths:
        raise ConfigError("data paths is empty: name at least one file of conversations")
    if not tokenizer.tokenizer.chat_template:
        raise ConfigError("the target's tokenizer has no chat template, so it cannot render conversations")
    entries, skipped = _read(settings.paths, (target, tokenizer.template_hash))
    tokenised = _in_shares(entries, share, lambda entry: _tokenised(entry, settings, tokenizer, vocab_size))
    records: list[Record] = []
    truncated = 0
    for entry, made in zip(entries, tokenised, strict=True):
        if isinstance(made, str):
            skipped[made] += 1
            continue
        record = Record(
            made.tokens, made.supervised, len(records), entry.split_key, entry.regenerated, _thinks(entry), entry.source
        )
        if not len(record.anchors):
            skipped["no two supervised tokens in a row"] += 1
            continue
        records.append(record)
        truncated += made.truncated
    sources = {record.source for record in records}
    for source, path in enumerate(settings.paths):
        if settings.weights and source not in sources:
            raise ConfigError(f"{path}: has a weight of data weights but no usable conversation")
    if not records:
        reasons = ", ".join(f"{reason}: {count}" for reason, count in skipped.most_common()) or "the files are empty"
        raise ConfigError(f"data paths {', '.join(settings.paths)}: no usable conversation ({reasons})")
    return Conversations(records, dict(skipped.most_common()), truncated)


def _read(paths: Sequence[str], own: tuple[str, str]) -> tuple[list[_Entry], collections.Counter[str]]:
    """The conversations of all files in order, and how many have no answer to learn from, by reason. `own`: target and
    template of answers that count as regenerated."""
    entries: list[_Entry] = []
    skipped: collections.Counter[str] = collections.Counter()
    for source, path in enumerate(paths):
        read = read_array_record if Path(path).suffix == ".array_record" else read_jsonl
        for line, raw in read(path):
            try:
                messages, tools = _messages(raw, f"{path}:{line}"), record_tools(raw, f"{path}:{line}")
            except _Skip as reason:
                skipped[str(reason)] += 1
                continue
            said = raw.get("thinking")
            thinking = said if isinstance(said, bool) else None
            cut_off, regenerated = raw.get("finish") == "length", (raw.get("target"), raw.get("template")) == own
            entries.append(_Entry(messages, cut_off, thinking, tools, _split_key(messages), regenerated, source))
    return entries, skipped


def _in_shares(
    entries: Sequence[_Entry], share: Share, tokenise: Callable[[_Entry], _Tokens | str]
) -> list[_Tokens | str]:
    """`tokenise` of every entry, in order, each computed by one process only."""
    own = [tokenise(entry) for entry in entries[share.index :: share.count]]
    if share.exchange is None:
        return own
    parts = [pickle.loads(part) for part in share.exchange(pickle.dumps(own))]
    return [parts[number % share.count][number // share.count] for number in range(len(entries))]


def _tokenised(entry: _Entry, settings: DataSettings, tokenizer: ChatTokenizer, vocab_size: int) -> _Tokens | str:
    """The tokens of a conversation, or why it is skipped."""
    try:
        tokens, supervised = _tokenise(entry, tokenizer, vocab_size)
    except _Skip as reason:
        return str(reason)
    cut = len(tokens) > settings.max_length
    tokens, supervised = _trim(tokens[: settings.max_length], supervised[: settings.max_length])
    if supervised.sum() < settings.min_supervised:
        return f"fewer than {settings.min_supervised} supervised tokens"
    return _Tokens(tokens, supervised, cut)


def _messages(raw: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The turns of a record in the common form, the last one an answer."""
    turns = raw.get("messages", raw.get("conversations"))
    if turns is None:
        raise ConfigError(f"{where}: has neither 'messages' nor 'conversations'")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ConfigError(f"{where}: the turns of a conversation must be a list of objects with role and content")
    messages = [_message(turn) for turn in turns]
    if not messages:
        raise _Skip("empty conversation")
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise _Skip("no assistant turn")
    if answers[0] == 0:
        raise _Skip("starts with an assistant turn")
    return messages[: answers[-1] + 1]


def record_tools(raw: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The tools that a record offers the assistant, as chat templates take them: JSON schemas, or a JSON text of such a
    list, as files keep them whose columns need one type."""
    tools = raw.get("tools") or []
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where}: its 'tools' are not JSON ({error.msg})") from error
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"{where}: 'tools' must be a list of JSON schemas")
    return tools


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    role = _ROLES.get(str(turn.get("role", turn.get("from"))).lower())
    if role is None:
        raise _Skip("unknown role")
    content = turn.get("content", turn.get("value"))
    if content is None and turn.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise _Skip("content is not text")
    return {"role": role, "content": content} | {key: turn[key] for key in _PASSED_ON if key in turn}


def _tokenise(entry: _Entry, tokenizer: ChatTokenizer, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    try:
        if entry.tools and not tokenizer.shows_tools(entry.messages, entry.tools):
            raise _Skip("the chat template does not show its tools")
        ids, mask = tokenizer.chat_with_mask(entry.messages, entry.thinking, entry.tools or None)
    except ConfigError as error:
        raise _Skip("the chat template refuses it") from error
    tokens, supervised = np.asarray(ids, np.int64), np.asarray(mask, bool)
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise _Skip("token ids out of range")
    if entry.cut_off:
        # A token limit ended this answer, not the target: the end-of-turn token is the template's.
        supervised[np.flatnonzero(supervised)[-1]] = False
    return tokens.astype(np.int32), supervised


def _trim(tokens: np.ndarray, supervised: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Drops what follows the last supervised token: nothing is learnt there."""
    length = int(np.max(np.flatnonzero(supervised), initial=0)) + 1
    return tokens[:length], supervised[:length]


def _thinks(entry: _Entry) -> bool:
    """Whether the record says so, else whether an answer holds a closed thought."""
    if entry.thinking is not None:
        return entry.thinking
    return any("</think>" in message["content"] for message in entry.messages if message["role"] == "assistant")


def _split_key(messages: Sequence[Mapping[str, Any]]) -> float:
    """A number in [0, 1) from the turns before the first answer, so that one prompt never falls on both sides."""
    first = next(index for index, message in enumerate(messages) if message["role"] == "assistant")
    text = json.dumps([[message["role"], message["content"]] for message in messages[:first]])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
