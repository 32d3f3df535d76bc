"""DFlash 2: the block-parallel backbone with convolutions, then a selector that walks along the block's candidates.

Backbone, context and confidence head are those of DSpark without a Markov head (`dspark.py`; the layers' convolutions
are in `conv.py`). Each slot has K candidates, the tokens that the backbone alone ranks highest; a draft is drawn among
them by logit plus the selector's score after the token just drafted, so a draft's law lives on K tokens.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax import layers
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import base, dspark
from dspark_jax.drafters.base import BlockFeatures, Frozen, Proposal
from dspark_jax.drafters.dspark import cache_layers as cache_layers
from dspark_jax.drafters.dspark import commit as commit
from dspark_jax.drafters.dspark import context_rows as context_rows
from dspark_jax.drafters.heads import ConfidenceHead
from dspark_jax.drafters.selector import Selector, pair_scores
from dspark_jax.kv_cache import Cache
from dspark_jax.sampling import SamplingRows, sample_block

Params = dict[str, Any]


def init_params(config: DrafterConfig, rng: jax.Array) -> Params:
    """Fresh float32 weights: those of DFlash, which this drafter equals as long as convolutions and selector add
    nothing, which is how they begin."""
    backbone_rng, selector_rng = jax.random.split(rng)
    hidden_1D = jnp.zeros((1, config.d_model))
    selector: Any = Selector(config).init(selector_rng, hidden_1D, method="project")
    return dspark.init_params(config, backbone_rng) | {"selector": selector["params"]}


def _select(config: DrafterConfig, params: Params, *arguments: Any, method: str) -> jax.Array:
    selected: Any = Selector(config).apply({"params": params["selector"]}, *arguments, method=method)
    return selected


def teacher_forced_blocks(
    config: DrafterConfig, params: Params, frozen: Frozen, tokens_BS: jax.Array, rows: Any, anchors_BA: jax.Array,
    detach_confidence: bool = False,
) -> BlockFeatures:  # fmt: skip
    """See `Algorithm`. The latent is the selector's query, [B, A, G, r]."""
    blocks = dspark.teacher_forced_blocks(config, params, frozen, tokens_BS, rows, anchors_BA, detach_confidence)
    previous_BAG = base.previous_tokens(tokens_BS, anchors_BA, config.num_drafts)
    predecessors_BAGR = _select(config, params, frozen, previous_BAG, method="predecessors")
    projected_BAGR = _select(config, params, blocks.hidden_BAGD, method="project")
    return blocks._replace(latent_BAGR=predecessors_BAGR * projected_BAGR)


def _law(
    config: DrafterConfig, params: Params, frozen: Frozen, base_logits: jax.Array, latent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Logits [..., V] of the law, and its part on the candidates [..., K], best ranked first."""
    top, ids = jax.lax.top_k(base_logits, config.selector_top_k)
    scores = top + pair_scores(latent, _select(config, params, frozen, ids, method="successors"))
    nothing = jnp.full(base_logits.shape, base.NEVER)
    return jnp.put_along_axis(nothing, ids, scores, axis=-1, inplace=False), scores


def draft_logits(config: DrafterConfig, params: Params, frozen: Frozen, hidden: jax.Array, latent: Any) -> jax.Array:
    """See `Algorithm`: `base.NEVER` beside the candidates."""
    return _law(config, params, frozen, base.parallel_logits(config, frozen, hidden), latent)[0]


def label_scores(
    config: DrafterConfig, params: Params, frozen: Frozen, hidden: jax.Array, latent: Any, labels: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `base.LabelScores`. The cross-entropy is over the candidates, the last of which gives way to a label that is
    not among them."""
    base_logits = base.parallel_logits(config, frozen, hidden)
    logits, scores = _law(config, params, frozen, base_logits, latent)
    index = jnp.maximum(labels, 0)[..., None]
    codes = _select(config, params, frozen, index, method="successors")
    label_score = jnp.take_along_axis(base_logits, index, axis=-1) + pair_scores(latent, codes)
    among = jnp.take_along_axis(logits, index, axis=-1) > 0.5 * base.NEVER
    last = jnp.where(among, scores[..., -1:], label_score)
    rivals = jnp.concatenate([scores[..., :-1], last], axis=-1)
    return logits, jax.nn.logsumexp(rivals, axis=-1) - label_score[..., 0]


def propose(
    config: DrafterConfig, params: Params, frozen: Frozen, caches: Sequence[Cache], first_R: jax.Array,
    anchor_R: jax.Array, keys_RG: jax.Array, rows: SamplingRows, greedy: bool = False, shortlist: int = 0,
) -> Proposal:  # fmt: skip
    """See `Algorithm`. A shortlist shorter than the selector's own candidates leaves the lowest of them out."""
    hidden_RGD = dspark.draft_hidden(config, params, frozen, caches, first_R, anchor_R)
    candidates = min(config.selector_top_k, shortlist or config.selector_top_k)
    base_RGK, ids_RGK = jax.lax.top_k(base.parallel_logits(config, frozen, hidden_RGD), candidates)
    support_RGK = ids_RGK if frozen.draft_to_target_V is None else frozen.draft_to_target_V[ids_RGK]
    # All that needs no draft is looked up for the whole block at once.
    projected_RGr = _select(config, params, hidden_RGD, method="project")
    codes_RGKr = _select(config, params, frozen, ids_RGK, method="successors")

    def step(state: None, previous_R: jax.Array, slot: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        projected_Rr, codes_RKr = slot
        predecessor_Rr = _select(config, params, frozen, previous_R, method="predecessors")
        return state, pair_scores(predecessor_Rr * projected_Rr, codes_RKr)

    slots = (projected_RGr, codes_RGKr)
    sample = sample_block(step, None, first_R, base_RGK, slots, keys_RG, rows, None, greedy, support_RGK)
    if not config.confidence_head:
        return Proposal(sample, None)
    confidence_RG: Any = ConfidenceHead().apply({"params": params["confidence_head"]}, hidden_RGD)
    return Proposal(sample, confidence_RG)


def fold(config: DrafterConfig, params: Params, frozen: Frozen) -> tuple[DrafterConfig, Params]:
    """See `base.Fold`: tied codebooks as tables over the vocabulary, in the dtype of the projections."""
    if not config.selector_tied:
        return config, params
    selector = dict(params["selector"])
    predecessor, successor = (selector.pop(f"{name}_projection") for name in ("predecessor", "successor"))
    drafted_VD = frozen.embed_VD if frozen.draft_to_target_V is None else frozen.embed_VD[frozen.draft_to_target_V]
    for name, table_VD, projection in (
        ("predecessor", frozen.embed_VD, predecessor),
        ("successor", drafted_VD, successor),
    ):
        selector[name] = layers.linear(jnp.asarray(table_VD), jnp.asarray(projection)).astype(projection.dtype)
    return dataclasses.replace(config, selector_tied=False), params | {"selector": selector}
