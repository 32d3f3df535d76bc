"""train.regenerate: every prompt is answered once, by the target, whatever interrupts it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from dspark_jax import ConfigError, generate
from dspark_jax.config import DataSettings
from train.conversations import load_conversations
from train.regenerate import Args, run
from train.tiny import tiny_target, tiny_tokenizer

PROMPTS = [f"Say {word}." for word in ("one", "two", "three", "four", "five", "six")]


def made(tmp_path: Path, **settings: Any) -> Args:
    lines: list[dict[str, Any]] = [{"turns": [text], "category": "x"} for text in PROMPTS]
    lines[2:2] = [{"turns": []}, {"turns": ["  "]}, {"turns": ["long " * 40]}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chosen = {"max_new_tokens": 5, "max_prompt_tokens": 64, "batch_size": 3} | settings
    return Args(prompts=tmp_path / "prompts.jsonl", out=tmp_path / "answers.jsonl", **chosen)


def answers(args: Args) -> list[dict[str, Any]]:
    text = args.out.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.split("\n")[:-1]]


def test_counts_and_records_are_right(tmp_path: Path) -> None:
    args = made(tmp_path)
    assert run(args, tiny_target()) == {
        "written": 6,
        "already there": 0,
        "too long": 1,
        "empty": 2,
        "tools not shown": 0,
    }
    records = answers(args)
    assert sorted(record["prompt"] for record in records) == [0, 1, 5, 6, 7, 8]
    assert {record["messages"][0]["content"] for record in records} == set(PROMPTS)
    assert all(record["category"] == "x" and record["finish"] in ("stop", "length") for record in records)
    greedy = [record for record in records if record["sampling"]["temperature"] == 0]
    assert 0 < len(greedy) < len(records)


def test_a_greedy_answer_is_the_targets_own(tmp_path: Path) -> None:
    args, target = made(tmp_path, greedy_fraction=1.0), tiny_target()
    run(args, target)
    records = answers(args)
    prompts = [target.tokenizer.chat(record["messages"][:1], add_generation_prompt=True) for record in records]
    alone = generate(target, None, prompts, 5, eos_token_ids=target.config.eos_token_ids, batch_size=3)
    for record, plain in zip(records, alone, strict=True):
        assert record["messages"][1]["content"] == target.tokenizer.decode(plain.tokens)
        assert (record["finish"] == "stop") == (plain.tokens[-1] in target.config.eos_token_ids)


def test_an_answer_is_given_with_the_tools_that_its_prompt_offers(tmp_path: Path) -> None:
    args, tools = made(tmp_path, greedy_fraction=1.0), [{"type": "function", "function": {"name": "look"}}]
    lines = [{"turns": ["hi"], "tools": tools}, {"turns": ["hi"], "tools": []}]
    args.prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(args, tiny_target())["tools not shown"] == 1
    tokenizer = tiny_tokenizer()
    assert tokenizer.tokenizer.chat_template is not None
    tokenizer.tokenizer.chat_template = "{{ tools | length if tools else '' }}" + tokenizer.tokenizer.chat_template
    target = dataclasses.replace(tiny_target(), tokenizer=tokenizer)
    other = dataclasses.replace(args, out=tmp_path / "shown.jsonl")
    assert run(other, target)["written"] == 2
    asked = tokenizer.chat([{"role": "user", "content": "hi"}], True, tools=tools)
    assert asked[:1] == tokenizer.encode("1")
    wanted = generate(target, None, [asked], 5, eos_token_ids=target.config.eos_token_ids)[0].tokens
    offered = next(record for record in answers(other) if record["prompt"] == 0)
    assert offered["messages"][1]["content"] == tokenizer.decode(wanted)
    assert offered["tools"] == tools


def test_a_killed_run_goes_on_and_answers_nothing_twice(tmp_path: Path) -> None:
    args = made(tmp_path)
    run(args, tiny_target())
    whole = args.out.read_bytes()
    lines = whole.split(b"\n")
    cut = b"\n".join(lines[:3]) + b"\n" + lines[3][: len(lines[3]) // 2]
    args.out.write_bytes(cut)
    assert run(args, tiny_target()) == {
        "written": 3,
        "already there": 3,
        "too long": 1,
        "empty": 2,
        "tools not shown": 0,
    }
    assert args.out.read_bytes().startswith(b"\n".join(lines[:3]) + b"\n")
    assert sorted(record["prompt"] for record in answers(args)) == [0, 1, 5, 6, 7, 8]
    assert run(args, tiny_target())["written"] == 0


def test_an_answer_counts_as_the_targets_own_for_its_target_and_template_only(tmp_path: Path) -> None:
    args, tokenizer = made(tmp_path), tiny_target().tokenizer
    run(args, tiny_target())

    def own(target: str, tokenizer: Any) -> set[bool]:
        settings = DataSettings((str(args.out),), max_length=256, min_supervised=1)
        records = load_conversations(settings, tokenizer, 512, target=target).records
        return {record.regenerated for record in records}

    assert own("tiny-random", tokenizer) == {True}
    assert own("another", tokenizer) == {False}
    other = tiny_tokenizer()
    other.tokenizer.chat_template += "{# another #}"
    assert own("tiny-random", other) == {False}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": []}, r"answers\.jsonl:1: is no line of train\.regenerate"),
        ({"prompt": 0, "target": "other"}, r"answers\.jsonl:1: was written by target 'other', this is 'tiny-random'"),
        ({"prompt": 1}, r"answers\.jsonl:1: does not answer prompt 1 of .*prompts\.jsonl"),
        ({"prompt": 99}, r"answers\.jsonl:1: does not answer prompt 99"),
    ],
)
def test_answers_to_something_else_are_refused_and_left_alone(
    tmp_path: Path, line: dict[str, Any], message: str
) -> None:
    args = made(tmp_path)
    asked = {"messages": [{"role": "user", "content": PROMPTS[0]}], "target": "tiny-random"}
    text = json.dumps(line if "messages" in line else asked | line) + '\n{"cut'
    args.out.write_text(text)
    with pytest.raises(ConfigError, match=message):
        run(args, tiny_target())
    assert args.out.read_text() == text


def test_a_share_of_greedy_answers_is_a_share(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--greedy-fraction 1\.5: expected"):
        made(tmp_path, greedy_fraction=1.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "--batch-size 0"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0"),
        ({"top_p": 2.0}, "top_p = 2"),
    ],
)
def test_settings_that_mean_nothing_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(tmp_path, **settings)


def test_a_file_that_is_nothing_but_one_open_line_is_left_alone(tmp_path: Path) -> None:
    args = made(tmp_path)
    args.out.write_text('{"some": "notes"}')
    with pytest.raises(ConfigError, match="holds one unfinished line and no answer"):
        run(args, tiny_target())
    assert args.out.read_text() == '{"some": "notes"}'


def test_prompts_that_ask_nothing_are_an_error(tmp_path: Path) -> None:
    args = made(tmp_path)
    args.prompts.write_text('{"messages": []}\n{"turns": "What is two and two?"}\n')
    with pytest.raises(ConfigError, match="no line asks anything"):
        run(args, tiny_target())
    assert not args.out.exists()


def test_missing_and_broken_prompts_are_named(tmp_path: Path) -> None:
    args = made(tmp_path)
    args.prompts.write_text('{"turns": ["a"]}\n{"turns"\n')
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2: not JSON"):
        run(args, tiny_target())
    args.prompts.unlink()
    with pytest.raises(ConfigError, match=r"prompts\.jsonl: cannot read it"):
        run(args, tiny_target())
    assert not args.out.exists()
