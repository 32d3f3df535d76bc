"""The DSpark drafter: backbone, sequential head, confidence head. With rank 0 and no confidence it is DFlash.

Training calls `teacher_forced`; decoding calls `commit` for newly accepted tokens and `propose` for a block. Both go
through the same modules, so a drafter cannot be served differently from how it was trained.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax.config import ConfigError, DrafterConfig
from dspark_jax.drafters import base, scanned
from dspark_jax.drafters.backbone import Backbone, KeyValue
from dspark_jax.drafters.base import BlockFeatures, Committed, Frozen, Proposal
from dspark_jax.drafters.cells import Previous
from dspark_jax.drafters.heads import ConfidenceHead, MarkovHead, first_state
from dspark_jax.drafters.scanned import ScannedRows
from dspark_jax.kv_cache import Cache, DocumentRows
from dspark_jax.layers import linear, scaled_embedding
from dspark_jax.sampling import SamplingRows, sample_block

Params = dict[str, Any]


class DSparkModel(nn.Module):
    config: DrafterConfig

    def setup(self) -> None:
        c = self.config
        self.backbone = Backbone(c)
        if c.markov_rank:
            self.markov = MarkovHead(c)
        if c.confidence_head:
            self.confidence_head = ConfidenceHead()

    def context(self, taps_BSMD: jax.Array, position_BS: jax.Array) -> list[KeyValue]:
        return self.backbone.context(taps_BSMD, position_BS)

    def block(self, embedded_BAGD: jax.Array, anchor_BA: jax.Array, caches: Sequence[Cache]) -> jax.Array:
        """Hidden states [B, A, G, D] of the rows that are drafts."""
        hidden_BAGD = self.backbone.block(embedded_BAGD, anchor_BA, caches)
        return hidden_BAGD[:, :, self.config.block_size - self.config.num_drafts :]

    def embed_previous(self, tokens: jax.Array, embedded: jax.Array | None) -> Previous:
        return self.markov.embed(tokens, embedded)

    def project(self, hidden: jax.Array) -> Any:
        return self.markov.project(hidden)

    def step(
        self, state: Any, tokens: jax.Array, embedded: jax.Array | None, projected: Any, ids: jax.Array | None
    ) -> tuple[Any, jax.Array]:
        """The sequential head's next state, and its bias [..., V] (of `ids` [..., K] only) after `tokens` [...]."""
        state, latent = self.markov.step(state, self.markov.embed(tokens, embedded), projected)
        return state, self.markov.bias(latent, ids)

    def bias(self, latent: jax.Array) -> jax.Array:
        return self.markov.bias(latent)

    def confidence(self, hidden: jax.Array, previous: Previous | None) -> jax.Array:
        """Logits [...] from hidden [..., D] and the previous token's Markov row [..., r]."""
        if self.config.confidence_with_markov:
            assert previous is not None and previous.row is not None
            hidden = jnp.concatenate([hidden, previous.row.astype(jnp.float32)], axis=-1)
        return self.confidence_head(hidden)

    def __call__(
        self,
        taps_BSMD: jax.Array,
        embedded_BAGD: jax.Array,
        anchor_BA: jax.Array,
        previous_BAG: jax.Array,
        previous_BAGD: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Everything once, for `init`: `context`, then `teacher_forced`."""
        position_BS = jnp.broadcast_to(jnp.arange(taps_BSMD.shape[1])[None, :], taps_BSMD.shape[:2])
        context = self.context(taps_BSMD, position_BS)
        dtype = kv_cache.compute_dtype(self.backbone.fc.dtype)
        caches = [kv_cache.from_rows(k_BSKH, v_BSKH, dtype) for k_BSKH, v_BSKH in context]
        return self.teacher_forced(embedded_BAGD, anchor_BA, caches, previous_BAG, previous_BAGD)

    def teacher_forced(
        self,
        embedded_BAGD: jax.Array,
        anchor_BA: jax.Array,
        caches: Sequence[Cache],
        previous_BAG: jax.Array,
        previous_BAGD: jax.Array | None,
        detach_confidence: bool = False,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Hidden states [B, A, G, D], Markov latents [B, A, G, r], confidence logits [B, A, G].

        `previous_BAGD` are the previous tokens' rows of the target's embedding, None where the head reads none.
        `detach_confidence`: the confidence head learns from the backbone and the Markov rows without teaching them.
        """
        hidden_BAGD = self.block(embedded_BAGD, anchor_BA, caches)
        return hidden_BAGD, *self.heads(hidden_BAGD, previous_BAG, previous_BAGD, detach_confidence)

    def heads(
        self,
        hidden_BAGD: jax.Array,
        previous_BAG: jax.Array,
        previous_BAGD: jax.Array | None,
        detach_confidence: bool = False,
    ) -> tuple[jax.Array | None, jax.Array | None]:
        """Markov latents and confidence logits of hidden states."""
        previous = self.embed_previous(previous_BAG, previous_BAGD) if self.config.markov_rank else None
        confidence = None
        if self.config.confidence_head:
            seen = jax.lax.stop_gradient((hidden_BAGD, previous)) if detach_confidence else (hidden_BAGD, previous)
            confidence = self.confidence(*seen)
        latent = None if previous is None else self.markov.latents(hidden_BAGD, previous)
        return latent, confidence


def _embed_block(config: DrafterConfig, frozen: Frozen, first_BA: jax.Array) -> jax.Array:
    """[anchor, mask, mask, ...] through the target's embedding: [B, A, block_size, D]."""
    masks = jnp.full((*first_BA.shape, config.block_size - 1), config.mask_token_id, first_BA.dtype)
    return scaled_embedding(
        frozen.embed_VD, jnp.concatenate([first_BA[:, :, None], masks], axis=-1), config.embed_scale
    )


def _head_rows(config: DrafterConfig, frozen: Frozen, tokens: jax.Array) -> jax.Array | None:
    """Rows [..., D] of the target's embedding for the sequential head; None where it reads none."""
    return scaled_embedding(frozen.embed_VD, tokens, config.embed_scale) if config.head_reads_embedding else None


def init_params(config: DrafterConfig, rng: jax.Array) -> Params:
    """Fresh float32 weights: Normal(0, 0.02), norms 1, biases 0 (DeepSpec's initialisation); a sequential head beyond
    the published ones as its cell says."""
    taps = jnp.zeros((1, 1, len(config.target_layer_ids), config.d_model))
    block = jnp.zeros((1, 1, config.block_size, config.d_model))
    previous = jnp.zeros((1, 1, config.num_drafts), jnp.int32)
    rows = jnp.zeros((*previous.shape, config.d_model)) if config.head_reads_embedding else None
    variables: Any = DSparkModel(config).init(rng, taps, block, jnp.zeros((1, 1), jnp.int32), previous, rows)
    return variables["params"]


def _apply(config: DrafterConfig, params: Params, *arguments: Any, method: str = "__call__") -> Any:
    """One method of the module on these weights. `Any`: Linen's own type allows for collections, used nowhere here."""
    return DSparkModel(config).apply({"params": params}, *arguments, method=method)


def context_rows(
    config: DrafterConfig, params: Params, frozen: Frozen, committed: Committed, start_BS: jax.Array,
    scan_layers: bool = False,
) -> Sequence[DocumentRows] | ScannedRows:  # fmt: skip
    """See `Algorithm`: keys and values of every layer."""
    if scan_layers and scanned.alike(config):
        return scanned.context_rows(config, params, committed.taps_BSMD, start_BS)
    position_BS = jnp.arange(start_BS.shape[1])[None, :] - start_BS
    empty = kv_cache.empty_rows(start_BS, params["backbone"]["fc"].dtype)
    return commit(config, params, frozen, [empty] * config.num_layers, committed, position_BS)


def teacher_forced_blocks(
    config: DrafterConfig,
    params: Params,
    frozen: Frozen,
    tokens_BS: jax.Array,
    rows: Sequence[DocumentRows] | ScannedRows,
    anchors_BA: jax.Array,
    detach_confidence: bool = False,
) -> BlockFeatures:
    """See `Algorithm`."""
    start_BS = rows.start_BS if isinstance(rows, ScannedRows) else rows[0].start_BS
    start_BA = jnp.take_along_axis(start_BS, anchors_BA, axis=1)
    first_BA = base.gather_positions(tokens_BS, anchors_BA)
    previous_BAG = base.previous_tokens(tokens_BS, anchors_BA, config.num_drafts)
    head_inputs = previous_BAG, _head_rows(config, frozen, previous_BAG)
    embedded_BAGD, position_BA = _embed_block(config, frozen, first_BA), anchors_BA - start_BA
    if isinstance(rows, ScannedRows):
        hidden_BAGD = scanned.block(config, params, rows, embedded_BAGD, position_BA, start_BA)
        heads = _apply(config, params, hidden_BAGD, *head_inputs, detach_confidence, method="heads")
        return BlockFeatures(hidden_BAGD, *heads)
    seen = [row.of_blocks(start_BA) for row in rows]
    arguments = (embedded_BAGD, position_BA, seen, *head_inputs, detach_confidence)
    return BlockFeatures(*_apply(config, params, *arguments, method="teacher_forced"))


def draft_logits(config: DrafterConfig, params: Params, frozen: Frozen, hidden: jax.Array, latent: Any) -> jax.Array:
    """Float32 logits [..., V] over the draft vocabulary, sequential head included."""
    logits = base.parallel_logits(config, frozen, hidden)
    if config.markov_rank:
        logits += _apply(config, params, latent, method="bias")
    return logits


def cache_layers(config: DrafterConfig) -> list[tuple[int, int]]:
    """See `Algorithm`: one cache a layer."""
    return [(config.num_kv_heads, config.head_dim)] * config.num_layers


def commit(
    config: DrafterConfig, params: Params, frozen: Frozen, caches: Sequence[Cache], committed: Committed,
    position_BS: jax.Array,
) -> list[Any]:  # fmt: skip
    """See `Algorithm`: the target's features alone make the context, and a token's rows lie at its own position."""
    del frozen
    context = _apply(config, params, committed.taps_BSMD, position_BS, method="context")
    return [cache.append(k, v, position_BS) for cache, (k, v) in zip(caches, context, strict=True)]


def transition_table(config: DrafterConfig, params: Params) -> jax.Array:
    """A vanilla Markov head as one table [V, W] of biases over the draft vocabulary, float32.

    For small vocabularies: V W entries are read by lookup where the factors cost W r multiplications a step. Raises
    ConfigError for heads whose bias depends on more than the previous token, and for a tied one (see `untied`).
    """
    if config.markov_head_type != "vanilla" or not config.markov_rank or config.markov_tied:
        tied = "tied " if config.markov_tied else ""
        raise ConfigError(
            f"a {tied}{config.markov_head_type} head of rank {config.markov_rank} is not a table of transitions"
        )
    return linear(params["markov"]["w1"], params["markov"]["w2"])


def untied(config: DrafterConfig, params: Params, frozen: Frozen) -> tuple[DrafterConfig, Params]:
    """The same drafter with W1 = E P multiplied out, [V, r] in P's dtype: a lookup in each step in place of a product.
    Other drafters are returned as they are."""
    if not config.markov_tied:
        return config, params
    markov = dict(params["markov"])
    tied = markov.pop("tied")
    markov["w1"] = (linear(frozen.embed_VD, tied) * config.embed_scale).astype(tied.dtype)
    return dataclasses.replace(config, markov_tied=False), params | {"markov": markov}


def draft_hidden(
    config: DrafterConfig, params: Params, frozen: Frozen, caches: Sequence[Cache], first_R: jax.Array,
    anchor_R: jax.Array,
) -> jax.Array:  # fmt: skip
    """Hidden states [R, G, D] of the drafts of one block a request: the parallel pass."""
    embedded_RAGD = _embed_block(config, frozen, first_R[:, None])
    return _apply(config, params, embedded_RAGD, anchor_R[:, None], caches, method="block")[:, 0]


def propose(
    config: DrafterConfig,
    params: Params,
    frozen: Frozen,
    caches: Sequence[Cache],
    first_R: jax.Array,
    anchor_R: jax.Array,
    keys_RG: jax.Array,
    rows: SamplingRows,
    greedy: bool = False,
    shortlist: int = 0,
) -> Proposal:
    """See `Algorithm`: one parallel pass, then a scan. A shortlist holds the candidates that the backbone alone ranks
    highest: a step of the head then costs K r in place of V r."""
    hidden_RGD = draft_hidden(config, params, frozen, caches, first_R, anchor_R)
    base_RGV, ids_RGK, support_RGK = base.parallel_logits(config, frozen, hidden_RGD), None, None
    if 0 < shortlist < config.head_rows:
        base_RGV, ids_RGK = jax.lax.top_k(base_RGV, shortlist)
        support_RGK = ids_RGK if frozen.draft_to_target_V is None else frozen.draft_to_target_V[ids_RGK]

    def step(state: Any, previous_R: jax.Array, slot: Any) -> tuple[Any, Any]:
        if not config.markov_rank:
            return None, jnp.zeros((previous_R.shape[0], 1))
        if frozen.transition_VW is not None:
            bias_RW, ids_RK = frozen.transition_VW[previous_R], slot[1]
            return state, bias_RW if ids_RK is None else jnp.take_along_axis(bias_RW, ids_RK, axis=1)
        return _apply(config, params, state, previous_R, _head_rows(config, frozen, previous_R), *slot, method="step")

    projected_RG = _apply(config, params, hidden_RGD, method="project") if config.markov_rank else None
    state, slots, d2t_V = first_state(config, first_R.shape), (projected_RG, ids_RGK), frozen.draft_to_target_V
    sample = sample_block(step, state, first_R, base_RGV, slots, keys_RG, rows, d2t_V, greedy, support_RGK)
    confidence_RG = None
    if config.confidence_head:
        # Slot k's confidence sees the token before it and never its own, so it may gate that token's verification.
        previous_RG = jnp.concatenate([first_R[:, None], sample.tokens_RG[:, :-1]], axis=1)
        previous = None
        if config.confidence_with_markov:
            rows_RGD = _head_rows(config, frozen, previous_RG)
            previous = _apply(config, params, previous_RG, rows_RGD, method="embed_previous")
        confidence_RG = _apply(config, params, hidden_RGD, previous, method="confidence")
    return Proposal(sample, confidence_RG)
