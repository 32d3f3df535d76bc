"""A random target of a few kilobytes, for smoke runs and tests that need no files: `target.path = "tiny-random"`."""

import functools
from typing import Any

import jax
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark_jax.config import TargetConfig
from dspark_jax.target import Target, TargetModel, cast_params
from dspark_jax.weights.tokenizer import ChatTokenizer

TINY = "tiny-random"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer() -> ChatTokenizer:
    """One token a byte (ids 0 to 255, in the order of the byte-level alphabet), then the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in _SPECIAL])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=_CHATML, eos_token="<|im_end|>")
    return ChatTokenizer(fast)


@functools.cache
def tiny_target(seed: int = 0) -> Target:
    """A Qwen3-type target with random weights, sharp enough that its greedy text is not a coin toss."""
    config = TargetConfig(
        family="qwen3", vocab_size=512, d_model=32, d_ff=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16,
        rope_theta=10000.0, norm_eps=1e-6, max_length=512, tied_head=False, eos_token_ids=(258,), name=TINY,
    )  # fmt: skip
    zeros = jax.numpy.zeros((1, 1), jax.numpy.int32)
    params: dict[str, Any] = dict(TargetModel(config).init(jax.random.key(seed), zeros, zeros)["params"])
    # Normal(0, 0.02) leaves every next token about as likely; a wider head gives the drafter something to learn.
    params["head"] = params["head"] * 25.0
    return Target(config, cast_params(params, "float32"), tiny_tokenizer())
