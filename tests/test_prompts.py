"""Prompt files: every accepted form is read as it is, and what cannot be measured is refused with file and line."""

import base64
import json
import random

import pytest

from dspark_jax.config import ConfigError
from serve.prompts import DOMAINS, Prompt, builtin_prompts, check_text, load_prompts

TEXT = "How many apples are left in the basket?"

# Ids drawn at random from SmolLM2's vocabulary, decoded.
RANDOM_TOKENS = (
    "nae strengthogenic pesticides parad piercing Broadcasting blockagetype transl liability Considerationsriptions CNN"
    " situated tack Bowl Ade ter forced SmithsonianDesc routed warmly Ald encoded communicates reportersClass sper"
    " MacArthurnonzero monst Os Region indefinitelyabolism anestheticAbsol GenerallyistosW web",
    "Acutepreserved divinityexpand ethnicities Discover repairsorphFig curtains widened Publishing rations detection"
    " Skills utensilsTogethermilechell Scient aggressivelyDrive compost succinct gatheredott Density paradcutaneous"
    " HamiltonVariousammu krill Slav separation ties radioactivity Chlorlock Asset orchestrghaOriginal",
)


def write(path, *lines):
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("domain", DOMAINS)
def test_builtin_domain_has_24_distinct_prompts(domain):
    prompts = builtin_prompts(domain)
    assert len({prompt.text for prompt in prompts}) == len(prompts) == 24
    assert {prompt.domain for prompt in prompts} == {domain}


def test_unknown_domain_lists_the_known_ones():
    with pytest.raises(ConfigError, match="'poetry': expected one of math, code, chat"):
        builtin_prompts("poetry")


@pytest.mark.parametrize(
    "record",
    [
        {"turns": [TEXT, "And in the bowl?"]},
        {"prompt": TEXT},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]},
    ],
)
def test_every_form_gives_the_first_user_turn_under_the_file_name(tmp_path, record):
    path = write(tmp_path / "fruit.jsonl", json.dumps(record))
    assert load_prompts(path) == [Prompt(TEXT, "fruit")]


def test_category_is_the_domain(tmp_path):
    path = write(tmp_path / "all.jsonl", json.dumps({"prompt": TEXT, "category": "math"}), json.dumps({"prompt": TEXT}))
    assert [prompt.domain for prompt in load_prompts(path)] == ["math", "all"]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_line_separators_inside_a_string_do_not_split_it(tmp_path, separator):
    text = f"First line{separator}second line of the same prompt"
    path = write(tmp_path / "a.jsonl", json.dumps({"prompt": text}, ensure_ascii=False))
    assert [prompt.text for prompt in load_prompts(path)] == [text]


def test_empty_lines_and_carriage_returns_are_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "one two"}\r\n\r\n{"prompt": "three four"}')
    assert [prompt.text for prompt in load_prompts(path)] == ["one two", "three four"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "cut o', "not JSON"),
        ('["text"]', "a JSON list"),
        ("{}", "no turns, prompt or messages; it has no fields"),
        ('{"text": "x"}', "it has text"),
        ('{"turns": []}', r"turns is \[\]"),
        ('{"turns": "x"}', "turns is 'x'"),
        ('{"prompt": " \\n"}', "not empty"),
        ('{"prompt": null}', "the prompt is None"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "no turn with the role user"),
        ('{"messages": "x"}', "no turns, prompt or messages"),
        ('{"prompt": [17, 4, 30521]}', "a list of token ids"),
        ('{"turns": [[17, 4, 30521]]}', "a list of token ids"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "bad.jsonl", json.dumps({"prompt": TEXT}), line)
    with pytest.raises(ConfigError, match=rf"bad\.jsonl:2: .*{message}"):
        load_prompts(path)


def test_unusable_files_are_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.jsonl: cannot be read \(No such file"):
        load_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_prompts(tmp_path)
    with pytest.raises(ConfigError, match=r"empty\.jsonl: no prompts"):
        load_prompts(write(tmp_path / "empty.jsonl", "", " "))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(ConfigError, match=r"latin\.jsonl: not UTF-8 text \(byte 15\)"):
        load_prompts(tmp_path / "latin.jsonl")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("17 4 30521 998 12 40000 3 17 256 1024", "0% of the prompts' characters are letters"),
        ("[31, 7] <|5|> [88, 120] <|9|>", "are letters"),
        (base64.b64encode(random.Random(0).randbytes(200)).decode(), "characters a word"),
    ],
)
def test_what_is_not_words_is_refused(tmp_path, text, message):
    path = write(tmp_path / "a.jsonl", json.dumps({"prompt": text}))
    with pytest.raises(ConfigError, match=rf"a\.jsonl: .*{message}.*random tokens"):
        load_prompts(path)


@pytest.mark.parametrize(
    "text",
    [
        "请解释为什么天空是蓝色的,并用简单的语言告诉一个十岁的孩子,让他能够理解其中的道理以及光的散射现象是怎么一回事",
        "ทำไมท้องฟ้าจึงเป็นสีฟ้าและทำไมพระอาทิตย์ตกดินจึงเป็นสีแดงอธิบายให้เด็กเข้าใจ",
        "Donaudampfschifffahrtsgesellschaft ist ein langes Wort. Was bedeutet es?",
        "def f(xs): return [x ** 2 + 3 * x - 1 for x in xs if x > 0]  # explain this",
        "What is 12 + 30?",
        "Compare YouTube, LaTeX and JavaScript.",
    ],
)
def test_real_text_of_any_language_is_kept(text):
    check_text([Prompt(text, "chat")], "here")


def test_decoded_random_tokens_are_refused():
    with pytest.raises(ConfigError, match="have a capital inside"):
        check_text([Prompt(text, "random") for text in RANDOM_TOKENS], "random.jsonl")


def test_public_benchmarks_are_kept(shared):
    paths = sorted((shared / "data" / "eval").glob("*.jsonl"))
    assert paths
    for path in paths:
        assert {prompt.domain for prompt in load_prompts(path)} == {path.stem}
