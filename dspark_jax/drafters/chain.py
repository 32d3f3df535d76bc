"""Drafters that draft token by token (EAGLE-3, MTP): pairing, caches, training and decoding, the same for both.

Row i joins the feature of position i with the token of position i + 1, stands at rotary position i and predicts the
token of position i + 2. The rows of committed tokens are keys and values of one layer, cached for ever. A draft at
anchor a starts with the row of feature a - 1 and the anchor itself, sees the cached rows before it, and goes on from
its own output: the rows of a block see each other and are never cached.

The token of position p brings feature p and, with feature p - 1, row p - 1. So features are kept too, in a cache of
their own, as if they were keys and values. Training is the same pass with the true tokens (EAGLE-3's training-time
test): the rows of a packed row are made at once, and each step goes over all anchors.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax import kv_cache, layers
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import base, stepwise
from dspark_jax.drafters.base import BlockFeatures, Committed, Frozen, Params, Proposal
from dspark_jax.drafters.chain_layer import KeyValue
from dspark_jax.drafters.chain_model import Block, ChainModel
from dspark_jax.kv_cache import DocumentRows
from dspark_jax.sampling import SamplingRows

_NOWHERE = 1 << 30  # a position beyond every cache: what is written there is dropped


def _apply(config: DrafterConfig, params: Params, *arguments: Any, method: str) -> Any:
    """One method of the module on these weights. `Any`: Linen's own type allows for collections, used nowhere here."""
    return ChainModel(config).apply({"params": params}, *arguments, method=method)


def _embed(config: DrafterConfig, frozen: Frozen, ids: jax.Array) -> jax.Array:
    return layers.scaled_embedding(frozen.embed_VD, ids, config.embed_scale)


def init_params(config: DrafterConfig, rng: jax.Array) -> Params:
    """Fresh float32 weights: Normal(0, 0.02), norms 1, biases 0 (DeepSpec's initialisation)."""
    taps_BSMD = jnp.zeros((1, 1, len(config.target_layer_ids), config.d_model))
    committed = Committed(jnp.zeros((1, 1), jnp.int32), taps_BSMD, jnp.zeros((1, 1, config.d_model)))
    variables: Any = ChainModel(config).init(rng, committed)
    return variables["params"]


def _feature_size(config: DrafterConfig) -> int:
    """Size of the pieces that a feature is cut into: a key and a value for every key/value head, the last ones padded
    where the width does not divide."""
    return -(-config.d_model // (2 * config.num_kv_heads))


def cache_layers(config: DrafterConfig) -> list[tuple[int, int]]:
    """See `Algorithm`: the layer's keys and values, then the features."""
    return [(config.num_kv_heads, config.head_dim), (config.num_kv_heads, _feature_size(config))]


def _cut(config: DrafterConfig, feature_BSD: jax.Array) -> KeyValue:
    """A feature as keys and values [B, S, K, H]."""
    pieces = 2 * config.num_kv_heads
    padding = ((0, 0), (0, 0), (0, pieces * _feature_size(config) - config.d_model))
    both = jnp.pad(feature_BSD, padding).reshape(*feature_BSD.shape[:2], pieces, -1)
    return both[:, :, : config.num_kv_heads], both[:, :, config.num_kv_heads :]


def _join(config: DrafterConfig, kv: KeyValue) -> jax.Array:
    """The feature that `_cut` cut, from a cache that may have padded the pieces."""
    both = jnp.concatenate(kv, axis=2)[..., : _feature_size(config)]
    return both.reshape(*both.shape[:2], -1)[..., : config.d_model]


def commit(
    config: DrafterConfig, params: Params, frozen: Frozen, caches: Any, committed: Committed, position_BS: jax.Array,
) -> list[Any]:  # fmt: skip
    """See `Algorithm`: the features first, then the rows that they and those before them complete."""
    rows, features = caches
    features = features.append(*_cut(config, _apply(config, params, committed, method="feature")), position_BS)
    row_BS = jnp.maximum(position_BS - 1, 0)
    feature_BSD = _join(config, features.read(row_BS))
    k, v = _apply(config, params, _embed(config, frozen, committed.tokens_BS), feature_BSD, row_BS, method="row")
    # The first token of a text completes no row.
    return [rows.append(k, v, jnp.where(position_BS > 0, row_BS, _NOWHERE)), features]


def _first_block(config: DrafterConfig, feature_BAD: jax.Array, place_BA: jax.Array) -> tuple[Block, jax.Array]:
    """Blocks before their first row, from the features before their anchors, and the number of that row. The first
    token of a text has no feature before it: zeros stand for one."""
    shape = (*place_BA.shape, config.num_drafts, config.num_kv_heads, config.head_dim)
    feature_BAD = jnp.where(place_BA[:, :, None] > 0, feature_BAD.astype(jnp.float32), 0)
    return Block(feature_BAD[:, :, None], (jnp.zeros(shape), jnp.zeros(shape))), jnp.maximum(place_BA - 1, 0)


def propose(
    config: DrafterConfig,
    params: Params,
    frozen: Frozen,
    caches: Any,
    first_R: jax.Array,
    anchor_R: jax.Array,
    keys_RG: jax.Array,
    rows: SamplingRows,
    greedy: bool = False,
    shortlist: int = 0,
) -> Proposal:
    """See `Algorithm`: G steps, each fed what the one before it drew. A shortlist holds a step's own best."""
    before_R1 = jnp.maximum(anchor_R - 1, 0)[:, None]
    block, row_R1 = _first_block(config, _join(config, caches[1].read_block(before_R1)), anchor_R[:, None])

    def step(block: Block, token_R: jax.Array, slot: jax.Array) -> tuple[Block, jax.Array]:
        embedded_R11D = _embed(config, frozen, token_R[:, None, None])
        block, hidden_R11D = _apply(config, params, block, embedded_R11D, slot, row_R1, caches[0], method="step")
        return block, hidden_R11D[:, 0, 0]

    return stepwise.propose(
        config, frozen, step, block,
        lambda hidden_RD: draft_logits(config, params, frozen, hidden_RD, None),
        lambda hidden_RD: _apply(config, params, hidden_RD, method="confidence"),
        first_R, keys_RG, rows, greedy, shortlist,
    )  # fmt: skip


class ChainRows(NamedTuple):
    """The context of packed rows: the layer's keys and values, and the features as a cache would give them back."""

    rows: DocumentRows
    feature_BSD: jax.Array


def context_rows(
    config: DrafterConfig, params: Params, frozen: Frozen, committed: Committed, start_BS: jax.Array,
    scan_layers: bool = False,
) -> ChainRows:  # fmt: skip
    """See `Algorithm`. The last row of a document reads a token of the next one; no block reads that row."""
    del scan_layers  # one layer
    empty = kv_cache.empty_rows(start_BS, params["backbone"]["fc"].dtype)
    feature_BSD = _apply(config, params, committed, method="feature").astype(empty.k_BKHT.dtype)
    following_BSD = _embed(config, frozen, jnp.roll(committed.tokens_BS, -1, axis=1))
    position_BS = jnp.arange(start_BS.shape[1])[None, :] - start_BS
    k, v = _apply(config, params, following_BSD, feature_BSD, position_BS, method="row")
    return ChainRows(empty.append(k, v, position_BS), feature_BSD)


def teacher_forced_blocks(
    config: DrafterConfig,
    params: Params,
    frozen: Frozen,
    tokens_BS: jax.Array,
    rows: ChainRows,
    anchors_BA: jax.Array,
    detach_confidence: bool = False,
) -> BlockFeatures:
    """See `Algorithm`: `propose`, all anchors at once, fed the true tokens."""
    start_BA = jnp.take_along_axis(rows.rows.start_BS, anchors_BA, axis=1)
    feature_BAD = base.gather_positions(rows.feature_BSD, anchors_BA - 1)
    first, row_BA = _first_block(config, feature_BAD, anchors_BA - start_BA)
    embedded_BAGD = _embed(config, frozen, base.previous_tokens(tokens_BS, anchors_BA, config.num_drafts))
    cache = rows.rows.of_blocks(start_BA)

    def step(block: Block, xs: tuple[jax.Array, jax.Array]) -> tuple[Block, jax.Array]:
        slot, embedded_BAD = xs
        return _apply(config, params, block, embedded_BAD[:, :, None], slot, row_BA, cache, method="step")

    _, hidden_GBA1D = jax.lax.scan(step, first, (jnp.arange(config.num_drafts), jnp.moveaxis(embedded_BAGD, 2, 0)))
    hidden_BAGD, confidence = jnp.moveaxis(hidden_GBA1D[:, :, :, 0], 0, 2), None
    if config.confidence_head:
        seen = jax.lax.stop_gradient(hidden_BAGD) if detach_confidence else hidden_BAGD
        confidence = _apply(config, params, seen, method="confidence")
    return BlockFeatures(hidden_BAGD, None, confidence)


def draft_logits(config: DrafterConfig, params: Params, frozen: Frozen, hidden: jax.Array, latent: Any) -> jax.Array:
    """See `Algorithm`: the target's head, or the drafter's own."""
    del latent
    head_VD = params["head"] if config.own_head else frozen.head_VD
    return layers.soft_cap(layers.linear(hidden, head_VD), config.logit_softcap)
