"""What the public drafter formats share: the table of tensor names, the backbone's config keys, both directions.

A format is a table (their name pattern -> our leaf) and two functions on config.json. Reading and writing walk the
same table, so a tensor cannot be read in one way and written in another.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from dspark_jax.config import SIZE_FIELDS, AlgorithmName, ConfigError, DrafterConfig, TargetConfig
from dspark_jax.drafters.registry import algorithm
from dspark_jax.weights import rope_keys
from dspark_jax.weights.config_keys import Keys

Shape = tuple[int, ...]
Fold = Literal["same", "rows", "columns", "row"]


class Entry(NamedTuple):
    """Where a tensor of theirs goes: our leaf, how the leaf's axes fold into the tensor's two, and the tensor's place
    on the leaf's first axis where one leaf joins several."""

    path: str
    fold: Fold = "same"
    index: int | None = None


BACKBONE: dict[str, Entry] = {
    "fc.weight": Entry("backbone/fc", "columns"),
    "hidden_norm.weight": Entry("backbone/hidden_norm"),
    "norm.weight": Entry("backbone/norm"),
    "layers.{}.input_layernorm.weight": Entry("backbone/layers_{}/attn_norm"),
    "layers.{}.self_attn.q_proj.weight": Entry("backbone/layers_{}/q", "rows"),
    "layers.{}.self_attn.k_proj.weight": Entry("backbone/layers_{}/kv", "rows", 0),
    "layers.{}.self_attn.v_proj.weight": Entry("backbone/layers_{}/kv", "rows", 1),
    "layers.{}.self_attn.q_norm.weight": Entry("backbone/layers_{}/q_norm"),
    "layers.{}.self_attn.k_norm.weight": Entry("backbone/layers_{}/k_norm"),
    "layers.{}.self_attn.o_proj.weight": Entry("backbone/layers_{}/o", "columns"),
    "layers.{}.post_attention_layernorm.weight": Entry("backbone/layers_{}/mlp_norm"),
    "layers.{}.mlp.gate_proj.weight": Entry("backbone/layers_{}/gate"),
    "layers.{}.mlp.up_proj.weight": Entry("backbone/layers_{}/up"),
    "layers.{}.mlp.down_proj.weight": Entry("backbone/layers_{}/down"),
}
HEADS: dict[str, Entry] = {
    "markov_head.markov_w1.weight": Entry("markov/w1"),
    "markov_head.markov_w2.weight": Entry("markov/w2"),
    "markov_head.gate_proj.weight": Entry("markov/gate"),
    "markov_head.gate_proj.bias": Entry("markov/gate_bias"),
    "markov_head.joint_proj.weight": Entry("markov/joint"),
    "markov_head.joint_proj.bias": Entry("markov/joint_bias"),
    "confidence_head.proj.weight": Entry("confidence_head/weight", "row"),
    "confidence_head.proj.bias": Entry("confidence_head/bias", "row"),
}
# What our own files hold beyond what the public formats have words for: the other sequential heads, and a tied W1.
OWN_HEADS: dict[str, Entry] = {
    "markov_head.tied_proj.weight": Entry("markov/tied"),
    "markov_head.ngram.weight": Entry("markov/ngram", "rows"),
    "markov_head.hash_table.weight": Entry("markov/hash_table"),
    "markov_head.hash_key_proj.weight": Entry("markov/hash_key"),
    "markov_head.hash_out_proj.weight": Entry("markov/hash_out"),
    "markov_head.hidden_proj.weight": Entry("markov/hidden_in"),
    "markov_head.input_norm.weight": Entry("markov/z_norm"),
    "markov_head.cell.qkv_proj.weight": Entry("markov/cell_qkv", "rows"),
    "markov_head.cell.gates_proj.weight": Entry("markov/cell_gates", "rows"),
    "markov_head.cell.beta_proj.weight": Entry("markov/cell_beta"),
    "markov_head.cell.in_proj.weight": Entry("markov/cell_in"),
    "markov_head.cell.A_log": Entry("markov/a_log"),
    "markov_head.cell.D": Entry("markov/skip"),
    "markov_head.cell.dt_bias": Entry("markov/dt_bias"),
    "markov_head.cell.decay_proj.0.weight": Entry("markov/decay_in"),
    "markov_head.cell.decay_proj.1.weight": Entry("markov/decay_out", "rows"),
    "markov_head.cell.gate_proj.weight": Entry("markov/out_gate", "rows"),
    "markov_head.cell.gate_proj.0.weight": Entry("markov/out_gate_in"),
    "markov_head.cell.gate_proj.1.weight": Entry("markov/out_gate_out", "rows"),
    "markov_head.cell.gate_proj.1.bias": Entry("markov/out_gate_bias"),
    "markov_head.cell.norm.weight": Entry("markov/out_norm"),
    "markov_head.cell.out_proj.weight": Entry("markov/cell_out"),
    "markov_head.prefix_gru.weight_ih_l0": Entry("markov/gru_in", "rows"),
    "markov_head.prefix_gru.weight_hh_l0": Entry("markov/gru_state", "rows"),
    "markov_head.embed_proj.0.weight": Entry("markov/merge"),
}
_PUBLISHED_HEADS = ("vanilla", "gated", "rnn")
_OWN_SIZES = (*SIZE_FIELDS, "pure_draft_prefix_len")
# The target's own matrices, of which a checkpoint may hold copies.
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
# The key under which our own files say how a drafter came about.
NOTES = "dspark_jax"

# Keys of a transformers config that a drafter may carry without changing what is computed here.
HARMLESS = frozenset({
    "_attn_implementation", "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id",
    "chunk_size_feed_forward", NOTES, "dtype", "eos_token_id", "id2label", "initializer_range",
    "is_encoder_decoder", "label2id", "max_anchors", "max_window_layers", "model_type", "num_anchors",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type", "return_dict",
    "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip


class Description(NamedTuple):
    """What config.json says beside the shape: the storage dtype and the notes on how the drafter came about."""

    dtype: str
    notes: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Format:
    """`normalise` turns their config.json into ours; it may be told the target; None: files are read as a target's.
    `describe` is the way back, and raises ConfigError for what the format cannot say; None where the format is only
    read. A format with several kinds of drafters has one entry, under the same name, for each `algorithm`. `cut` gives
    the tensors to write where no table can. `extends` says what of a drafter is stored in words of our own, which other
    readers of the format do not know."""

    name: str
    title: str
    table: Mapping[str, Entry]
    normalise: Callable[[Keys, TargetConfig | None], DrafterConfig] | None
    describe: Callable[[DrafterConfig, Description], dict[str, Any]] | None = None
    algorithm: AlgorithmName = "dspark"
    cut: Callable[[DrafterConfig, dict[str, Any]], dict[str, np.ndarray]] | None = None
    extends: Callable[[DrafterConfig], dict[str, bool]] | None = None


@functools.cache
def leaf_shapes(config: DrafterConfig) -> dict[str, Shape]:
    """Shape of every trained leaf, by path."""
    tree = jax.eval_shape(lambda: algorithm(config).init_params(config, jax.random.key(0)))
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(key.key for key in path): leaf.shape for path, leaf in flat}


def name_table(table: Mapping[str, Entry], config: DrafterConfig) -> dict[str, Entry]:
    """Every tensor of a checkpoint of this shape by their name."""
    leaves, named = leaf_shapes(config), {}
    for pattern, entry in table.items():
        for i in range(config.num_layers) if "{}" in pattern else (0,):
            ours = entry._replace(path=entry.path.format(i))
            # A leaf may join fewer tensors than another family's does: no values where keys serve for them.
            if ours.path in leaves and (ours.index is None or ours.index < leaves[ours.path][0]):
                named[pattern.format(i)] = ours
    return named


def their_shape(entry: Entry, leaf: Shape) -> Shape:
    """The shape in which a leaf of shape `leaf` is stored: vectors as they are, matrices [out, in]."""
    shape = leaf if entry.index is None else leaf[1:]
    match entry.fold:
        case "rows":
            return (int(np.prod(shape[:-1])), shape[-1])
        case "columns":
            return (shape[0], int(np.prod(shape[1:])))
        case "row":
            return (1, *shape)
    return shape


def backbone_fields(keys: Keys, target: TargetConfig | None, usual_theta: float | None = None) -> dict[str, Any]:
    """The fields of DrafterConfig that every format takes from a Qwen3-type transformers config. `usual_theta` stands
    for a rope_theta that files of the format may leave out."""
    theta, scaling = rope_keys.read_rope(keys.where, keys.rest(), usual_theta)
    for key in rope_keys.KEYS:
        keys.take(key, (dict, int, float), None)
    for key, value in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        keys.expect(key, value)
    keys.expect("quantization_config")
    heads, d_model = keys.take("num_attention_heads"), keys.take("hidden_size")
    return {
        "vocab_size": keys.take("vocab_size"),
        "d_model": d_model,
        "d_ff": keys.take("intermediate_size"),
        "num_layers": keys.take("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": keys.take("num_key_value_heads", default=heads),
        "head_dim": keys.take("head_dim", default=d_model // max(heads, 1)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": float(keys.take("rms_norm_eps", (int, float))),
        "max_length": keys.take("max_position_embeddings", default=target.max_length if target else 32768),
    }


def reduced_vocabulary(keys: Keys, vocab_size: int) -> int:
    """How many ids a reduced draft vocabulary has; 0, which is all of them, also where a file counts the whole one."""
    size = keys.take("draft_vocab_size", default=0)
    return 0 if size == vocab_size else size


def window_fields(keys: Keys, num_layers: int, causal: bool | None, causal_windows: bool) -> dict[str, Any]:
    """Windows of the layers by `layer_types`. `causal` True or False speaks for all layers; None leaves it to the
    format: full layers never are, those with a window are where `causal_windows`."""
    window, used = keys.take("sliding_window", default=0), keys.take("use_sliding_window", bool, None)
    types = keys.take("layer_types", list, None)
    if types is None:
        first = keys.rest().get("max_window_layers") or 0
        types = ["sliding_attention" if used and i >= first else "full_attention" for i in range(num_layers)]
    if len(types) != num_layers or set(types) - {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"{keys.where}: layer_types = {types}: expected 'full_attention' or 'sliding_attention' for each of"
            f" {num_layers} layers"
        )
    sliding = [kind == "sliding_attention" for kind in types]
    if any(sliding) and (window <= 0 or used is False):
        raise ConfigError(
            f"{keys.where}: layer_types = {types} needs a positive sliding_window, found {window or None}"
            f" with use_sliding_window = {used}"
        )
    layer_causal = [causal if causal is not None else one and causal_windows for one in sliding]
    return {
        "layer_windows": tuple(window if one else 0 for one in sliding) if any(sliding) else (),
        "layer_causal": tuple(layer_causal) if any(layer_causal) else (),
    }


def head_fields(keys: Keys, own: bool = False) -> dict[str, Any]:
    """Sequential and confidence heads, as DeepSpec names their settings. `own`: with those that only our files have."""
    rank, confidence = keys.take("markov_rank", default=0), keys.take("enable_confidence_head", bool, False)
    kind, with_markov = (
        keys.take("markov_head_type", str, "vanilla"),
        keys.take("confidence_head_with_markov", bool, False),
    )
    if rank and not own and kind not in _PUBLISHED_HEADS:
        expected = ", ".join(map(repr, _PUBLISHED_HEADS))
        raise ConfigError(f"{keys.where}: markov_head_type = {kind!r}: expected one of {expected}")
    fields = {
        "markov_rank": rank,
        "markov_head_type": kind if rank else "vanilla",
        "confidence_head": confidence,
        "confidence_with_markov": with_markov and confidence and rank > 0,
    }
    if own:
        fields |= {field: keys.take(field, default=0) for field in _OWN_SIZES}
        fields["markov_tied"] = keys.take("markov_tied", bool, False)
    return fields


def tap_fields(keys: Keys, target: TargetConfig | None, ids: tuple[int, ...]) -> dict[str, Any]:
    """Tapped layers. Where the file does not count the target's layers: our own note of it, or the target's number."""
    notes = keys.rest().get(NOTES)
    count = notes.get("num_target_layers") if isinstance(notes, dict) else None
    count = count or (target.num_layers if target else max(ids, default=-1) + 2)
    return {"target_layer_ids": ids, "num_target_layers": keys.take("num_target_layers", default=count)}


def their_backbone(config: DrafterConfig) -> dict[str, Any]:
    """The transformers keys that `backbone_fields` and `window_fields` read."""
    windows = config.layer_windows or (0,) * config.num_layers
    if len(set(windows) - {0}) > 1:
        raise ConfigError(f"layer_windows = {config.layer_windows}: the public formats have one window for all layers")
    return {
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_length,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "sliding_window": max(windows) or None,
        "use_sliding_window": any(windows),
    }


def their_heads(config: DrafterConfig) -> dict[str, Any]:
    """The keys that `head_fields` reads; those that are our own only where they say something."""
    raw: dict[str, Any] = {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.confidence_head,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
    raw |= {field: getattr(config, field) for field in _OWN_SIZES if getattr(config, field)}
    return raw | ({"markov_tied": True} if config.markov_tied else {})


def unpublished_heads(config: DrafterConfig) -> dict[str, bool]:
    """For `refuse`: what a format with the published heads alone cannot hold."""
    return {
        f"a {config.markov_head_type} head": config.markov_head_type not in _PUBLISHED_HEADS,
        "a tied Markov head (export --target multiplies it out)": config.markov_tied,
    }


def refuse(title: str, faults: Mapping[str, bool]) -> None:
    """Raises ConfigError with the first fault that is there: something a format has no words for."""
    for fault, there in faults.items():
        if there:
            raise ConfigError(f"the {title} format cannot hold {fault}; choose another --format")
