"""Mamba-2 as a cell: a decaying sum of outer products a head, S <- exp(-dt A) S + dt x B', y = S C + D x.

B and C are shared by the heads; the state is [..., H, P, N] with P = N.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.drafters.cells.base import (
    StateCell,
    Weight,
    Weights,
    as_rows,
    decay_between,
    log_decay_init,
    ones,
    time_step_init,
)
from dspark_jax.layers import linear, rms_norm


class Slot(NamedTuple):
    """What slots [...] read of z: x and gate [..., H, P], B and C [..., N], dt and log decay [..., H]."""

    gate: jax.Array
    x: jax.Array
    b: jax.Array
    c: jax.Array
    dt: jax.Array
    log_decay: jax.Array


class Mamba2(StateCell):
    def cell_weights(self) -> dict[str, Weight]:
        heads, size = self.config.cell_heads, self.config.cell_size
        return {
            "cell_in": Weight((2 * heads * size + 2 * size + heads, 2 * self.config.markov_rank)),
            "a_log": Weight((heads,), log_decay_init(1.0)),
            "dt_bias": Weight((heads,), time_step_init),
            "skip": Weight((heads,), ones),
            "out_norm": Weight((heads * size,), ones),
        }

    def read(self, w: Weights, z: jax.Array) -> Slot:
        heads, size = self.config.cell_heads, self.config.cell_size
        inner, leading = heads * size, z.shape[:-1]
        flat = linear(z, w["cell_in"])
        gate, x, b, c, dt = jnp.split(flat, (inner, 2 * inner, 2 * inner + size, 2 * inner + 2 * size), axis=-1)
        x, b, c = jax.nn.silu(x), jax.nn.silu(b), jax.nn.silu(c)
        dt = jax.nn.softplus(dt + as_rows(w["dt_bias"], dt.ndim))
        log_decay = -dt * as_rows(jnp.exp(w["a_log"]), dt.ndim)
        return Slot(gate.reshape(*leading, heads, size), x.reshape(*leading, heads, size), b, c, dt, log_decay)

    def advance(self, w: Weights, state: jax.Array, slot: Slot) -> tuple[jax.Array, jax.Array]:
        added = (slot.dt[..., None] * slot.x)[..., None] * slot.b[..., None, None, :]
        state = state * jnp.exp(slot.log_decay)[..., None, None] + added
        return state, jnp.einsum("...hpn,...n->...hp", state, slot.c)

    def unroll(self, w: Weights, slots: Slot) -> jax.Array:
        total = jnp.cumsum(slots.log_decay, axis=-2)  # [..., G, H]
        both = jnp.einsum("...in,...jn->...ij", slots.c, slots.b)[..., None] * decay_between(total)
        return jnp.einsum("...ijh,...jhp->...ihp", both, slots.dt[..., None] * slots.x)

    def finish(self, w: Weights, read: jax.Array, slot: Slot) -> jax.Array:
        y = read + as_rows(w["skip"][:, None], read.ndim) * slot.x
        gated = (y * jax.nn.silu(slot.gate)).reshape(*y.shape[:-2], -1)
        return rms_norm(gated, w["out_norm"], self.config.norm_eps)
