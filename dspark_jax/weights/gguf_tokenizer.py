"""The tokenizer inside a GGUF file, built with the `tokenizers` library: byte-level BPE.

transformers' own GGUF path needs torch and drops the digit split of SmolLM2, which changes the ids of numbers.
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark_jax.config import ConfigError
from dspark_jax.weights.tokenizer import ChatTokenizer

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_from_gguf(where: object, metadata: Mapping[str, Any], vocab_size: int) -> ChatTokenizer | None:
    """The tokenizer that the metadata keys `tokenizer.*` describe, or None where there are none.

    Bytes without a token of their own are dropped, as the model's own tokenizer does (SmolLM2 lacks six control
    characters and the bytes that begin rare planes of Unicode).

    Raises ConfigError for another kind than byte-level BPE ('gpt2'), a `pre` other than smollm or qwen2, token
    lists that contradict each other, and more tokens than the `vocab_size` rows of the embedding.
    """
    kind = metadata.get("tokenizer.ggml.model", "none")
    if kind == "none":
        return None
    if kind != "gpt2":
        raise ConfigError(f"{where}: tokenizer.ggml.model {kind!r} is not supported, expected 'gpt2' (byte-level BPE)")
    for key in ("tokens", "token_type", "merges"):
        if f"tokenizer.ggml.{key}" not in metadata:
            raise ConfigError(f"{where}: metadata key 'tokenizer.ggml.{key}' is missing")
    tokens, types, merges = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "merges"))
    vocab = {token: index for index, token in enumerate(tokens)}
    if not len(vocab) == len(tokens) == len(types) <= vocab_size:
        raise ConfigError(
            f"{where}: tokenizer.ggml.tokens has {len(tokens)} entries, {len(vocab)} different, with {len(types)}"
            f" types, for an embedding of {vocab_size} rows"
        )
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for pair in pairs:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
            raise ConfigError(f"{where}: tokenizer.ggml.merges has {' '.join(pair)!r}, which does not join two tokens")

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.decoder = decoders.ByteLevel()
    _set_splitting(where, tokenizer, metadata.get("tokenizer.ggml.pre"))
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (_CONTROL, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=token_type == _CONTROL, normalized=False)])
    roles = {
        role: tokens[metadata[f"tokenizer.ggml.{name}_token_id"]]
        for name, role in _ROLES.items()
        if metadata.get(f"tokenizer.ggml.{name}_token_id", vocab_size) < len(tokens)
    }
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=metadata.get("tokenizer.chat_template"), **roles
    )
    return ChatTokenizer(fast, add_bos=bool(metadata.get("tokenizer.ggml.add_bos_token", False)))


def _set_splitting(where: object, tokenizer: Tokenizer, pre: str | None) -> None:
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif pre == "qwen2":
        words = pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated")
        letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
        tokenizer.normalizer = normalizers.NFC()
    else:
        raise ConfigError(f"{where}: tokenizer.ggml.pre {pre!r} is not supported; readable: smollm, qwen2")
