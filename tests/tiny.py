"""Tiny random models for tests: loud weights, so that logits differ and a fault shows; no compilation to make them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import sharding
from dspark_jax.config import DrafterConfig, TargetConfig, plain_drafter
from dspark_jax.drafters import Drafter
from dspark_jax.drafters.base import BlockFeatures, Committed, Frozen
from dspark_jax.drafters.drafter import frozen_parts
from dspark_jax.drafters.registry import algorithm
from dspark_jax.target import Target, TargetModel

TARGET = TargetConfig(
    family="qwen3",
    vocab_size=40,
    d_model=32,
    d_ff=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,  # not d_model / num_heads
    rope_theta=1e4,
    norm_eps=1e-6,
    max_length=512,
    tied_head=False,
)


def fill(shapes: Any, seed: int) -> Any:
    """Random float32 weights of these shapes: matrices keep the scale of what they multiply, norms are near 1."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> jax.Array:
        name = path[-1].key
        if name == "bias":
            return jnp.asarray(rng.normal(size=leaf.shape), jnp.float32)
        if len(leaf.shape) < 2:
            return jnp.asarray(1 + 0.3 * rng.normal(size=leaf.shape), jnp.float32)
        loud = ("embed", "w1", "predecessor", "base_kernel")
        fan_in = 1 if name in loud else np.prod(leaf.shape[1:]) if name in ("o", "fc") else leaf.shape[-1]
        return jnp.asarray(rng.normal(size=leaf.shape) / np.sqrt(fan_in), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def make_target(seed: int = 0, mixing: float = 1.0, **changes: Any) -> Target:
    """`mixing` scales what layers add to the embedding: near 0, a next token depends on little but the last one."""
    config = dataclasses.replace(TARGET, **changes)
    ids = jnp.zeros((1, 1), jnp.int32)
    shapes = jax.eval_shape(lambda: TargetModel(config).init(jax.random.key(0), ids, ids))["params"]
    params = fill(shapes, seed)
    for layer in (params[f"layers_{i}"] for i in range(config.num_layers)):
        layer.update(o=layer["o"] * mixing, down=layer["down"] * mixing)
    return Target(config, params)


def make_drafter(target: Target, seed: int = 1, draft_to_target: np.ndarray | None = None, **changes: Any) -> Drafter:
    """A two-layer drafter with both heads, four drafts a block, on two taps of `target`."""
    t = target.config
    config = DrafterConfig(
        vocab_size=t.vocab_size,
        d_model=t.d_model,
        d_ff=t.d_ff,
        num_layers=2,
        num_heads=t.num_heads,
        num_kv_heads=t.num_kv_heads,
        head_dim=t.head_dim,
        rope_theta=t.rope_theta,
        norm_eps=t.norm_eps,
        max_length=t.max_length,
        target_layer_ids=(-1, 0),
        num_target_layers=t.num_layers,
        block_size=4,
        mask_token_id=t.vocab_size - 1,
        markov_rank=t.d_model,
        confidence_head=True,
        confidence_with_markov=True,
        draft_vocab_size=0 if draft_to_target is None else len(draft_to_target),
    )
    config = dataclasses.replace(config, **changes)
    shapes = jax.eval_shape(lambda: algorithm(config).init_params(config, jax.random.key(0)))
    return Drafter(config, fill(shapes, seed), frozen_parts(target.params, draft_to_target))


def good_drafter(target: Target, draft_to_target: np.ndarray | None = None) -> Drafter:
    """A drafter that is often right about a target with little `mixing`: its Markov head is that target without
    layers, and its backbone adds nothing."""
    drafter = make_drafter(target, draft_to_target=draft_to_target, num_layers=1)
    embed = target.params["embed"]
    w1 = embed / jnp.sqrt(jnp.mean(embed * embed, axis=1, keepdims=True))
    markov = {"w1": w1, "w2": drafter.frozen.head_VD * target.params["final_norm"][None, :]}
    backbone = drafter.params["backbone"] | {"norm": jnp.zeros(target.config.d_model)}
    return dataclasses.replace(drafter, params=drafter.params | {"markov": markov, "backbone": backbone})


CHAIN: dict[str, Any] = {
    "num_layers": 1,
    "mask_token_id": -1,
    "markov_rank": 0,
    "confidence_with_markov": False,
}


def make_chain(target: Target, algorithm: str, draft_to_target: np.ndarray | None = None, **changes: Any) -> Drafter:
    """An EAGLE-3 or MTP drafter with a confidence head, four drafts a block."""
    taps = {"target_layer_ids": ()} if algorithm == "mtp" else {}
    return make_drafter(target, draft_to_target=draft_to_target, **(CHAIN | taps | {"algorithm": algorithm} | changes))


def good_chain(target: Target, algorithm: str) -> Drafter:
    """As `good_drafter`: the head sees the newest token's embedding, normed, and nothing else."""
    nothing = {"norm_before_residual": True} if algorithm == "eagle3" else {}
    drafter = make_chain(target, algorithm, **nothing)
    c, backbone = drafter.config, dict(drafter.params["backbone"])
    layer, ones, eye = dict(backbone["layers_0"]), jnp.ones(c.d_model), jnp.eye(c.d_model)
    layer["down"] = layer["down"] * 0
    if algorithm == "mtp":
        backbone["fc"] = jnp.stack([eye, eye * 0], axis=1)
        layer["o"] = layer["o"] * 0
    else:
        # Queries are keys, sharp, so a row attends to itself; its value is its embedding, and o puts that together.
        group = c.num_heads // c.num_kv_heads
        layer["q"] = jnp.repeat(layer["kv"][0], group, axis=0)
        layer |= {"q_norm": jnp.full(c.head_dim, 30.0), "k_norm": jnp.ones(c.head_dim)}
        value = eye.reshape(c.num_kv_heads, c.head_dim, c.d_model)
        layer["kv"] = layer["kv"].at[1].set(jnp.concatenate([value, value * 0], axis=-1))
        layer["o"] = jnp.repeat(value, group, axis=0).transpose(2, 0, 1) / group
    backbone |= {"embed_norm": ones, "hidden_norm": ones * 0, "norm": target.params["final_norm"], "layers_0": layer}
    return dataclasses.replace(drafter, params=drafter.params | {"backbone": backbone})


def draft_model(target: Target, model: Target, confidence_head: bool = False) -> Drafter:
    """`model` as the plain draft model of `target`, four drafts a block."""
    config = plain_drafter(model.config, 4, confidence_head)
    params = {"backbone": model.params}
    if confidence_head:
        params["confidence_head"] = fill({"weight": jnp.zeros(config.d_model), "bias": jnp.zeros(())}, 5)
    return Drafter(config, params, frozen_parts(target.params, None))


DFLASH2: dict[str, Any] = {
    "algorithm": "dflash2", "markov_rank": 0, "confidence_head": False, "confidence_with_markov": False,
    "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5,
}  # fmt: skip


def committed(tokens: np.ndarray | jax.Array, taps: np.ndarray | jax.Array) -> Committed:
    """What drafters see of tokens that have been through the target; hidden states like the last layer tapped."""
    return Committed(jnp.asarray(tokens), jnp.asarray(taps), jnp.asarray(taps)[:, :, -1])


@functools.partial(jax.jit, static_argnums=0)
def block_features(
    config: DrafterConfig, params: Any, frozen: Frozen, tokens: jax.Array, taps: jax.Array, anchors: jax.Array
) -> BlockFeatures:
    """A teacher-forced pass, before the vocabulary work, over rows of one document each."""
    run = algorithm(config)
    rows = run.context_rows(config, params, frozen, committed(tokens, taps), jnp.zeros_like(tokens))
    return run.teacher_forced_blocks(config, params, frozen, tokens, rows, anchors)


def random_tokens(seed: int, *shape: int, vocab_size: int = TARGET.vocab_size) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, shape).astype(np.int32)


def normal(rng: np.random.Generator, *shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def timeless() -> float:
    """A clock under which no round takes any time: a policy then goes by the curves that a test made up."""
    return 0.0


def forced_outputs(drafter: Drafter, seen: Committed, anchors: np.ndarray) -> dict[str, np.ndarray]:
    """Teacher-forced logits and, with that head, confidences, each with a last axis."""
    out = drafter.teacher_forced(seen.tokens_BS, seen.taps_BSMD, anchors, hidden_BSD=seen.hidden_BSD)
    found = {"logits": np.asarray(out.logits_BAGV)}
    if drafter.config.confidence_head:
        found["confidence"] = np.asarray(out.confidence_BAG)[..., None]
    else:
        assert out.confidence_BAG is None
    return found


def check_a_rule_splits_every_weight(params: Any) -> None:
    """Every leaf has a place in the table of dspark_jax/sharding.py, with an entry an axis."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        assert len(sharding.spec(sharding.path_string(path), leaf.ndim)) == leaf.ndim
