"""A training step as one would write it down first: the yardstick of `benchmarks.train_cost`.

The same loss of the same drafter, after the formulas and with nothing clever: the target attends under a causal mask of
[S, S], its logits are taken at every position, all blocks of a row attend at once over all context keys and all blocks'
keys under one dense mask, draft logits and laws are whole arrays, and JAX differentiates all of it. Dots run in the
dtype of the weights and return float32, as they do in the step that is measured against this.
"""

from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax import layers
from train.objective import Batch, StepModels, StepWeights

Params = dict[str, Any]


def loss(models: StepModels, params: Params, weights: StepWeights, batch: Batch, all_positions: bool) -> jax.Array:
    """The DSpark loss of one row. `all_positions` False: the target's logits only where some slot needs them."""
    c = models.drafter
    tokens_S, anchors_A = batch.tokens_BS[0], batch.anchors_BA[0]
    hidden_SD, taps_SMD = jax.lax.stop_gradient(_target(models, weights.target_params, tokens_S))
    at_AG = anchors_A[:, None] + jnp.arange(c.num_drafts)[None, :]
    if all_positions:
        p_AGV = jax.nn.softmax(_dot(hidden_SD, weights.frozen.head_VD), axis=-1)[at_AG]
    else:
        p_AGV = jax.nn.softmax(_dot(hidden_SD[at_AG], weights.frozen.head_VD), axis=-1)
    p_AGV = jax.lax.stop_gradient(p_AGV)
    hidden_AGD = _drafts(models, params, weights, tokens_S, taps_SMD, anchors_A)
    embedded_AGr = params["markov"]["w1"][tokens_S[at_AG]]
    logits_AGV = _dot(hidden_AGD, weights.frozen.head_VD) + _dot(embedded_AGr, params["markov"]["w2"])
    seen = jnp.concatenate([hidden_AGD, embedded_AGr.astype(jnp.float32)], axis=-1)
    head = params["confidence_head"]
    confidence_AG = jnp.einsum("AGD,D->AG", seen, head["weight"]) + head["bias"]

    labels_AG = tokens_S[at_AG + 1]
    ce_AG = -jnp.take_along_axis(jax.nn.log_softmax(logits_AGV), labels_AG[..., None], axis=-1)[..., 0]
    tv_AG = jnp.sum(jnp.abs(jax.nn.softmax(logits_AGV) - p_AGV), axis=-1)
    accepted_AG = jax.lax.stop_gradient(jnp.clip(1.0 - 0.5 * tv_AG, 0.0, 1.0))
    bce_AG = jax.nn.softplus(confidence_AG) - accepted_AG * confidence_AG
    weight_AG = jnp.exp(-jnp.arange(c.num_drafts, dtype=jnp.float32) / models.loss.decay)[None] * jnp.ones_like(ce_AG)
    term_AG = models.loss.ce * ce_AG + models.loss.tv * tv_AG + models.loss.confidence * bce_AG
    return jnp.sum(weight_AG * term_AG) / (jnp.sum(weight_AG) + 1e-6)


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [..., in] times w [out, in], in float32."""
    flat = jax.lax.dot_general(
        x.reshape(-1, x.shape[-1]).astype(w.dtype), w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return flat.reshape(*x.shape[:-1], w.shape[0])


def _attention(q_QNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, mask_QT: jax.Array) -> jax.Array:
    group = q_QNH.shape[1] // k_TKH.shape[1]
    k_TNH, v_TNH = (jnp.repeat(x, group, axis=1) for x in (k_TKH, v_TKH))
    bias_QT = jnp.where(mask_QT, 0.0, -1e30).astype(jnp.float32)
    scores_NQT = jnp.einsum("QNH,TNH->NQT", q_QNH, k_TNH) * q_QNH.shape[-1] ** -0.5 + bias_QT[None]
    return jnp.einsum("NQT,TNH->QNH", jax.nn.softmax(scores_NQT, axis=-1), v_TNH).reshape(q_QNH.shape[0], -1)


def _target(models: StepModels, params: Params, tokens_S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Hidden states [S, D] after the final norm, and the tapped layers [S, M, D], of a Llama."""
    c, length = models.target, tokens_S.shape[0]
    table = layers.rotary_table(jnp.arange(length), c.head_dim, c.rope_theta)
    mask_SS = jnp.arange(length)[None, :] <= jnp.arange(length)[:, None]
    group = c.num_heads // c.num_kv_heads
    x_SD, tapped = params["embed"][tokens_S].astype(jnp.float32), {}
    for i in range(c.num_layers):
        w = params[f"layers_{i}"]
        u_SD = layers.rms_norm(x_SD, w["attn_norm"], c.norm_eps)
        qkv = _dot(u_SD, w["qkv"].reshape(-1, c.d_model)).reshape(length, c.num_kv_heads, group + 2, c.head_dim)
        q_SNH = layers.rotate(qkv[:, :, :group].reshape(length, c.num_heads, c.head_dim), table)
        out = _attention(q_SNH, layers.rotate(qkv[:, :, group], table), qkv[:, :, group + 1], mask_SS)
        x_SD = x_SD + _dot(out, w["o"].reshape(c.d_model, -1))
        x_SD = x_SD + _mlp(layers.rms_norm(x_SD, w["mlp_norm"], c.norm_eps), w)
        tapped[i] = x_SD
    hidden_SD = layers.rms_norm(x_SD, params["final_norm"], c.norm_eps)
    return hidden_SD, jnp.stack([tapped[i] for i in models.drafter.target_layer_ids], axis=1)


def _mlp(x: jax.Array, w: Params) -> jax.Array:
    return _dot(jax.nn.silu(_dot(x, w["gate"])) * _dot(x, w["up"]), w["down"])


def _drafts(
    models: StepModels,
    params: Params,
    weights: StepWeights,
    tokens_S: jax.Array,
    taps_SMD: jax.Array,
    anchors_A: jax.Array,
) -> jax.Array:
    """Hidden states [A, G, D] of all blocks: one attention over context and blocks for all of them."""
    c, block, eps = models.drafter, params["backbone"], models.drafter.norm_eps
    length, count = tokens_S.shape[0], anchors_A.shape[0]
    fused_SD = _dot(taps_SMD.reshape(length, -1), block["fc"].reshape(c.d_model, -1))
    fused_SD = layers.rms_norm(fused_SD, block["hidden_norm"], eps)
    ids_AG = jnp.full((count, c.block_size), c.mask_token_id).at[:, 0].set(tokens_S[anchors_A])
    x_QD = weights.frozen.embed_VD[ids_AG].reshape(count * c.block_size, -1).astype(jnp.float32)
    position_Q = (anchors_A[:, None] + jnp.arange(c.block_size)[None, :]).reshape(-1)
    owner_Q = jnp.repeat(jnp.arange(count), c.block_size)
    context_QS = jnp.arange(length)[None, :] < jnp.repeat(anchors_A, c.block_size)[:, None]
    mask_QT = jnp.concatenate([context_QS, owner_Q[:, None] == owner_Q[None, :]], axis=1)
    tables = [layers.rotary_table(p, c.head_dim, c.rope_theta) for p in (jnp.arange(length), position_Q)]
    for i in range(c.num_layers):
        w = block[f"layers_{i}"]
        u_QD = layers.rms_norm(x_QD, w["attn_norm"], eps)
        q_QNH = _dot(u_QD, w["q"].reshape(-1, c.d_model)).reshape(-1, c.num_heads, c.head_dim)
        q_QNH = layers.rotate(layers.rms_norm(q_QNH, w["q_norm"], eps), tables[1])
        kv = [
            _dot(rows, w["kv"].reshape(-1, c.d_model)).reshape(-1, 2, c.num_kv_heads, c.head_dim)
            for rows in (fused_SD, u_QD)
        ]
        keys = [
            layers.rotate(layers.rms_norm(part[:, 0], w["k_norm"], eps), table)
            for part, table in zip(kv, tables, strict=True)
        ]
        k_TKH, v_TKH = jnp.concatenate(keys), jnp.concatenate([part[:, 1] for part in kv])
        x_QD = x_QD + _dot(_attention(q_QNH, k_TKH, v_TKH, mask_QT), w["o"].reshape(c.d_model, -1))
        x_QD = x_QD + _mlp(layers.rms_norm(x_QD, w["mlp_norm"], eps), w)
    return layers.rms_norm(x_QD, block["norm"], eps).reshape(count, c.block_size, -1)
