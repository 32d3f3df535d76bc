"""Writes the target's own answers to a file of prompts: a drafter must learn from what its target says.

    python -m train.regenerate --target smollm2-135m --prompts prompts.jsonl --out answers.jsonl

Every output line is one conversation: {"messages": [...], "finish": "stop" or "length", "prompt": number of the prompt,
"sampling": {...}, "target": name, "template": hash} and the other fields of its prompt. A run that is killed goes on
where it stopped.
"""

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dspark_jax import ConfigError, SamplingParams, Target, generate, load_target
from train.conversations import read_jsonl, record_tools


@dataclasses.dataclass(frozen=True)
class Args:
    """Regenerate answers with the target."""

    prompts: Path
    """JSONL: one prompt a line, {"turns": [text, ...]} (the first turn is answered)."""
    out: Path
    """JSONL to append to; lines already there are not made again."""
    target: str = "smollm2-135m"
    """safetensors directory, .gguf file, or smollm2-135m."""
    dtype: str = "float32"
    temperature: float = 0.7
    top_p: float = 0.8
    top_k: int = 20
    greedy_fraction: float = 0.5
    """Share of prompts answered at temperature 0, spread evenly: users decode greedily too."""
    thinking: bool | None = None
    """The chat template's `enable_thinking`, for templates that have it; None: the template's default."""
    max_new_tokens: int = 256
    max_prompt_tokens: int = 512
    """Longer prompts are skipped and counted."""
    batch_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.greedy_fraction <= 1:
            raise ConfigError(f"--greedy-fraction {self.greedy_fraction}: expected a number from 0 to 1")
        for field in ("max_new_tokens", "max_prompt_tokens", "batch_size"):
            if getattr(self, field) < 1:
                raise ConfigError(f"--{field.replace('_', '-')} {getattr(self, field)}: expected at least 1")
        SamplingParams(self.temperature, self.top_k, self.top_p)
        if self.out.is_dir():
            raise ConfigError(f"--out {self.out}: is a folder; name a file")


def _question(prompt: dict[str, Any]) -> str:
    """What a prompt asks; "" where it asks nothing."""
    turns = prompt.get("turns")
    return turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], str) else ""


def _resume(args: Args, prompts: Sequence[dict[str, Any]], target: str) -> set[int]:
    """Prompt numbers already answered. A last line that a kill cut short is removed, once all others are known to be
    answers of this target to these prompts: raises ConfigError otherwise."""
    out, done = args.out, set()
    if not out.exists():
        return done
    data = out.read_bytes()
    end = data.rfind(b"\n") + 1
    whole = sum(bool(line.strip()) for line in data[:end].split(b"\n"))
    for line, record in itertools.islice(read_jsonl(out), whole):
        number, other = record.get("prompt"), "choose another --out"
        if not isinstance(number, int) or not isinstance(record.get("messages"), list):
            raise ConfigError(
                f"{out}:{line}: is no line of train.regenerate (it lacks 'prompt' or 'messages'); {other}"
            )
        by = record.get("target")
        if by != target:
            raise ConfigError(f"{out}:{line}: was written by target {by!r}, this is {target!r}; {other}")
        asked = [turn.get("content") for turn in record["messages"][:1] if isinstance(turn, dict)]
        if not 0 <= number < len(prompts) or asked != [_question(prompts[number])]:
            raise ConfigError(f"{out}:{line}: does not answer prompt {number} of {args.prompts}; {other}")
        done.add(number)
    if end < len(data):
        if not done:  # nothing says that this is a file of answers
            raise ConfigError(f"{out}: holds one unfinished line and no answer; remove it or choose another --out")
        os.truncate(out, end)
    return done


def _sampling(args: Args, number: int) -> SamplingParams:
    greedy = int((number + 1) * args.greedy_fraction) > int(number * args.greedy_fraction)
    return SamplingParams(0.0) if greedy else SamplingParams(args.temperature, args.top_k, args.top_p)


def run(args: Args, target: Target) -> dict[str, int]:
    """Answers what is not answered yet; returns counts of written and skipped prompts."""
    if target.tokenizer is None:
        raise ConfigError(f"{args.target}: has no tokenizer, so prompts cannot be encoded")
    read = list(read_jsonl(args.prompts))
    records = [record for _, record in read]
    tools = [record_tools(record, f"{args.prompts}:{line}") or None for line, record in read]
    name, template = target.config.name, target.tokenizer.template_hash
    done = _resume(args, records, name)
    counts = {"written": 0, "already there": len(done), "too long": 0, "empty": 0, "tools not shown": 0}
    todo: list[tuple[int, list[int]]] = []
    for number, record in enumerate(records):
        if not _question(record).strip():
            counts["empty"] += 1
            continue
        if number in done:
            continue
        messages = [{"role": "user", "content": _question(record)}]
        if tools[number] and not target.tokenizer.shows_tools(messages, tools[number]):
            counts["tools not shown"] += 1
            continue
        ids = target.tokenizer.chat(messages, True, args.thinking, tools[number])
        if len(ids) > args.max_prompt_tokens:
            counts["too long"] += 1
        else:
            todo.append((number, ids))
    if not done and counts["empty"] == len(records):
        raise ConfigError(f'{args.prompts}: no line asks anything; expected {{"turns": ["text"]}} a line')
    args.out.parent.mkdir(parents=True, exist_ok=True)
    columns = (
        TextColumn("answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with args.out.open("a", encoding="utf-8") as out, Progress(*columns, disable=not todo) as progress:
        task = progress.add_task("", total=len(todo), note="")
        window = args.batch_size * 8
        for start in range(0, len(todo), window):
            # Sorting within a window leaves the order of the file nearly as it was: batches of like length have little
            # padding, and greedy ones need no sampling law.
            part = sorted(
                todo[start : start + window], key=lambda item: (_sampling(args, item[0]).temperature, len(item[1]))
            )
            for first in range(0, len(part), args.batch_size):
                batch = part[first : first + args.batch_size]
                params = [_sampling(args, number) for number, _ in batch]
                generations = generate(
                    target, None, [ids for _, ids in batch], args.max_new_tokens, params,
                    seed=args.seed + batch[0][0], eos_token_ids=target.config.eos_token_ids, batch_size=args.batch_size,
                )  # fmt: skip
                for (number, _), sampling, generation in zip(batch, params, generations, strict=True):
                    stopped = generation.tokens[-1] in target.config.eos_token_ids
                    record = {key: value for key, value in records[number].items() if key != "turns"}
                    record |= {
                        "messages": [
                            {"role": "user", "content": _question(records[number])},
                            {"role": "assistant", "content": target.tokenizer.decode(generation.tokens)},
                        ],
                        "finish": "stop" if stopped else "length",
                        "prompt": number,
                        "sampling": dataclasses.asdict(sampling),
                        "target": name,
                        "template": template,
                    } | ({} if args.thinking is None else {"thinking": args.thinking})
                    out.write(json.dumps(record, ensure_ascii=False) + "\n")
                out.flush()
                counts["written"] += len(batch)
                progress.update(task, advance=len(batch), note=f"{sum(len(g.tokens) for g in generations)} tokens")
    return counts


def main() -> int:
    try:
        args = tyro.cli(Args, description=__doc__)
        counts = run(args, load_target(args.target, args.dtype))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(", ".join(f"{name}: {count}" for name, count in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
