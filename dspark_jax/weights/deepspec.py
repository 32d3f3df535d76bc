"""DeepSpec's drafter checkpoints, both ways: one table of names, one normaliser of the config.

A directory holds config.json and model.safetensors. The frozen embedding and head may be left out; where they are
present they are compared with the target's. A reduced draft vocabulary comes as `d2t` (int64 offsets: target id =
draft id + d2t[draft id]) and `t2d` (which target ids it has), as in the speculators format.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from dspark_jax.config import ConfigError, DrafterConfig, TargetConfig
from dspark_jax.drafters.dspark import init_params
from dspark_jax.weights.hf_files import rope_theta

ARCHITECTURE = "Qwen3DSparkModel"

# Their name -> our path and, where one of our leaves joins several of theirs, the index on its first axis.
_OUTER: dict[str, tuple[str, int | None]] = {
    "fc.weight": ("backbone/fc", None),
    "hidden_norm.weight": ("backbone/hidden_norm", None),
    "norm.weight": ("backbone/norm", None),
    "markov_head.markov_w1.weight": ("markov/w1", None),
    "markov_head.markov_w2.weight": ("markov/w2", None),
    "confidence_head.proj.weight": ("confidence_head/weight", None),
    "confidence_head.proj.bias": ("confidence_head/bias", None),
}
_LAYER: dict[str, tuple[str, int | None]] = {
    "layers.{}.input_layernorm.weight": ("backbone/layers_{}/attn_norm", None),
    "layers.{}.self_attn.q_proj.weight": ("backbone/layers_{}/q", None),
    "layers.{}.self_attn.k_proj.weight": ("backbone/layers_{}/kv", 0),
    "layers.{}.self_attn.v_proj.weight": ("backbone/layers_{}/kv", 1),
    "layers.{}.self_attn.q_norm.weight": ("backbone/layers_{}/q_norm", None),
    "layers.{}.self_attn.k_norm.weight": ("backbone/layers_{}/k_norm", None),
    "layers.{}.self_attn.o_proj.weight": ("backbone/layers_{}/o", None),
    "layers.{}.post_attention_layernorm.weight": ("backbone/layers_{}/mlp_norm", None),
    "layers.{}.mlp.gate_proj.weight": ("backbone/layers_{}/gate", None),
    "layers.{}.mlp.up_proj.weight": ("backbone/layers_{}/up", None),
    "layers.{}.mlp.down_proj.weight": ("backbone/layers_{}/down", None),
}
_FROZEN = ("embed_tokens.weight", "lm_head.weight")
_VOCABULARY = ("d2t", "t2d")

# Keys that a config may carry without changing what is computed here.
_IGNORED = frozenset({
    "architectures", "attention_dropout", "bos_token_id", "dspark_jax", "dtype", "eos_token_id", "initializer_range",
    "max_window_layers", "model_type", "num_anchors", "pad_token_id", "tie_word_embeddings", "torch_dtype",
    "transformers_version", "use_cache",
})  # fmt: skip


def name_table(config: DrafterConfig) -> dict[str, tuple[str, int | None]]:
    """Every trained tensor of a checkpoint by DeepSpec's name: our path and index."""
    table = dict(_OUTER)
    for i in range(config.num_layers):
        table |= {theirs.format(i): (ours.format(i), index) for theirs, (ours, index) in _LAYER.items()}
    if not config.markov_rank:
        table = {theirs: ours for theirs, ours in table.items() if not theirs.startswith("markov_head.")}
    if not config.confidence_head:
        table = {theirs: ours for theirs, ours in table.items() if not theirs.startswith("confidence_head.")}
    return table


def _their_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """DeepSpec stores vectors and [out, in] matrices; our leaves may split either axis."""
    if name == "confidence_head.proj.weight":
        return (1, *shape)
    if name == "confidence_head.proj.bias":
        return (1,)
    if name.endswith(("_norm.weight", "layernorm.weight")) or name == "norm.weight":
        return shape
    # q, k, v split their rows into heads, o and fc their columns; the model width is on the other side.
    if any(part in name for part in ("q_proj", "k_proj", "v_proj")):
        return (int(np.prod(shape[:-1])), shape[-1])
    return (shape[0], int(np.prod(shape[1:])))


def _leaf_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    tree = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(key.key for key in path): leaf.shape for path, leaf in flat}


def normalise_config(raw: dict[str, Any], where: Path) -> DrafterConfig:
    """DeepSpec's config.json to ours. Raises ConfigError naming the key, its value and what was expected."""
    raw = dict(raw)
    architectures = raw.get("architectures", [])
    if architectures != [ARCHITECTURE]:
        raise ConfigError(f"{where}: architectures = {architectures}: this reader knows [{ARCHITECTURE!r}]")

    def take(key: str, default: Any = None) -> Any:
        if key not in raw and default is None:
            raise ConfigError(f"{where}: key {key!r} is missing")
        return raw.pop(key, default)

    def expect(key: str, *allowed: Any) -> None:
        if key in raw and (value := raw.pop(key)) not in allowed:
            raise ConfigError(f"{where}: {key} = {value!r}: this drafter supports {' or '.join(map(repr, allowed))}")

    theta = rope_theta(where, raw)
    for key in ("rope_parameters", "rope_theta", "rope_scaling"):
        raw.pop(key, None)
    expect("hidden_act", "silu")
    expect("attention_bias", False)
    expect("use_sliding_window", False)
    expect("sliding_window", None)
    num_layers = take("num_hidden_layers")
    expect("layer_types", ["full_attention"] * num_layers)
    rank = take("markov_rank", 0)
    expect("markov_head_type", "vanilla", *([] if rank else [None]))
    confidence = bool(take("enable_confidence_head", False))
    config = DrafterConfig(
        vocab_size=take("vocab_size"),
        d_model=take("hidden_size"),
        d_ff=take("intermediate_size"),
        num_layers=num_layers,
        num_heads=take("num_attention_heads"),
        num_kv_heads=take("num_key_value_heads"),
        head_dim=take("head_dim"),
        rope_theta=theta,
        norm_eps=take("rms_norm_eps"),
        max_length=take("max_position_embeddings"),
        target_layer_ids=tuple(take("target_layer_ids")),
        num_target_layers=take("num_target_layers"),
        block_size=take("block_size"),
        mask_token_id=take("mask_token_id"),
        layout="anchor_first",
        markov_rank=rank,
        confidence_head=confidence,
        confidence_with_markov=bool(take("confidence_head_with_markov", False)) and confidence and rank > 0,
        draft_vocab_size=take("draft_vocab_size", 0),
    )
    unknown = sorted(set(raw) - _IGNORED)
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r} = {raw[unknown[0]]!r}: it might change the drafter")
    return config


def read_drafter(path: str | Path, target: Any) -> tuple[DrafterConfig, dict[str, Any], np.ndarray | None]:
    """Reads a drafter made for `target`: config, nested float32 parameters, and the target id of every draft id
    (None with a full vocabulary). Raises ConfigError naming the file, key or tensor that does not fit."""
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such drafter directory")
    for name in ("config.json", "model.safetensors"):
        if not (directory / name).is_file():
            raise ConfigError(f"{directory}: {name} is missing, so this is no drafter checkpoint")
    where = directory / "config.json"
    try:
        raw = json.loads(where.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON ({error})") from error
    config = normalise_config(raw, where)
    check_target(config, target.config, where)
    try:
        with safe_open(directory / "model.safetensors", framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{directory / 'model.safetensors'}: cannot be read ({error})") from error
    where = directory / "model.safetensors"
    draft_to_target = _read_vocabulary(config, tensors, where)
    _compare_frozen(tensors, target, draft_to_target, where)
    leaves: dict[str, np.ndarray] = {name: np.zeros(shape, np.float32) for name, shape in _leaf_shapes(config).items()}
    for name, (ours, index) in name_table(config).items():
        if name not in tensors:
            raise ConfigError(f"{where}: tensor {name!r} is missing")
        tensor = tensors.pop(name)
        leaf = leaves[ours] if index is None else leaves[ours][index]
        expected = _their_shape(name, leaf.shape)
        if tensor.shape != expected:
            raise ConfigError(f"{where}: tensor {name!r} has shape {list(tensor.shape)}, expected {list(expected)}")
        leaf[...] = tensor.astype(np.float32).reshape(leaf.shape)
    if tensors:
        raise ConfigError(f"{where}: tensor {sorted(tensors)[0]!r} is not used by this drafter, so it is another one")
    return config, _nest(leaves), draft_to_target


def check_target(config: DrafterConfig, target: TargetConfig, where: Path) -> None:
    """Refuses a drafter whose width, vocabulary or tapped layers are not this target's."""
    for ours, theirs, name in (
        (config.d_model, target.d_model, "hidden_size"),
        (config.vocab_size, target.vocab_size, "vocab_size"),
        (config.num_target_layers, target.num_layers, "num_target_layers"),
    ):
        if ours != theirs:
            raise ConfigError(f"{where}: {name} = {ours}, but the target {target.name!r} has {theirs}: another target")


def _read_vocabulary(config: DrafterConfig, tensors: dict[str, Any], where: Path) -> np.ndarray | None:
    d2t, t2d = (tensors.pop(name, None) for name in _VOCABULARY)
    if not config.draft_vocab_size:
        if d2t is not None:
            raise ConfigError(f"{where}: has 'd2t', but the config names no draft_vocab_size")
        return None
    if d2t is None:
        raise ConfigError(f"{where}: tensor 'd2t' is missing (draft_vocab_size = {config.draft_vocab_size})")
    ids = np.arange(len(d2t)) + d2t
    if len(d2t) != config.draft_vocab_size or ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ConfigError(
            f"{where}: 'd2t' has {len(d2t)} entries pointing at ids {ids.min()}..{ids.max()}: expected"
            f" {config.draft_vocab_size} entries within 0..{config.vocab_size - 1}"
        )
    if t2d is not None and not np.array_equal(np.flatnonzero(t2d), ids):
        raise ConfigError(f"{where}: 'd2t' and 't2d' name different ids")
    return ids.astype(np.int32)


def _compare_frozen(tensors: dict[str, Any], target: Any, draft_to_target: np.ndarray | None, where: Path) -> None:
    own = {"embed_tokens.weight": target.params["embed"]}
    own["lm_head.weight"] = target.params.get("head", target.params["embed"])
    for name in _FROZEN:
        if (copy := tensors.pop(name, None)) is None:
            continue
        expected = np.asarray(own[name]).astype(np.float32)
        if name == "lm_head.weight" and draft_to_target is not None:
            expected = expected[draft_to_target]
        # Either side may have been rounded to bfloat16 once.
        if copy.shape != expected.shape or not np.allclose(copy.astype(np.float32), expected, rtol=2**-7, atol=1e-5):
            raise ConfigError(f"{where}: {name!r} is not the target's, so this drafter was made for another target")


def _nest(leaves: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *places, name = path.split("/")
        node = tree
        for place in places:
            node = node.setdefault(place, {})
        node[name] = leaf
    return tree


def write_drafter(
    directory: str | Path,
    config: DrafterConfig,
    params: dict[str, Any],
    draft_to_target: np.ndarray | None,
    notes: dict[str, Any],
    dtype: str = "bfloat16",
) -> None:
    """Writes a checkpoint that `read_drafter` and DeepSpec's own reader take; `notes` record what it was trained on.

    Both files are written beside the directory first and then moved into it. Embedding and head are left out.
    """
    if config.layout != "anchor_first":
        raise ConfigError(f"layout {config.layout!r} cannot be written as a DeepSpec checkpoint, which is anchor_first")
    number = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    tensors: dict[str, np.ndarray] = {}
    for name, (ours, index) in name_table(config).items():
        leaf = params
        for place in ours.split("/"):
            leaf = leaf[place]
        leaf = np.asarray(leaf)
        leaf = leaf if index is None else leaf[index]
        tensors[name] = np.ascontiguousarray(leaf.reshape(_their_shape(name, leaf.shape)).astype(number))
    if draft_to_target is not None:
        ids = np.asarray(draft_to_target, np.int64)
        tensors["d2t"] = ids - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(config.vocab_size), ids)
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        save_file(tensors, Path(scratch) / "model.safetensors")
        text = json.dumps(_their_config(config, notes, dtype), indent=2)
        (Path(scratch) / "config.json").write_text(text + "\n", encoding="utf-8")
        directory.mkdir(exist_ok=True)
        for name in ("model.safetensors", "config.json"):
            (Path(scratch) / name).replace(directory / name)


def _their_config(config: DrafterConfig, notes: dict[str, Any], dtype: str) -> dict[str, Any]:
    raw = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_length,
        "layer_types": ["full_attention"] * config.num_layers,
        "tie_word_embeddings": False,
        "target_layer_ids": list(config.target_layer_ids),
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
    if config.draft_vocab_size:
        raw["draft_vocab_size"] = config.draft_vocab_size
    return raw | {"dspark_jax": notes}
