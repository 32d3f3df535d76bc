"""Conversations by other templates than the plainest, and by several processes."""

import concurrent.futures
import functools
import threading
from pathlib import Path

import pytest
from talks import VOCAB, load, own_text, talk, turn, write
from test_train_data import grouped

from dspark_jax.config import DataSettings
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
        tokenizer.chat_with_mask = lambda messages, thinking: asked.append(index) or render(messages, thinking)
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
