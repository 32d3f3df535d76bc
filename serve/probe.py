"""Times of a round's pieces on this machine, and the compute dtypes that they make best.

A CPU without bfloat16 units may take 300 ms for one row and 57 for eight where float32 takes 33 and 96: which dtype is
faster depends on the machine and on the rows, so it is measured before decoding starts.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax import target as target_lib
from dspark_jax.config import DrafterConfig, SamplingParams, TargetConfig
from dspark_jax.drafters import Drafter, dspark
from dspark_jax.drafters.base import Frozen
from dspark_jax.generate import batch_rows
from dspark_jax.kv_cache import LayerCache
from dspark_jax.sampling import sampling_rows
from dspark_jax.target import Target

REPEATS = 5
# Layers cost alike, and compiling all of a deep target four times takes longer than the answer is worth.
PROBE_LAYERS = 8
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Probe:
    """Milliseconds of a whole target pass by dtype: one row a request (plain), G+1 rows a request (verify)."""

    requests: int
    plain_ms: dict[str, float]
    verify_ms: dict[str, float]

    @property
    def plain_dtype(self) -> str:
        """The dtype of the fastest plain decoding: what drafting has to beat."""
        return min(self.plain_ms, key=lambda dtype: self.plain_ms[dtype])

    @property
    def draft_dtype(self) -> str:
        """The dtype of the fastest verification."""
        return min(self.verify_ms, key=lambda dtype: self.verify_ms[dtype])


@functools.partial(jax.jit, static_argnames=("config", "tap_layers"), donate_argnames=("caches",))
def _target_pass(
    config: TargetConfig,
    params: Params,
    tokens_RS: jax.Array,
    position_RS: jax.Array,
    caches: list[LayerCache],
    tap_layers: tuple[int, ...],
) -> tuple[tuple[jax.Array, jax.Array], list[LayerCache] | None]:
    features = target_lib.features(config, params, tokens_RS, position_RS, caches, tap_layers)
    choice_RS = jnp.argmax(target_lib.logits(params, features.hidden_BSD), axis=-1)
    return (choice_RS, features.taps_BSMD), features.caches


@functools.partial(jax.jit, static_argnames=("config",), donate_argnames=("caches",))
def _draft_pass(
    config: DrafterConfig,
    params: Params,
    frozen: Frozen,
    first_R: jax.Array,
    position_RS: jax.Array,
    taps_RSMD: jax.Array,
    keys_RG: jax.Array,
    caches: list[LayerCache],
) -> tuple[jax.Array, list[LayerCache]]:
    rows = sampling_rows([SamplingParams(temperature=0.0)] * first_R.shape[0])
    proposal = dspark.propose(config, params, frozen, caches, first_R, position_RS[:, 0], keys_RG, rows, greedy=True)
    return proposal.sample.tokens_RG, dspark.commit(config, params, caches, taps_RSMD, position_RS)


@jax.jit
def _head_pass(params: Params, hidden_RSD: jax.Array) -> jax.Array:
    return jnp.argmax(target_lib.logits(params, hidden_RSD), axis=-1)


def _milliseconds(step: Callable[[Any], tuple[Any, Any]], state: Any) -> float:
    """Least of a few runs of `step(state) -> (output, state)`: other work on the machine only ever adds."""
    best = float("inf")
    for run in range(REPEATS + 1):
        start = time.perf_counter()
        output, state = step(state)
        jax.block_until_ready(output)
        if run:  # the first one compiles
            best = min(best, 1000 * (time.perf_counter() - start))
    return best


def _positions(requests: int, rows: int, cache_length: int) -> jax.Array:
    return jnp.broadcast_to((jnp.arange(rows) + (cache_length - rows) // 2)[None, :], (requests, rows))


def _time_target(target: Target, requests: int, rows: int, cache_length: int, taps: tuple[int, ...] = ()) -> float:
    c, tokens_RS = target.config, jnp.zeros((requests, rows), jnp.int32)
    position_RS = _positions(requests, rows, cache_length)
    caches = target_lib.init_caches(c, requests, cache_length, target.dtype)
    return _milliseconds(lambda kv: _target_pass(c, target.params, tokens_RS, position_RS, kv, taps), caches)


def _time_head(target: Target, requests: int, rows: int) -> float:
    table = {"embed": target_lib.head_table(target.params)}
    hidden_RSD = jnp.ones((requests, rows, target.config.d_model))
    return _milliseconds(lambda _: (_head_pass(table, hidden_RSD), None), None)


def _first_layers(target: Target, count: int) -> Target:
    config = dataclasses.replace(target.config, num_layers=count)
    dropped = {f"layers_{i}" for i in range(count, target.config.num_layers)}
    return Target(config, {name: value for name, value in target.params.items() if name not in dropped})


def choose_dtype(target: Target, requests: int, rows: int, cache_length: int, dtypes: Sequence[str]) -> Probe:
    """Times one decoding step and one verification of `rows` rows a request on the target's own weights.

    A deep target is timed on its first layers and its head, and the layers' time multiplied.
    """
    depth = min(target.config.num_layers, PROBE_LAYERS)
    part = _first_layers(target, depth)
    plain_ms, verify_ms = {}, {}
    for dtype in dtypes:
        cast = dataclasses.replace(part, params=target_lib.cast_params(part.params, dtype))
        batch = batch_rows(requests, cast.dtype)  # what generate runs
        for name, count in ((plain_ms, 1), (verify_ms, rows)):
            head = _time_head(cast, batch, count)
            whole = _time_target(cast, batch, count, cache_length)
            name[dtype] = head + max(whole - head, 0.0) * target.config.num_layers / depth
    return Probe(requests, plain_ms, verify_ms)


def time_pieces(target: Target, drafter: Drafter, requests: int, cache_length: int) -> dict[str, float]:
    """Milliseconds of a round's parts, each compiled and run alone, whole models.

    draft_ms: the block, its sequential head and the drafter's cache; verify_ms: the target's pass over G+1 rows a
    request, of which head_ms is its head.
    """
    c, rows = drafter.config, drafter.config.num_drafts + 1
    requests = batch_rows(requests, target.dtype)
    position_RS = _positions(requests, rows, cache_length)
    taps_RSMD = jnp.ones((requests, rows, len(c.target_layer_ids), c.d_model))
    keys_RG = jax.random.split(jax.random.key(0), (requests, c.num_drafts))
    first_R = jnp.zeros(requests, jnp.int32)
    caches = dspark.init_caches(c, requests, cache_length, target.dtype)
    return {
        "draft_ms": _milliseconds(
            lambda kv: _draft_pass(c, drafter.params, drafter.frozen, first_R, position_RS, taps_RSMD, keys_RG, kv),
            caches,
        ),
        "verify_ms": _time_target(target, requests, rows, cache_length, c.target_layer_ids),
        "head_ms": _time_head(target, requests, rows),
    }
