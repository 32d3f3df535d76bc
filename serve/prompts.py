"""Benchmark prompts: the three built-in domains, and JSONL files of the user's own.

Acceptance measured on random tokens means nothing, yet it is an easy thing to measure by mistake, so what does not
look like text is refused. Prompts are the user's first turn only; the target's chat template is applied elsewhere.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

from dspark_jax.config import ConfigError
from dspark_jax.target import Target

DOMAINS = ("math", "code", "chat")

# check_text's limits, over all prompts of a file taken together. Texts measured: nine public benchmark sets and four
# training sets (prose, mathematics, code). Random: token ids drawn from SmolLM2's vocabulary, decoded.
MIN_LETTERS = 0.4  # share of letters among what is not space: texts 0.74 to 0.98, lists of token ids 0
MAX_GLUED = 0.04  # share of words like "lanesIX", tokens glued together: texts up to 0.017, random 0.06 to 0.12
MAX_WORD = 40.0  # characters between spaces: texts 4.2 to 6.2, base64 hundreds

_GLUED = re.compile(r"[a-z][A-Z]")
_RANDOM = "acceptance on random tokens means nothing; give prompts that people would write"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One request of a benchmark: what the user says, and the domain under which its result is reported."""

    text: str
    domain: str


def builtin_prompts(domain: str) -> list[Prompt]:
    """The 24 prompts of a built-in domain: math, code or chat. ConfigError: there is no such domain."""
    if domain not in DOMAINS:
        raise ConfigError(f"prompt domain {domain!r}: expected one of {', '.join(DOMAINS)}")
    return load_prompts(Path(__file__).with_name("prompts") / f"{domain}.jsonl")


def load_prompts(path: str | Path) -> list[Prompt]:
    """Reads prompts from a JSONL file, one object a line; empty lines are skipped.

    A prompt is the first of `turns`, or `prompt`, or the first user turn of `messages`. Its domain is the line's
    `category`, or else the file's name without ending.

    Errors: ConfigError, naming file and line, for a file that cannot be read or holds no prompts, for a broken line,
    an empty prompt, and for what is not text (see check_text).
    """
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"prompts file {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"prompts file {path}: not UTF-8 text (byte {error.start})") from None
    prompts = []
    # Not splitlines(): JSON strings may hold U+2028 and its like, which end no line of a JSONL file.
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            prompts.append(_parse_line(line, f"{path}:{number}", path.stem))
    if not prompts:
        raise ConfigError(f"prompts file {path}: no prompts; expected lines like {json.dumps({'turns': ['text']})}")
    check_text(prompts, str(path))
    return prompts


def check_text(prompts: Sequence[Prompt], source: str) -> None:
    """Refuses prompts that, taken together, are random tokens and not text, whatever the language.

    `source` names them in the message. ConfigError: hardly any letters (numbers, symbols), hardly any spaces although
    the script uses them (base64), or many words with a capital inside (token ids drawn at random and decoded).
    """
    words = [word for prompt in prompts for word in prompt.text.split()]
    characters = "".join(words)
    letters = [character for character in characters if character.isalpha()]
    if len(letters) < MIN_LETTERS * len(characters):
        share = len(letters) / len(characters)
        raise ConfigError(f"{source}: only {share:.0%} of the prompts' characters are letters: {_RANDOM}")
    # Chinese, Thai and others write without spaces, so only a text of mainly ASCII letters must have them.
    ascii_letters = sum(letter.isascii() for letter in letters)
    if len(characters) > MAX_WORD * len(words) and 2 * ascii_letters > len(letters):
        raise ConfigError(f"{source}: {len(characters) / len(words):.0f} characters a word in the prompts: {_RANDOM}")
    glued = sum(_GLUED.search(word) is not None for word in words)
    if glued > max(MAX_GLUED * len(words), 4):  # four such words are no evidence, however few the words
        raise ConfigError(f"{source}: {glued} of {len(words)} words in the prompts have a capital inside: {_RANDOM}")


def _parse_line(line: str, where: str, stem: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON ({error}); expected one object a line") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: a JSON {type(record).__name__}; expected an object with turns, prompt or messages")
    text = _first_turn(record, where)
    if isinstance(text, list) and all(isinstance(item, int) for item in text):
        raise ConfigError(f"{where}: the prompt is a list of token ids; {_RANDOM}")
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{where}: the prompt is {text!r:.60}; expected text that is not empty")
    category = record.get("category")
    return Prompt(text=text, domain=category if isinstance(category, str) and category else stem)


def _first_turn(record: dict, where: str) -> object:
    """The value where the prompt should be, of whatever type."""
    match record:
        case {"turns": [first, *_]}:
            return first
        case {"turns": turns}:
            raise ConfigError(f"{where}: turns is {turns!r:.60}; expected a list that starts with the user's text")
        case {"prompt": prompt}:
            return prompt
        case {"messages": list(messages)}:
            for message in messages:
                if isinstance(message, dict) and message.get("role") == "user":
                    return message.get("content")
            raise ConfigError(f"{where}: messages has no turn with the role user")
    raise ConfigError(f"{where}: no turns, prompt or messages; it has {', '.join(record) or 'no fields'}")


def encode_text(target: Target, text: str) -> list[int]:
    """One user turn through the target's chat template."""
    if target.tokenizer is None:
        raise ConfigError(f"target {target.config.name}: has no tokenizer, so prompts cannot be encoded")
    return target.tokenizer.chat([{"role": "user", "content": text}], add_generation_prompt=True)


def encode(target: Target, prompts: Sequence[Prompt], tokens: int) -> dict[str, list[list[int]]]:
    """Prompts through the target's chat template, by domain. Raises ConfigError naming one that does not fit."""
    by_domain: dict[str, list[list[int]]] = {}
    for prompt in prompts:
        ids = encode_text(target, prompt.text)
        if len(ids) + tokens > target.config.max_length:
            raise ConfigError(
                f"prompt {prompt.text[:40]!r} of {prompt.domain} has {len(ids)} tokens; with {tokens} new ones it"
                f" exceeds the target's context of {target.config.max_length}: shorten it or lower --tokens"
            )
        by_domain.setdefault(prompt.domain, []).append(ids)
    return by_domain


def choose_prompts(path: Path | None, limit: int) -> list[Prompt]:
    """The first `limit` prompts of each domain, of the file or built in."""
    everything = load_prompts(path) if path else [prompt for domain in DOMAINS for prompt in builtin_prompts(domain)]
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in everything:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    return [prompt for prompts in by_domain.values() for prompt in prompts[:limit]]
