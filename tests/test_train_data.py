"""What train.conversations and train.data promise: exact masks, counted skips, valid anchors, resumable order."""

import collections
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_record.python import array_record_module
from talks import TOKENIZER, VOCAB, load, own_text, talk, turn, write

from dspark_jax.config import ConfigError, DataSettings, OptimizerSettings, TrainSettings
from dspark_jax.config_files import load_config
from train import data, evaluate
from train.conversations import load_conversations, read_jsonl
from train.tiny import tiny_tokenizer

END = 258
REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list:
    made = [talk(f"question {i}", "answer " * (1 + i % 7)) for i in range(40)]
    return load(tmp_path_factory.mktemp("data") / "x.jsonl", made).records


def grouped(records: list, **settings: Any) -> list[data.Group]:
    chosen = DataSettings(("x",), **({"max_length": 256, "num_anchors": 4, "min_supervised": 2} | settings))
    return data.groups(records, chosen, data.sizes(records, chosen))


def same(left: dict, right: dict) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[name], right[name]) for name in left)


def test_only_answers_and_their_end_of_turn_are_supervised(tmp_path: Path) -> None:
    made = {"messages": [turn("system", "S"), *talk("one", "uno", "two", "dos")["messages"], turn("user", "three")]}
    (record,) = load(tmp_path / "x.jsonl", [made]).records
    assert own_text(record) == "uno<|im_end|>dos<|im_end|>"
    assert record.supervised[-1]  # nothing after the last answer is kept
    asked = TOKENIZER.chat(made["messages"][:2], add_generation_prompt=True)
    assert record.prompt == asked


def test_an_answer_cut_by_a_token_limit_does_not_teach_its_end(tmp_path: Path) -> None:
    stopped, cut = talk("a", "b", "c", "d") | {"finish": "stop"}, talk("a", "b", "c", "d") | {"finish": "length"}
    texts = [own_text(record) for record in load(tmp_path / "x.jsonl", [stopped, cut]).records]
    assert texts == ["b<|im_end|>d<|im_end|>", "b<|im_end|>d"]


def test_both_spellings_of_a_conversation_give_the_same_record(tmp_path: Path) -> None:
    spelt = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
    left, right = load(tmp_path / "x.jsonl", [talk("hi", "hello"), spelt]).records
    assert left.tokens.tolist() == right.tokens.tolist()
    assert left.split_key == right.split_key


def test_truncation_keeps_the_first_tokens(tmp_path: Path) -> None:
    whole = load(tmp_path / "x.jsonl", [talk("hi", "x" * 100)])
    cut = load(tmp_path / "x.jsonl", [talk("hi", "x" * 100)], max_length=50)
    assert (whole.truncated, cut.truncated) == (0, 1)
    assert cut.records[0].tokens.tolist() == whole.records[0].tokens[:50].tolist()
    assert cut.records[0].supervised[-1]


def test_every_skip_is_counted_with_its_reason(tmp_path: Path) -> None:
    bad = [
        {"messages": []},
        {"messages": [turn("user", "hi")]},
        {"messages": [turn("assistant", "hi")]},
        {"messages": [turn("narrator", "hi"), turn("assistant", "long enough an answer")]},
        {"messages": [turn("user", ["hi"]), turn("assistant", "long enough an answer")]},
        talk("hi", "no"),
        talk("hi", "neither"),
    ]
    loaded = load(tmp_path / "x.jsonl", [*bad, talk("hi", "long enough an answer")], min_supervised=10)
    assert len(loaded.records) == 1
    assert loaded.skipped == {
        "empty conversation": 1,
        "no assistant turn": 1,
        "starts with an assistant turn": 1,
        "unknown role": 1,
        "content is not text": 1,
        "fewer than 10 supervised tokens": 2,
    }


def test_ids_outside_the_vocabulary_and_refusals_of_the_template_are_skips(tmp_path: Path) -> None:
    settings = DataSettings((write(tmp_path / "x.jsonl", [talk("hi", "hello")]),), max_length=64, min_supervised=2)
    with pytest.raises(ConfigError, match="token ids out of range: 1"):
        load_conversations(settings, TOKENIZER, END)
    strict = tiny_tokenizer()
    strict.tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(ConfigError, match="the chat template refuses it: 1"):
        load_conversations(settings, strict, VOCAB)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"messages": []}\n{"messages": [\n', r"x\.jsonl:2: not JSON"),
        (b'[1]\n', r"x\.jsonl:1: expected a JSON object, found list"),
        (b'\n{"text": "hi"}\n', r"x\.jsonl:2: has neither 'messages' nor 'conversations'"),
        (b'{"messages": "hi"}\n', r"x\.jsonl:1: the turns"),
        ('{"messages": "\u00e9"}'.encode("latin-1"), r"x\.jsonl:1: not UTF-8"),
        (b"", "no usable conversation"),
    ],
)  # fmt: skip
def test_a_broken_file_is_refused_by_file_and_line(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        load_conversations(DataSettings((str(path),)), TOKENIZER, VOCAB)


def test_a_line_separator_inside_a_string_ends_no_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes("\ufeff".encode() + json.dumps({"a": "x\u2028y"}, ensure_ascii=False).encode() + b"\r\n\n{}")
    assert list(read_jsonl(path)) == [(1, {"a": "x\u2028y"}), (3, {})]


def test_anchors_are_valid_distinct_sorted_and_fresh_in_every_epoch(records: list) -> None:
    made = grouped(records, num_anchors=8)
    assert [group.size.anchors for group in made] == [8]
    drawn: dict[bytes, set[bytes]] = {}
    iterator = data.batches(made, 4, seed=0)
    for _ in range(30):
        batch = next(iterator)
        for tokens, supervised, anchors, keep in zip(*(batch[name] for name in batch_names), strict=True):
            kept = anchors[keep]
            assert len(kept)
            assert (np.diff(kept) > 0).all()
            assert (supervised[kept] & supervised[kept + 1]).all()
            assert not anchors[~keep].any()
            drawn.setdefault(tokens.tobytes(), set()).add(anchors.tobytes())
    assert len(drawn) == len(records)  # three epochs: every record came
    assert sum(len(draws) for draws in drawn.values()) > 1.5 * len(records)


batch_names = ("tokens", "supervised", "anchors", "keep")


def test_an_epoch_shows_every_record_once(records: list) -> None:
    iterator = data.batches(grouped(records), 8, seed=1)
    seen = [row.tobytes() for _ in range(len(records) // 8) for row in next(iterator)["tokens"]]
    assert len(set(seen)) == len(seen) == len(records)


@pytest.mark.parametrize("settings", [{}, {"buckets": (64, 96, 256)}, {"packing": True}])
def test_a_batch_is_a_function_of_its_number(records: list, settings: dict) -> None:
    made = grouped(records, **settings)
    straight = data.batches(made, 4, seed=3)
    for _ in range(13):
        next(straight)
    resumed = data.batches(made, 4, seed=3, first=13)
    for _ in range(10):
        assert same(next(straight), next(resumed))


def test_hosts_split_every_batch_between_them(records: list) -> None:
    made = grouped(records)
    whole = data.batches(made, 4, seed=3)
    parts = [data.batches(made, 4, seed=3, shard=data.Shard(index, 2)) for index in range(2)]
    for _ in range(12):
        batch, (first, second) = next(whole), (next(part) for part in parts)
        assert same({name: batch[name][0::2] for name in batch}, first)
        assert same({name: batch[name][1::2] for name in batch}, second)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the packages that the workers import
def test_worker_processes_make_the_same_batches(records: list) -> None:
    made = grouped(records)
    for first in (0, 3):
        alone, helped = (data.batches(made, 4, seed=5, first=first, workers=workers) for workers in (0, 2))
        for _ in range(8):
            assert same(next(alone), next(helped))


def test_packs_hold_every_record_once_and_waste_little(records: list) -> None:
    rows = data.pack(records, 256)
    assert sorted(record.number for row in rows for record in row) == [record.number for record in records]
    assert all(sum(len(record.tokens) for record in row) <= 256 for row in rows)
    tokens = sum(len(record.tokens) for record in records)
    assert len(rows) <= 1.1 * tokens / 256 + 1
    packed, alone = (data.padding(grouped(records, packing=packing))[0] for packing in (True, False))
    assert packed < 0.15 < alone


def test_a_pack_is_its_conversations_one_behind_the_other(records: list) -> None:
    row = max(data.pack(records, 256), key=len)
    made = data.element(row, data.Sizes(256, 500), np.random.default_rng(0))
    begin, anchors = 0, []
    for record in row:
        end = begin + len(record.tokens)
        assert made["tokens"][begin:end].tolist() == record.tokens.tolist()
        assert made["supervised"][begin:end].tolist() == record.supervised.tolist()
        assert (made["start"][begin:end] == begin).all()
        anchors += (record.anchors + begin).tolist()
        begin = end
    assert made["used"] == begin
    assert (made["start"][begin:] == begin).all() and not made["supervised"][begin:].any()
    assert made["anchors"][made["keep"]].tolist() == anchors


def test_rows_take_the_smallest_bucket_that_holds_them(records: list) -> None:
    made = grouped(records, buckets=(64, 96, 256))
    assert [group.size.length for group in made] == [64, 96]
    for group in made:
        assert all(group.size.length * 2 // 3 < len(record.tokens) <= group.size.length or group.size.length == 64
                   for (record,) in group.rows)  # fmt: skip
    assert sum(len(group.rows) for group in made) == len(records)
    iterator, counts = data.batches(made, 2, seed=0), collections.Counter()
    for _ in range(40):
        counts[next(iterator)["tokens"].shape[1]] += 1
    for group in made:
        assert counts[group.size.length] == pytest.approx(40 * len(group.rows) / len(records), abs=2)
    assert data.padding(made)[0] < data.padding(grouped(records))[0]


def test_sources_come_as_often_as_their_weights_say(tmp_path: Path) -> None:
    paths = tuple(
        write(tmp_path / name, [talk(f"{name} {i}", letter * 40) for i in range(count)])
        for name, letter, count in (("a.jsonl", "a", 20), ("b.jsonl", "b", 5))
    )
    settings = DataSettings(paths, weights=(1.0, 3.0), max_length=256, min_supervised=2)
    loaded = load_conversations(settings, TOKENIZER, VOCAB).records
    assert [record.source for record in loaded] == [0] * 20 + [1] * 5
    made = data.groups(loaded, settings, data.sizes(loaded, settings))
    b, iterator = TOKENIZER.encode("b")[0], data.batches(made, 5, seed=0)
    of_b = [bool((next(iterator)["tokens"] == b).sum() > 40) for _ in range(40)]
    assert sum(of_b) == 30
    with pytest.raises(ConfigError, match="a positive number for each of 2 paths"):
        DataSettings(paths, weights=(1.0,))
    (tmp_path / "b.jsonl").write_text("")
    with pytest.raises(ConfigError, match=r"b\.jsonl: has a weight of data weights but no usable conversation"):
        load_conversations(settings, TOKENIZER, VOCAB)


def test_array_records_are_read_like_lines(tmp_path: Path) -> None:
    made = [talk(f"question {i}", "answer " * (1 + i % 7)) for i in range(9)]
    path = tmp_path / "x.array_record"
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for record in made:
        writer.write(json.dumps(record).encode())
    writer.close()
    settings = DataSettings((str(path),), max_length=256, min_supervised=2)
    read = load_conversations(settings, TOKENIZER, VOCAB).records
    lines = load(tmp_path / "x.jsonl", made).records
    assert [record.tokens.tolist() for record in read] == [record.tokens.tolist() for record in lines]
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ConfigError, match=r"x\.array_record: not a whole ArrayRecord file"):
        load_conversations(settings, TOKENIZER, VOCAB)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"buckets": (64, 32)}, "ascending"),
        ({"buckets": (64,)}, "the last must hold max_length = 256"),
        ({"workers": -1}, "workers = -1"),
        ({"buckets": (64, 256), "packing": True}, "leave out buckets or packing"),
    ],
)
def test_data_settings_that_fit_nothing_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataSettings(("x",), max_length=256, **settings)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (TrainSettings, "keep_checkpoints", -1),
        (TrainSettings, "keep_checkpoints", 0),
        (TrainSettings, "eval_every", -1),
        (TrainSettings, "eval_prompts", 0),
        (TrainSettings, "eval_tokens", 0),
        (OptimizerSettings, "warmup_fraction", -0.1),
        (OptimizerSettings, "final_fraction", 1.5),
        (OptimizerSettings, "b1", 1.0),
        (OptimizerSettings, "b2", -0.5),
        (OptimizerSettings, "weight_decay", -1.0),
    ],
)
def test_settings_of_a_run_that_mean_nothing_are_refused_by_name(kind: Any, field: str, value: float) -> None:
    others = {"max_steps": 1} if kind is TrainSettings else {}
    with pytest.raises(ConfigError, match=rf"{field} = {re.escape(str(value))}: expected"):
        kind(**others, **{field: value})


def test_a_weighted_source_without_a_training_record_is_refused(records: list) -> None:
    settings = DataSettings(("a.jsonl", "b.jsonl"), weights=(1.0, 1.0), max_length=256, min_supervised=2)
    with pytest.raises(ConfigError, match=r"b\.jsonl: has a weight .* all of its conversations are held out"):
        data.groups(records, settings, data.sizes(records, settings))


def test_held_out_means_weigh_batches_by_blocks_and_slots_by_their_own_counts() -> None:
    row = {name: np.zeros((1, 16)) for name in ("tokens", "supervised", "start", "anchors", "keep")}
    parts = iter(
        [
            {"loss": 1.0, "acceptance_by_slot": [0.5, 1.0, 0.0], "blocks": 3.0, "slots": [3.0, 1.0, 0.0]},
            {"loss": 5.0, "acceptance_by_slot": [1.0, 0.0, 0.0], "blocks": 1.0, "slots": [1.0, 1.0, 0.0]},
        ]
    )
    means = evaluate.held_out_metrics(lambda batch: next(parts), [row, row])
    assert means["loss"] == 2.0
    assert means["acceptance_by_slot"].tolist() == [0.625, 0.5, 0.0]
    assert means.keys() == {"loss", "acceptance_by_slot"}


def test_one_shape_holds_every_record(records: list) -> None:
    settings = DataSettings(("x",), max_length=256, num_anchors=1000, min_supervised=2)
    (size,) = data.sizes(records, settings)
    made = data.groups(records, settings, [size])
    longest = max(len(record.tokens) for record in records)
    assert longest <= size.length <= min(256, longest * 3 // 2)
    assert size.anchors == max(len(record.anchors) for record in records)
    assert all(len(record.tokens) <= size.length for record in records)
    tokens, anchors = data.padding(made)
    batch = next(data.batches(made, len(records), seed=0))
    assert anchors == pytest.approx(1 - batch["keep"].mean())
    assert tokens == pytest.approx(1 - sum(len(record.tokens) for record in records) / batch["tokens"].size)


def test_held_out_batches_hold_each_record_once_and_fillers_supervise_nothing(records: list) -> None:
    size, rows = data.Sizes(256, 4), [(record,) for record in records[:5]]
    left, right = (list(data.held_out_batches(rows, size, 4, seed=0)) for _ in range(2))
    assert len(left) == 2
    assert all(np.array_equal(a[name], b[name]) for a, b in zip(left, right, strict=True) for name in batch_names)
    assert left[1]["keep"].any(axis=1).tolist() == [True, False, False, False]
    assert not left[1]["supervised"][1:].any()


def test_a_prompt_stays_on_its_side_of_the_split(tmp_path: Path, records: list) -> None:
    train, held_out = data.split(records, 0.3)
    assert len(train) + len(held_out) == len(records)
    more = [talk(f"question {i}", "another answer") for i in range(80)]
    train_more, held_out_more = data.split(load(tmp_path / "x.jsonl", more).records, 0.3)
    prompts = [{tuple(r.prompt) for r in side} for side in (train, held_out, train_more, held_out_more)]
    assert prompts[0] <= prompts[2]
    assert prompts[1] <= prompts[3]
    assert not prompts[2] & prompts[3]
    with pytest.raises(ConfigError, match="validation_fraction"):
        data.split(records[:1], 0.5)


def test_the_draft_vocabulary_is_the_most_frequent_supervised_ids(tmp_path: Path) -> None:
    loaded = load(tmp_path / "x.jsonl", [talk("zzzzzz", "aaaabbbc"), talk("zzzzzz", "aabbd")]).records
    a, b, c = TOKENIZER.encode("abc")
    chosen = data.draft_vocabulary(loaded, 4, VOCAB, always=(END, 256))
    assert chosen.tolist() == sorted([a, b, END, 256])
    assert chosen.dtype == np.int32
    # a 6, b 5, c 1, d 1 and two ends of turn
    assert data.coverage(loaded, chosen) == pytest.approx(13 / 15)
    assert len(set(data.draft_vocabulary(loaded, 300, VOCAB, always=(END,)).tolist())) == 300
    with pytest.raises(ConfigError, match="draft_vocab_size = 1"):
        data.draft_vocabulary(loaded, 1, VOCAB, always=(END, 256))
    assert c in data.draft_vocabulary(loaded, 5, VOCAB, always=(END, 256))
    # Frequent in an earlier run counts for more than once in this one, and for less than five times.
    y, z = TOKENIZER.encode("yz")
    again = data.draft_vocabulary(loaded, 6, VOCAB, always=(END, 256), known=np.array([y, z]))
    assert again.tolist() == sorted([a, b, y, z, END, 256])


def test_the_fingerprint_sees_records_order_and_settings(records: list) -> None:
    known = data.fingerprint(grouped(records), batch_size=4)
    assert known == data.fingerprint(grouped(list(records)), batch_size=4)
    others = [data.fingerprint(grouped(r), batch_size=4) for r in (records[1:], records[::-1])]
    others += [data.fingerprint(grouped(records), batch_size=8)]
    others += [data.fingerprint(grouped(records, packing=True), batch_size=4)]
    assert len({known, *others}) == 5


def test_the_conversations_of_the_smoke_run_can_all_be_used() -> None:
    config = load_config(REPOSITORY / "configs" / "tiny.py")
    loaded = load_conversations(config.data, TOKENIZER, VOCAB)
    assert len(loaded.records) >= 30
    assert not loaded.truncated
    data.split(loaded.records, config.data.validation_fraction)
