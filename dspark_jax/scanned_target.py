"""The target as one loop over stacked layers: what `TargetModel` computes, compiled once instead of once a layer.

For TPUs, where 36 unrolled layers take the compiler minutes a program; training and serving share it. CPUs keep the
unrolled form (they run a loop over stacked weights several times slower), and so do targets whose layers differ.
"""

from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax import layers, sharding
from dspark_jax.config import TargetConfig
from dspark_jax.kv_cache import SharedCache
from dspark_jax.target import Block, Features

Params = dict[str, Any]


def alike(config: TargetConfig) -> bool:
    """Whether one loop can run all layers of this target."""
    return not config.gemma and len({config.layer(i) for i in range(config.num_layers)}) == 1


def stack(config: TargetConfig, params: Params) -> Params:
    """The target's parameters with `layers` [L, ...] in place of layers_0, layers_1, ..., split over the mesh of the
    function being traced as each layer was."""
    each = [params[f"layers_{i}"] for i in range(config.num_layers)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    rest = {name: leaf for name, leaf in params.items() if not name.startswith("layers_")}
    return rest | sharding.constrain_tree({"layers": stacked})


def features(
    config: TargetConfig,
    params: Params,
    tokens_BS: jax.Array,
    position_BS: jax.Array,
    cache: SharedCache,
    tap_layers: tuple[int, ...],
    split_rows: bool = False,
) -> Features:
    """As `target.features`, for parameters from `stack` and a cache that serves every layer, which comes back with the
    new rows of all of them. Taps have the dtype of the weights.

    `split_rows`: the B rows lie split over `data` and `fsdp`, so each layer's weights are gathered over `fsdp` where
    they are used (training). Otherwise every device computes all rows with the weights it has (serving).

    Cache and taps lie in the loop's carry and are written in place there: the inputs and outputs of a scan are copies,
    and as outputs the taps of all layers would be kept. So there is one slot a tap, and one for what nobody reads.
    """
    block, unread = Block(config, config.layer(0)), len(tap_layers)
    table_VD = sharding.constrain(params["embed"], "tensor", None) if split_rows else params["embed"]
    x_BSD = layers.scaled_embedding(table_VD, tokens_BS, config.embed_scale)
    rows = sharding.ROWS if split_rows else None
    x_BSD = sharding.constrain(x_BSD, rows, None, None)
    slots = [tap_layers.index(i) if i in tap_layers else unread for i in range(config.num_layers)]
    taps_MBSD = jnp.zeros((unread + 1, *x_BSD.shape), jnp.dtype(params["embed"].dtype))
    if -1 in tap_layers:
        taps_MBSD = taps_MBSD.at[tap_layers.index(-1)].set(x_BSD.astype(taps_MBSD.dtype))

    def layer(carry: tuple[Any, ...], part: tuple[Params, jax.Array, jax.Array]) -> tuple[tuple[Any, ...], None]:
        x_BSD, taps_MBSD, cache = carry
        weights, number, slot = part
        if split_rows:
            weights = sharding.gather_tree({"layers_0": weights})["layers_0"]
        seen = cache.of_layer(number, config.num_layers)
        x_BSD, seen = block.apply({"params": weights}, x_BSD, position_BS, seen)  # type: ignore[misc]
        x_BSD = sharding.constrain(x_BSD, rows, None, None)
        return (x_BSD, taps_MBSD.at[slot].set(x_BSD.astype(taps_MBSD.dtype)), cache.after_layer(seen)), None

    numbers = jnp.arange(config.num_layers, dtype=jnp.int32)
    (x_BSD, taps_MBSD, cache), _ = jax.lax.scan(
        layer, (x_BSD, taps_MBSD, cache), (params["layers"], numbers, jnp.asarray(slots, jnp.int32))
    )
    hidden_BSD = layers.rms_norm(x_BSD, params["final_norm"], config.norm_eps)
    return Features(hidden_BSD, jnp.moveaxis(taps_MBSD[:-1], 0, 2), [cache])
