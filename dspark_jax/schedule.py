"""Prefix scheduling: how many drafts of each request are worth the target's time (DSpark paper, section 5).

Losslessness asks that {length >= k} does not depend on draft k or on anything computed from it. Confidence
c_k is computed before draft k is drawn, so it may gate draft k; c_{k+1} may not. Each rule here reveals
confidences in an order that respects this; ties go by index (position, then request), never by token values.
Confidences are probabilities; survivals are their running products along a block.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from dspark_jax.config import ConfigError


def prefix_survival(confidence_RG: ArrayLike) -> Array:
    """Chance that the first j drafts all stand: running product of the confidences, float32, never rising.

    A NaN confidence counts as 0, so it can end its own row's prefix and nothing else.
    """
    confidence_RG = jnp.asarray(confidence_RG).astype(jnp.float32)
    return _settled(jnp.cumprod(jnp.where(jnp.isnan(confidence_RG), 0.0, confidence_RG), axis=1))


def prefix_schedule(
    confidence_RG: ArrayLike, steps_per_second: ArrayLike, num_active: ArrayLike | None = None
) -> Array:
    """The paper's Algorithm 1 with its early stop: lengths_R, int32.

    `steps_per_second[B]` is the measured rate of rounds with B packed tokens (draft pass included), index 0
    unused, up to R + R * G. Drafts enter in order of survival while expected tokens a second,
    (R + admitted survivals) * steps_per_second, strictly improves; the first that does not ends it, which is
    what makes current confidences safe to use. A curve too short for that raises ConfigError.

    Where only `num_active` rows are requests, that number stands for R in the formula; it may be traced. The other
    rows must have confidences of 0.
    """
    survival_RG = prefix_survival(confidence_RG)
    curve_B = jnp.asarray(steps_per_second).astype(jnp.float32)
    num_rows, num_drafts = survival_RG.shape
    needed = num_rows * (num_drafts + 1) + 1
    if curve_B.ndim != 1 or curve_B.shape[0] < needed:
        raise ConfigError(
            f"steps_per_second has shape {curve_B.shape}: {num_rows} requests with {num_drafts} drafts need one entry"
            f" for each of 0..{needed - 1} packed tokens"
        )
    sorted_N, rank_RG = _ranked(survival_RG)
    active = jnp.asarray(num_rows if num_active is None else num_active, jnp.int32)
    expected_N = active.astype(jnp.float32) + jnp.concatenate([jnp.zeros((1,)), jnp.cumsum(sorted_N)])
    rate_N = expected_N * lax.dynamic_slice_in_dim(curve_B, active, expected_N.shape[0])
    improves_N = (rate_N[1:] > rate_N[:-1]) & (sorted_N > 0)
    admitted = jnp.sum(jnp.cumprod(improves_N.astype(jnp.int32)))
    return jnp.sum(rank_RG < admitted, axis=1, dtype=jnp.int32)


def admit_top(survival_RG: ArrayLike, capacity: ArrayLike) -> Array:
    """Fill `capacity` drafted tokens (the whole batch's) with the largest current survivals: lengths_R, int32.

    The asynchronous form (paper 5.2). Lossless as long as capacity comes from earlier rounds only. Survivals
    must not rise along a row. Drafts of survival 0 are never admitted, so capacity may stay unused. `capacity`
    may be traced.
    """
    survival_RG = _settled(jnp.asarray(survival_RG).astype(jnp.float32))
    _, rank_RG = _ranked(survival_RG)
    return jnp.sum((rank_RG < jnp.asarray(capacity)) & (survival_RG > 0), axis=1, dtype=jnp.int32)


def threshold_lengths(confidence_RG: ArrayLike, threshold: ArrayLike) -> Array:
    """Stop each row before its first confidence below the threshold (or NaN): lengths_R, int32."""
    passes_RG = jnp.asarray(confidence_RG).astype(jnp.float32) >= jnp.asarray(threshold).astype(jnp.float32)
    return jnp.sum(jnp.cumprod(passes_RG.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def capacity_from_stale(
    survival_RG: ArrayLike, round_seconds: Sequence[float] | np.ndarray, token_edges: Sequence[int] | np.ndarray
) -> int:
    """How many drafted tokens the coming rounds should verify, on the host: 0 .. R * G.

    Looks at the whole curve, so it steps over cliffs where Algorithm 1 would stop; in exchange the survivals
    must be those of rounds already finished (paper 5.2). `token_edges` are the compiled sizes of a round in
    packed tokens, `round_seconds[i]` the time of a whole round of that size, draft pass included. An edge equal
    to R stands for a round without drafts: give it the time of plain decoding. Returns edge - R for the edge
    with the most expected tokens a second, ties to the smaller edge; edges under R cannot hold the batch.
    ConfigError if no edge can, or the two lists do not match.
    """
    survival = np.asarray(survival_RG, np.float64)
    seconds, edges = np.asarray(round_seconds, np.float64), np.asarray(token_edges, np.int64)
    num_rows = survival.shape[0]
    if seconds.shape != edges.shape or edges.ndim != 1:
        raise ConfigError(f"{seconds.size} round times for {edges.size} token edges: give one time for each edge")
    if not np.all(seconds > 0):
        raise ConfigError(f"round_seconds {seconds.tolist()}: every time must be positive")
    if not np.any(edges >= num_rows):
        raise ConfigError(f"token_edges {edges.tolist()} cannot hold {num_rows} requests: add a larger edge")
    best = np.sort(np.where(np.isnan(survival), 0.0, survival), axis=None)[::-1]
    expected = num_rows + np.concatenate([[0.0], np.cumsum(best)])
    order = np.argsort(edges, kind="stable")
    order = order[edges[order] >= num_rows]
    capacity = np.minimum(edges[order] - num_rows, survival.size)
    return int(capacity[np.argmax(expected[capacity] / seconds[order])])


def _settled(survival_RG: Array) -> Array:
    # a product rounded up by a bit must not overtake the shorter prefix: admission would then skip a draft
    return lax.cummin(jnp.where(jnp.isnan(survival_RG), 0.0, survival_RG), axis=1)


def _ranked(survival_RG: Array) -> tuple[Array, Array]:
    """All survivals in descending order, ties by (position, request), and each one's place in that order."""
    flat_N = survival_RG.T.reshape(-1)
    order_N = jnp.argsort(-flat_N, stable=True)
    rank_N = jnp.zeros_like(order_N).at[order_N].set(jnp.arange(order_N.shape[0], dtype=order_N.dtype))
    return flat_N[order_N], rank_N.reshape(survival_RG.shape[::-1]).T
