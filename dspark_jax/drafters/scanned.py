"""The draft layers as one loop over stacked weights: what `Backbone` computes, compiled once instead of once a layer.

For training on TPUs, where compiling five unrolled layers forward, again and backward takes minutes. Decoding and CPUs
keep the unrolled form: a CPU runs a loop over stacked weights several times slower.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax import kv_cache, layers, rotary
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters.backbone import Backbone, layer_class, layer_rules
from dspark_jax.kv_cache import DocumentRows

Params = dict[str, Any]


class ScannedRows(NamedTuple):
    """The context of packed rows in all layers: weights, keys and values with a leading axis [L, ...]."""

    start_BS: jax.Array
    weights: Params
    k_LBKHT: jax.Array
    v_LBKTH: jax.Array


def alike(config: DrafterConfig) -> bool:
    """Whether one loop can run all layers of this drafter."""
    return config.family != "gemma4" and len(set(layer_rules(config))) == 1


def _layer(config: DrafterConfig) -> Any:
    return layer_class(config)(config, layer_rules(config)[0])


def context_rows(config: DrafterConfig, params: Params, taps_BSMD: jax.Array, start_BS: jax.Array) -> ScannedRows:
    """As `Backbone.context`, for packed rows."""
    backbone = params["backbone"]
    each = [backbone[f"layers_{i}"] for i in range(config.num_layers)]
    weights: Params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    fused_BSD: Any = Backbone(config).apply({"params": backbone}, taps_BSMD, method="fuse")
    position_BS = jnp.arange(start_BS.shape[1])[None, :] - start_BS
    table = rotary.table(position_BS, config.head_dim, config.rope_theta, config.rope_scaling)
    empty = kv_cache.empty_rows(start_BS, backbone["fc"].dtype)

    def layer(_: None, weights: Params) -> tuple[None, tuple[jax.Array, jax.Array]]:
        both: Any = _layer(config).apply({"params": weights}, fused_BSD, table, method="key_value")
        k, v = both
        rows = empty.append(k, v, position_BS)
        return None, (rows.k_BKHT, rows.v_BKTH)

    _, (k_LBKHT, v_LBKTH) = jax.lax.scan(layer, None, weights)
    return ScannedRows(start_BS, weights, k_LBKHT, v_LBKTH)


def block(
    config: DrafterConfig,
    params: Params,
    rows: ScannedRows,
    embedded_BAGD: jax.Array,
    position_BA: jax.Array,
    start_BA: jax.Array,
) -> jax.Array:
    """As `DSparkModel.block`: hidden states [B, A, G, D] of the rows that are drafts."""
    position_BAG = position_BA[:, :, None] + jnp.arange(embedded_BAGD.shape[2])[None, None, :]
    table = rotary.table(position_BAG, config.head_dim, config.rope_theta, config.rope_scaling)

    def layer(x_BAGD: jax.Array, part: tuple[Params, jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        weights, k_BKHT, v_BKTH = part
        cache = DocumentRows(rows.start_BS, k_BKHT, v_BKTH, start_BA)
        x_BAGD = _layer(config).apply({"params": weights}, x_BAGD, table, cache, position_BA)  # type: ignore[assignment]
        return x_BAGD, None

    x_BAGD = embedded_BAGD.astype(jnp.float32)
    x_BAGD, _ = jax.lax.scan(layer, x_BAGD, (rows.weights, rows.k_LBKHT, rows.v_LBKTH))
    hidden_BAGD = layers.rms_norm(x_BAGD, params["backbone"]["norm"], config.norm_eps)
    return hidden_BAGD[:, :, config.block_size - config.num_drafts :]
