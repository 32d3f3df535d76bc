"""The network of a drafter that drafts token by token: one row at a time, for EAGLE-3 and for MTP (see chain.py)."""

from typing import Any, NamedTuple, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import kv_cache, layers, rotary
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters.base import Committed
from dspark_jax.drafters.chain_layer import ChainLayer, KeyValue
from dspark_jax.drafters.eagle3 import Eagle3Cell
from dspark_jax.drafters.heads import ConfidenceHead
from dspark_jax.drafters.mtp import MTPCell
from dspark_jax.kv_cache import Cache


class Cell(Protocol):
    """What EAGLE-3 and MTP differ in, over rows [..., D]."""

    layers: list[ChainLayer]

    def feature(self, committed: Committed) -> jax.Array:
        """What a row reads of the target, [B, S, D]."""
        ...

    def enter(self, embedded: jax.Array, feature: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A row's residual stream and what attention reads."""
        ...

    def leave(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """From the stream behind the layer: the next row's feature, and the hidden state that the head reads."""
        ...


_CELLS: dict[str, Any] = {"eagle3": Eagle3Cell, "mtp": MTPCell}


class Block(NamedTuple):
    """Blocks under way: what the next row is fed, and the keys and values [B, A, G, K, H] of the rows so far."""

    feature_BA1D: jax.Array
    own: KeyValue


class ChainModel(nn.Module):
    config: DrafterConfig

    def setup(self) -> None:
        c = self.config
        self.backbone: Cell = _CELLS[c.algorithm](c)
        if c.own_head:
            self.head = self.param("head", layers.normal_init, (c.head_rows, c.d_model))
        if c.confidence_head:
            self.confidence_head = ConfidenceHead()

    def feature(self, committed: Committed) -> jax.Array:
        return self.backbone.feature(committed)

    def row(self, embedded: jax.Array, feature: jax.Array, position: jax.Array) -> KeyValue:
        """Keys and values of rows at their positions."""
        return self.backbone.layers[0].key_value(self.backbone.enter(embedded, feature)[1], self._table(position))

    def step(
        self, block: Block, embedded_BA1D: jax.Array, slot: jax.Array, row_BA: jax.Array, cache: Cache
    ) -> tuple[Block, jax.Array]:
        """Row `slot` of blocks whose first row is row `row` of their text; the hidden state [B, A, 1, D] beside."""
        x_BA1D, seen_BA1E = self.backbone.enter(embedded_BA1D, block.feature_BA1D)
        layer, table = self.backbone.layers[0], self._table(row_BA[:, :, None] + slot)
        x_BA1D, own = layer(x_BA1D, seen_BA1E, table, cache, block.own, slot, row_BA)
        feature_BA1D, hidden_BA1D = self.backbone.leave(x_BA1D)
        return Block(feature_BA1D, own), hidden_BA1D

    def confidence(self, hidden: jax.Array) -> jax.Array:
        """Logits [...] from hidden states [..., D]."""
        return self.confidence_head(hidden)

    def __call__(self, committed: Committed) -> None:
        """Everything once, for `init`."""
        feature_BSD, position_BS = self.feature(committed), jnp.zeros_like(committed.tokens_BS)
        k, v = self.row(feature_BSD, feature_BSD, position_BS)
        block, rows = Block(feature_BSD[:, :, None], (k[:, :, None], v[:, :, None])), kv_cache.from_rows(k, v, k.dtype)
        _, hidden_BA1D = self.step(block, feature_BSD[:, :, None], jnp.int32(0), position_BS, rows)
        if self.config.confidence_head:
            self.confidence(hidden_BA1D)

    def _table(self, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        c = self.config
        return rotary.table(position, c.head_dim, c.rope_theta, c.rope_scaling)
