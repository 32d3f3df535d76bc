"""Plain draft models: ordinary language models, read where targets are read; written as Hugging Face has them.

What we write is such a model, with a note of the block size in config.json and, where it was trained with one, the two
tensors of a confidence head, which other programs pass over.
"""

from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.config import ConfigError, DrafterConfig, TargetConfig, plain_drafter
from dspark_jax.weights.drafter_format import NOTES, Description, Format, refuse
from dspark_jax.weights.hf_config import FAMILIES
from dspark_jax.weights.hf_files import CONFIDENCE, hf_names
from dspark_jax.weights.locate import EMBEDDED, read_target
from dspark_jax.weights.rope_keys import write_rope
from dspark_jax.weights.safetensor_files import TensorFiles, read_json
from dspark_jax.weights.tokenizer import ChatTokenizer
from dspark_jax.weights.tree import Placement, part_shapes

BLOCK_SIZE = 4
"""Drafts a block, where neither the caller nor the files say: each costs a step of the draft model."""
_CLASSES = {family: f"{family.capitalize()}ForCausalLM" for family in ("llama", "mistral", "qwen2", "qwen3")}
_ENDINGS = ("ForCausalLM", "ForConditionalGeneration")


def is_language_model(path: str | Path) -> bool:
    """Whether `path` is a language model: the embedded one, a GGUF file, or a folder whose config.json says so."""
    where = Path(path) / "config.json"
    if str(path) == EMBEDDED or (Path(path).suffix == ".gguf" and Path(path).is_file()):
        return True
    if not where.is_file():
        return False
    raw = read_json(where)
    classes = raw.get("architectures") or []
    known = raw.get("model_type") in FAMILIES and "speculators_model_type" not in raw
    return known and bool(classes) and all(str(name).endswith(_ENDINGS) for name in classes)


def read_language_model(
    path: str | Path, block_size: int = 0, dtype: str = "float32"
) -> tuple[DrafterConfig, dict[str, Any], ChatTokenizer | None, dict[str, Any]]:
    """The draft model at `path`: config, parameters in `dtype`, tokenizer, notes of the run that wrote it. `block_size`
    0 takes what the files say, else BLOCK_SIZE. Raises ConfigError as `read_target` does."""
    whole, backbone, tokenizer = read_target(path, Placement(dtype))
    params, notes = {"backbone": backbone}, {}
    if Path(path).is_dir():
        notes = dict(read_json(Path(path) / "config.json").get(NOTES) or {})
        files = TensorFiles(Path(path))
        if CONFIDENCE + "weight" in files.shapes:
            weight, bias = (files.weight(CONFIDENCE + name).astype(np.float32) for name in ("weight", "bias"))
            params["confidence_head"] = {"weight": weight.reshape(-1), "bias": bias.reshape(())}
    noted = notes.pop("block_size", BLOCK_SIZE)
    return plain_drafter(whole, block_size or noted, "confidence_head" in params), params, tokenizer, notes


def check_tokens(
    where: object, config: DrafterConfig, tokenizer: ChatTokenizer | None, target: TargetConfig,
    target_tokenizer: ChatTokenizer | None,
) -> None:  # fmt: skip
    """Raises ConfigError unless the draft model's tokens are the target's: as many, the same ends of a text as far as
    both name one, and, where both have a tokenizer, the same token behind every id."""
    other = f"so it cannot draft for {target.name or 'this target'}"
    if config.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{where}: vocab_size = {config.vocab_size}, but the target's is {target.vocab_size}, {other}"
        )
    assert config.language_model is not None
    ends, theirs = config.language_model.eos_token_ids, target.eos_token_ids
    if ends and theirs and not set(ends) & set(theirs):
        raise ConfigError(f"{where}: eos_token_id = {list(ends)}, but the target's are {list(theirs)}, {other}")
    if tokenizer is None or target_tokenizer is None:
        return
    own, wanted = (one.tokenizer.get_vocab() for one in (tokenizer, target_tokenizer))
    if own != wanted:
        token, _ = min(own.items() ^ wanted.items(), key=lambda item: (item[1], item[0]))
        raise ConfigError(
            f"{where}: its tokenizer has id {own.get(token)} for {token!r}, the target's {wanted.get(token)}, {other}"
        )


def _describe(config: DrafterConfig, description: Description) -> dict[str, Any]:
    c = config.language_model
    assert c is not None
    refuse(FORMAT.title, {f"{c.family} layers": c.family not in _CLASSES, "sliding windows": any(c.layer_windows)})
    return {
        "architectures": [_CLASSES[c.family]],
        "model_type": c.family,
        "dtype": description.dtype,
        "vocab_size": c.vocab_size,
        "hidden_size": c.d_model,
        "intermediate_size": c.d_ff,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.norm_eps,
        "max_position_embeddings": c.max_length,
        "rope_parameters": write_rope(c.rope_theta, c.rope_scaling),
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": c.tied_head,
        "eos_token_id": list(c.eos_token_ids),
        NOTES: description.notes | {"block_size": config.block_size},
    }


def _cut(config: DrafterConfig, params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a draft model by Hugging Face's names: the fused leaves of weights/tree.py apart again."""
    c = config.language_model
    assert c is not None
    names, tensors = hf_names(c), {}
    fused = {"q": np.s_[:, :-2], "k": np.s_[:, -2], "v": np.s_[:, -1]}
    for part, shape in part_shapes(c).items():
        place, _, name = part.rpartition("/")
        node = params["backbone"][place] if place else params["backbone"]
        kind, _, bias = name.partition("_")
        if kind in fused and bias in ("", "bias"):
            leaf = np.asarray(node["qkv_bias" if bias else "qkv"])[fused[kind]]
        else:
            leaf = np.asarray(node[name])
        tensors[names[part]] = leaf.reshape(shape)
    for name, leaf in params.get("confidence_head", {}).items():
        tensors[CONFIDENCE + name] = np.asarray(leaf).reshape((1, -1) if name == "weight" else (1,))
    return tensors


FORMAT = Format("huggingface", "Hugging Face language model", {}, None, _describe, "lm", _cut)
