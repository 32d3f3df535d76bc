"""Plain draft models: a smaller language model of the target's tokens drafts for it (Leviathan et al. 2023).

The drafter is a whole decoder of the kinds that target.py runs, with its own embedding, head and caches, and reads
nothing of the target but the tokens. `commit` is its cached forward over them. A draft at anchor a starts with the
token there and goes on from its own drafts, whose keys and values are kept beside the caches (`kv_cache.BlockRows`)
until verification has had its say. Training is one causal pass over the text: slot i of the block at anchor a is what
the pass says behind token a + i.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax import target as target_lib
from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.drafters import base, stepwise
from dspark_jax.drafters.base import BlockFeatures, Committed, Frozen, Params, Proposal
from dspark_jax.drafters.heads import ConfidenceHead
from dspark_jax.sampling import SamplingRows


def _decoder(config: DrafterConfig) -> TargetConfig:
    assert config.language_model is not None  # DrafterConfig sees to it
    return config.language_model


def init_params(config: DrafterConfig, rng: jax.Array) -> Params:
    """Fresh float32 weights: Normal(0, 0.02), norms 1, biases 0."""
    ids, decoder = jnp.zeros((1, 1), jnp.int32), _decoder(config)
    variables: Any = target_lib.TargetModel(decoder).init(rng, ids, ids)
    params = {"backbone": variables["params"]}
    if config.confidence_head:
        head: Any = ConfidenceHead().init(jax.random.fold_in(rng, 1), jnp.zeros((1, decoder.d_model)))
        params["confidence_head"] = head["params"]
    return params


def cache_layers(config: DrafterConfig) -> list[tuple[int, int]]:
    """See `Algorithm`: one cache a layer."""
    decoder = _decoder(config)
    shapes = map(decoder.layer, range(decoder.num_layers))
    return [(shape.num_kv_heads, shape.head_dim) for shape in shapes]


def commit(
    config: DrafterConfig, params: Params, frozen: Frozen, caches: Any, committed: Committed, position_BS: jax.Array,
) -> list[Any]:  # fmt: skip
    """See `Algorithm`: the tokens go through the whole decoder."""
    del frozen
    out = target_lib.features(_decoder(config), params["backbone"], committed.tokens_BS, position_BS, caches)
    return out.caches


def propose(
    config: DrafterConfig,
    params: Params,
    frozen: Frozen,
    caches: Sequence[Any],
    first_R: jax.Array,
    anchor_R: jax.Array,
    keys_RG: jax.Array,
    rows: SamplingRows,
    greedy: bool = False,
    shortlist: int = 0,
) -> Proposal:
    """See `Algorithm`: G steps of the decoder, each fed what the one before it drew."""
    decoder, anchor_R1 = _decoder(config), anchor_R[:, None]
    blocks = [
        kv_cache.empty_block(cache, anchor_R1, config.num_drafts, *shape)
        for cache, shape in zip(caches, cache_layers(config), strict=True)
    ]

    def step(own: list[Any], token_R: jax.Array, slot: jax.Array) -> tuple[list[Any], jax.Array]:
        seen: Any = [block.with_rows(*kv) for block, kv in zip(blocks, own, strict=True)]
        out = target_lib.features(decoder, params["backbone"], token_R[:, None], anchor_R1 + slot, seen)
        after: Any = out.caches
        return [block.rows for block in after], out.hidden_BSD[:, 0]

    return stepwise.propose(
        config, frozen, step, [block.rows for block in blocks],
        lambda hidden_RD: draft_logits(config, params, frozen, hidden_RD, None),
        lambda hidden_RD: _confidence(params, hidden_RD), first_R, keys_RG, rows, greedy, shortlist,
    )  # fmt: skip


def _confidence(params: Params, hidden: jax.Array) -> jax.Array:
    return ConfidenceHead().apply({"params": params["confidence_head"]}, hidden)  # type: ignore[return-value]


def context_rows(
    config: DrafterConfig, params: Params, frozen: Frozen, committed: Committed, start_BS: jax.Array,
    scan_layers: bool = False,
) -> jax.Array:  # fmt: skip
    """See `Algorithm`: the hidden states [B, S, D] behind every token."""
    del frozen, scan_layers
    decoder, backbone = _decoder(config), params["backbone"]
    position_BS = jnp.arange(start_BS.shape[1])[None, :] - start_BS
    rows = [kv_cache.empty_rows(start_BS, backbone["embed"].dtype)] * decoder.num_layers
    return target_lib.features(decoder, backbone, committed.tokens_BS, position_BS, rows).hidden_BSD


def teacher_forced_blocks(
    config: DrafterConfig,
    params: Params,
    frozen: Frozen,
    tokens_BS: jax.Array,
    rows: jax.Array,
    anchors_BA: jax.Array,
    detach_confidence: bool = False,
) -> BlockFeatures:
    """See `Algorithm`: by causality, the hidden state behind token anchor + i has seen what slot i may see."""
    del frozen, tokens_BS
    index_BAG = anchors_BA[:, :, None] + jnp.arange(config.num_drafts)[None, None, :]
    hidden_BAGD, confidence_BAG = base.gather_positions(rows, index_BAG), None
    if config.confidence_head:
        seen = jax.lax.stop_gradient(hidden_BAGD) if detach_confidence else hidden_BAGD
        confidence_BAG = _confidence(params, seen)
    return BlockFeatures(hidden_BAGD, None, confidence_BAG)


def draft_logits(config: DrafterConfig, params: Params, frozen: Frozen, hidden: jax.Array, latent: Any) -> jax.Array:
    """See `Algorithm`: the decoder's own head."""
    del frozen, latent
    return target_lib.logits(params["backbone"], hidden, _decoder(config).logit_softcap)
