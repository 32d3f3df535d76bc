"""Tokenizers: both pre-tokenisations, chat templates, and the mask of what the model itself emits."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2Tokenizer

from dspark_jax.config import ConfigError
from dspark_jax.weights.gguf_files import open_gguf
from dspark_jax.weights.gguf_tokenizer import tokenizer_from_gguf
from dspark_jax.weights.hf_files import _tokenizer as read_tokenizer_directory
from dspark_jax.weights.tokenizer import ChatTokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "Ġ hell", "1 2", "Ċ Ċ", "s e", "e r"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def tiny_metadata(pre: str = "smollm", **changes: Any) -> dict[str, Any]:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML,
    }
    return metadata | {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}


def tiny(pre: str = "smollm", **changes: Any) -> ChatTokenizer:
    tokenizer = tokenizer_from_gguf("tiny.gguf", tiny_metadata(pre, **changes), len(TOKENS))
    assert tokenizer is not None
    return tokenizer


SMOLLM, QWEN2 = tiny("smollm"), tiny("qwen2")
PAIRS: Any = [tuple(merge.split(" ")) for merge in MERGES]
QWEN2_REFERENCE = Qwen2Tokenizer(vocab={token: index for index, token in enumerate(TOKENS)}, merges=PAIRS)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> ChatTokenizer:
    tokenizer = tokenizer_from_gguf(smollm2_path, open_gguf(smollm2_path)[1], 49152)
    assert tokenizer is not None
    return tokenizer


@given(st.text())
def test_smollm_round_trip(text: str) -> None:
    assert SMOLLM.decode(SMOLLM.encode(text)) == text


@given(st.text())
def test_qwen2_round_trip_is_the_composed_form(text: str) -> None:
    assert QWEN2.decode(QWEN2.encode(text)) == unicodedata.normalize("NFC", text)


def test_smollm_splits_every_digit() -> None:
    ids = [TOKENS.index(digit) for digit in "1212"]
    assert SMOLLM.encode("1212") == ids
    assert SMOLLM.encode(" hello")[0] == TOKENS.index("Ġhell")


@given(st.text(st.sampled_from("hel 12\n's\tE!\u2028é")))
def test_qwen2_equals_the_tokenizer_of_transformers(text: str) -> None:
    assert QWEN2.encode(text) == QWEN2_REFERENCE(text)["input_ids"]


def test_user_defined_tokens_are_parsed_and_shown() -> None:
    types = [4 if token == "12" else 3 if token in SPECIAL else 1 for token in TOKENS]
    tokenizer = tiny(ggml__token_type=types)
    assert tokenizer.encode("1212") == [TOKENS.index("12")] * 2
    assert tokenizer.decode(tokenizer.encode("1212")) == "1212"
    assert tokenizer.special_ids == SMOLLM.special_ids


def test_special_tokens_are_parsed_only_when_asked() -> None:
    text = "he<|im_end|>he"
    assert 2 not in SMOLLM.encode(text)
    assert SMOLLM.decode(SMOLLM.encode(text)) == text
    parsed = SMOLLM.encode(text, allow_special=True)
    assert parsed == [TOKENS.index("he"), 2, TOKENS.index("he")]
    assert SMOLLM.decode(parsed) == "hehe"
    assert SMOLLM.decode(parsed, keep_special=True) == text
    assert SMOLLM.special_ids == (0, 1, 2)


ROLES = st.sampled_from(["user", "assistant"])
CONTENT = st.text(st.sampled_from("hel 12\n\u2028é")).map(str.strip)
TURNS = st.lists(st.builds(lambda role, content: {"role": role, "content": content}, ROLES, CONTENT), max_size=4)
OPENING = st.sampled_from([[{"role": role, "content": "12 hells"}] for role in ("system", "user")])


@pytest.mark.parametrize("tokenizer", [SMOLLM, QWEN2], ids=["smollm", "qwen2"])
@given(opening=OPENING, turns=TURNS)
def test_mask_covers_exactly_what_the_model_emits(tokenizer: ChatTokenizer, opening: list, turns: list) -> None:
    messages = opening + turns
    ids, mask = tokenizer.chat_with_mask(messages)
    assert ids == tokenizer.chat(messages, add_generation_prompt=False)
    assert tokenizer.decode(ids, keep_special=True) == tokenizer.render(messages, add_generation_prompt=False)
    emitted = tokenizer.decode([token for token, on in zip(ids, mask, strict=True) if on], keep_special=True)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert emitted == "".join(f"{answer}<|im_end|>" for answer in answers)
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.chat(messages[:turn], add_generation_prompt=True)
            assert ids[: len(prompt)] == prompt
            assert not mask[len(prompt) - 1]
            assert mask[len(prompt)]


def test_an_answer_is_tokenised_apart_from_its_prompt() -> None:
    """The prompt ends in one line break and the answer begins with one: generation cannot join them, nor may we."""
    messages = [{"role": "user", "content": "he"}, {"role": "assistant", "content": "\nhe"}]
    ids, mask = SMOLLM.chat_with_mask(messages)
    prompt = SMOLLM.chat(messages[:1], add_generation_prompt=True)
    assert ids[: len(prompt)] == prompt
    assert [token for token, on in zip(ids, mask, strict=True) if on] == [*SMOLLM.encode("\nhe"), 2]


def test_conversations_without_a_prompt_are_refused() -> None:
    with pytest.raises(ConfigError, match="begins with an assistant turn"):
        SMOLLM.chat_with_mask([{"role": "assistant", "content": "he"}])
    with pytest.raises(ConfigError, match="empty conversation"):
        SMOLLM.chat_with_mask([])
    with pytest.raises(ConfigError, match="cannot render"):
        SMOLLM.chat([{"role": "user"}], add_generation_prompt=True)


def test_templates_without_an_exact_mask_are_refused() -> None:
    rewriting = CHATML.replace("m['content']", "(m['content'] if loop.last else 'gone')")
    messages = [{"role": role, "content": "he"} for role in ("user", "assistant", "user", "assistant")]
    tokenizer = tiny(chat_template=rewriting)
    with pytest.raises(ConfigError, match=f"chat template {tokenizer.template_hash}: rewrites"):
        tokenizer.chat_with_mask(messages)
    plain = "{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}"
    with pytest.raises(ConfigError, match="does not close"):
        tiny(chat_template=plain).chat_with_mask(messages)
    with pytest.raises(ConfigError, match="two users"):
        tiny(chat_template="{{ raise_exception('two users') }}").chat(messages, add_generation_prompt=True)
    with pytest.raises(ConfigError, match="no chat template"):
        tiny(chat_template=None).chat(messages, add_generation_prompt=True)


def test_bos_opens_a_conversation_once_when_the_file_asks_for_it() -> None:
    bare = "{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    messages = [{"role": "user", "content": "he"}]
    assert tiny(chat_template=bare, ggml__add_bos_token=True).chat(messages, False)[0] == 1
    assert tiny(chat_template=bare, ggml__add_bos_token=False).chat(messages, False)[0] != 1
    assert tiny(ggml__add_bos_token=True).chat(messages, False).count(1) == 1
    with pytest.raises(ConfigError, match="no bos token"):
        tiny(ggml__add_bos_token=True, ggml__bos_token_id=len(TOKENS))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ggml__pre": "llama-bpe"}, "'llama-bpe'"),
        ({"ggml__model": "llama"}, "tokenizer.ggml.model"),
        ({"ggml__tokens": [*TOKENS[:-1], "he"]}, "tokenizer.ggml.tokens"),
        ({"ggml__tokens": [*TOKENS, "extra"], "ggml__token_type": [1] * (len(TOKENS) + 1)}, "rows"),
        ({"ggml__token_type": [1]}, "types"),
        ({"ggml__merges": ["h e", "x y"]}, "'x y'"),
        ({"ggml__merges": ["he"]}, "'he'"),
    ],
)
def test_vocabularies_that_do_not_fit_are_refused(changes: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        tiny(**changes)


def test_directory_tokenizer_equals_the_one_saved(tmp_path: Path) -> None:
    assert read_tokenizer_directory(tmp_path) is None
    SMOLLM.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loaded = read_tokenizer_directory(tmp_path)
    assert loaded is not None
    assert loaded.template_hash == SMOLLM.template_hash != tiny(chat_template="other").template_hash
    assert loaded.special_ids == SMOLLM.special_ids
    messages = [{"role": "user", "content": "hello 1212"}, {"role": "assistant", "content": "12"}]
    assert loaded.chat_with_mask(messages) == SMOLLM.chat_with_mask(messages)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="tokenizer cannot be read"):
        read_tokenizer_directory(tmp_path)


def test_smollm2_chat(smollm2: ChatTokenizer) -> None:
    messages = [{"role": "user", "content": "Count to 12345."}]
    expected = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nCount to 12345.<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = smollm2.chat(messages, add_generation_prompt=True)
    assert smollm2.render(messages, add_generation_prompt=True) == expected
    assert smollm2.decode(ids, keep_special=True) == expected
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)
    assert [smollm2.decode([token]) for token in smollm2.encode("12345")] == list("12345")


def test_smollm2_round_trip(smollm2: ChatTokenizer) -> None:
    text = "Ça fait 1\u202f024\u2028 lignes:\n\n\tdef f(x):  # 世界 🎉🏽 naïve\r\n    return x**2\u00a0<|im_end|>  "
    assert smollm2.decode(smollm2.encode(text)) == text


def test_smollm2_mask_over_several_turns(smollm2: ChatTokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And 30 + 12?"},
        {"role": "assistant", "content": "It is 42.\n\nDone 🎉"},
    ]
    for start in (0, 1):
        ids, mask = smollm2.chat_with_mask(messages[start:])
        assert ids == smollm2.chat(messages[start:], add_generation_prompt=False)
        emitted = [token for token, on in zip(ids, mask, strict=True) if on]
        assert smollm2.decode(emitted, keep_special=True) == "4<|im_end|>It is 42.\n\nDone 🎉<|im_end|>"
