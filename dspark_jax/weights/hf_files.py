"""Targets from Hugging Face directories: config.json, safetensors in one file or in shards, tokenizer files."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dspark_jax.config import ConfigError, TargetConfig
from dspark_jax.weights.hf_config import read_config
from dspark_jax.weights.safetensor_files import TensorFiles
from dspark_jax.weights.tokenizer import ChatTokenizer
from dspark_jax.weights.tree import HERE, Index, Placement, build_params, check_tensors, file_name, part_shapes

_OUTER = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
_LAYER = {
    "attn_norm": "model.layers.{}.input_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{}.self_attn.v_proj.bias",
    "o": "model.layers.{}.self_attn.o_proj.weight",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "down": "model.layers.{}.mlp.down_proj.weight",
}
_GEMMA_LAYER = _LAYER | {
    "post_attn_norm": "model.layers.{}.post_attention_layernorm.weight",
    "mlp_norm": "model.layers.{}.pre_feedforward_layernorm.weight",
    "post_mlp_norm": "model.layers.{}.post_feedforward_layernorm.weight",
    "layer_scalar": "model.layers.{}.layer_scalar",
}
# The confidence head of a draft model that was trained here (see language_model.py): no part of the language model.
CONFIDENCE = "confidence_head.proj."
# Where the text model lies in a checkpoint that also sees and hears, and what else is in there.
_TEXT_PREFIXES = ("model.language_model.", "language_model.model.")
_OTHER_PARTS = ("vision", "audio", "multi_modal_projector", "embed_vision", "embed_audio", CONFIDENCE)


def read_hf(
    directory: str | Path, placement: Placement = HERE, only: Collection[str] | None = None
) -> tuple[TargetConfig, dict[str, Any], ChatTokenizer | None]:
    """Reads a checkpoint directory: config, parameters (weights/tree.py; `only` some of them), tokenizer if present.

    Raises ConfigError for another model type, settings that change the forward pass in ways not built here, and
    tensors that are missing, of another shape, or not used.
    """
    directory = Path(directory)
    config = read_config(directory)
    files = TensorFiles(directory)
    stored = {_plain_name(name): name for name in files.shapes}
    stored.pop(None, None)
    names = hf_names(config)

    def read(part: str, index: Index = ()) -> np.ndarray:
        tensor = files.weight(stored[names[part]], index)
        # Gemma 3 stores what its norms add to one.
        return tensor.astype(np.float32) + 1 if config.family == "gemma3" and part.endswith("norm") else tensor

    found = {name: files.shapes[own] for name, own in stored.items() if name is not None}
    # Some writers store the shared matrix twice.
    if config.tied_head and _OUTER["head"] in found and _OUTER["embed"] in found:
        for start in range(0, config.vocab_size, 8192):
            rows = (slice(start, min(start + 8192, config.vocab_size)),)
            head, embed = (files.weight(stored[_OUTER[part]], rows) for part in ("head", "embed"))
            if not np.array_equal(head, embed):
                raise ConfigError(f"{directory}: tie_word_embeddings is true, but lm_head differs from the embedding")
        del found[_OUTER["head"]]
    check_tensors(directory, {names[part]: shape for part, shape in part_shapes(config).items()}, found)
    return config, build_params(config, read, placement, only), _tokenizer(directory)


def hf_names(config: TargetConfig) -> dict[str, str]:
    """The tensor name of every part of `part_shapes`."""
    layer = _GEMMA_LAYER if config.gemma else _LAYER
    return {part: file_name(part, _OUTER, layer) for part in part_shapes(config)}


def _plain_name(name: str) -> str | None:
    """A tensor's name as in a text-only checkpoint; None where it belongs to another sense, or to a drafter's head."""
    for prefix in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    bare = name.removeprefix("model.")
    return None if bare.startswith(_OTHER_PARTS) else name.removeprefix("language_model.")


def _tokenizer(directory: Path) -> ChatTokenizer | None:
    if not (directory / "tokenizer.json").exists():
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exception for a file that it cannot parse
        raise ConfigError(f"{directory}: its tokenizer cannot be read ({error})") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ConfigError(f"{directory}: its tokenizer is a {type(tokenizer).__name__}, expected a fast one")
    return ChatTokenizer(tokenizer)
