"""Conversations by other templates than the plainest, and by several processes."""

import concurrent.futures
import functools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from talks import VOCAB, load, own_text, talk, turn, write
from test_train_data import grouped

from dspark_jax.config import ConfigError, DataSettings
from train import data
from train.conversations import Conversations, Share, load_conversations
from train.tiny import tiny_tokenizer


def test_thinking_is_recorded(tmp_path: Path) -> None:
    thought = talk("hi", "<think>well</think>hello")
    made = [talk("hi", "hello"), thought, talk("hi", "hello") | {"thinking": True}, thought | {"thinking": False}]
    assert [record.thinking for record in load(tmp_path / "x.jsonl", made).records] == [False, True, True, False]


def test_several_processes_tokenise_each_conversation_once_between_them(tmp_path: Path) -> None:
    made = [talk(f"question {i}", "answer " * (i % 3)) for i in range(11)] + [{"messages": []}]
    wanted = load(tmp_path / "x.jsonl", made)
    meeting, given, asked = threading.Barrier(2), {}, []

    def exchange(index: int, own: bytes) -> list[bytes]:
        given[index] = own
        meeting.wait(30)
        return [given[0], given[1]]

    def process(index: int) -> Conversations:
        tokenizer = tiny_tokenizer()
        render = tokenizer.chat_with_mask
        tokenizer.chat_with_mask = lambda *conversation: asked.append(index) or render(*conversation)
        settings = DataSettings((str(tmp_path / "x.jsonl"),), max_length=256, num_anchors=8, min_supervised=2)
        return load_conversations(settings, tokenizer, VOCAB, Share(index, 2, functools.partial(exchange, index)))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        both = list(pool.map(process, range(2)))
    assert sorted(asked) == [0] * 6 + [1] * 5
    for got in both:
        assert (got.skipped, got.truncated) == (wanted.skipped, wanted.truncated)
        assert data.fingerprint(grouped(got.records)) == data.fingerprint(grouped(wanted.records))
        assert [r.split_key for r in got.records] == [r.split_key for r in wanted.records]


# Writes an empty thought before the last answer, opens an answer with one where thinking is off, drops old ones.
THOUGHTS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if loop.last and m['role'] == 'assistant' %}{{ '<think></think>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is false %}{{ '<think></think>' }}{% endif %}{% endif %}"
)


@pytest.mark.parametrize(("thinking", "emitted"), [(False, "d<|im_end|>"), (True, "<think></think>d<|im_end|>")])
def test_an_answer_is_learnt_as_it_was_given_and_not_as_history_shows_it(
    tmp_path: Path, thinking: bool, emitted: str
) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.tokenizer.chat_template = THOUGHTS
    settings = DataSettings(
        (write(tmp_path / "x.jsonl", [talk("a", "b", "c", "d") | {"thinking": thinking}]),),
        max_length=256, num_anchors=8, min_supervised=2,
    )  # fmt: skip
    (record,) = load_conversations(settings, tokenizer, VOCAB).records
    assert own_text(record) == emitted
    assert record.prompt == tokenizer.chat(talk("a", "b", "c")["messages"], True, thinking)
    assert record.thinking is thinking


# Shows the name of whoever speaks, and an answer's calls behind its text.
TOOLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] }}{% if m['name'] %}{{ ' ' + m['name'] }}{% endif %}"
    "{{ '\n' + m['content'] }}"
    "{% for call in m['tool_calls'] or [] %}{{ '<call>' + call['function']['name'] }}{% endfor %}{{ '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_calls_of_tools_are_the_assistants_own_and_what_tools_say_is_not(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.tokenizer.chat_template = TOOLS
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {}}}
    turns = [
        turn("user", "Weather?"),
        turn("assistant", None) | {"tool_calls": [call]},
        turn("tool", "rain") | {"name": "look", "tool_call_id": "1"},
        turn("assistant", "It rains."),
    ]
    path = write(tmp_path / "x.jsonl", [{"messages": turns}])
    settings = DataSettings((path,), max_length=256, num_anchors=8, min_supervised=2)
    (record,) = load_conversations(settings, tokenizer, VOCAB).records
    assert own_text(record) == "<call>look<|im_end|>It rains.<|im_end|>"
    assert "<|im_start|>tool look\nrain<|im_end|>" in tokenizer.decode(record.tokens.tolist(), keep_special=True)


OFFERED = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
# Lists the tools at the beginning, or knows none.
SHOWS = "{% for tool in tools or [] %}{{ '[' + tool['function']['name'] + ']' }}{% endfor %}" + TOOLS


@pytest.mark.parametrize("tools", [OFFERED, json.dumps(OFFERED)])
def test_tools_that_a_record_offers_are_shown_as_they_were_to_the_target(tmp_path: Path, tools: Any) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.tokenizer.chat_template = SHOWS
    settings = DataSettings(
        (write(tmp_path / "x.jsonl", [talk("a", "b") | {"tools": tools}, talk("a", "b") | {"tools": []}]),),
        max_length=256, num_anchors=8, min_supervised=2,
    )  # fmt: skip
    offered, plain = load_conversations(settings, tokenizer, VOCAB).records
    assert tokenizer.decode(offered.prompt, keep_special=True).startswith("[look]<|im_start|>user")
    assert tokenizer.decode(plain.prompt, keep_special=True).startswith("<|im_start|>user")
    assert own_text(offered) == own_text(plain) == "b<|im_end|>"


def test_tools_that_the_template_leaves_out_are_counted_and_broken_ones_named(tmp_path: Path) -> None:
    loaded = load(tmp_path / "x.jsonl", [talk("hi", "hello"), talk("hi", "hello") | {"tools": OFFERED}])
    assert len(loaded.records) == 1
    assert loaded.skipped == {"the chat template does not show its tools": 1}
    for tools, message in (("[", "x.jsonl:1: its 'tools' are not JSON"), ({"a": 1}, "x.jsonl:1: 'tools' must be a")):
        with pytest.raises(ConfigError, match=message):
            load(tmp_path / "x.jsonl", [talk("hi", "hello") | {"tools": tools}])
