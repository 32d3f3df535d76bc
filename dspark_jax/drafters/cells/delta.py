"""Gated DeltaNet and Kimi Delta Attention as cells: a matrix S a head, corrected towards each slot's key and value.

    S <- decay S;   S <- S + beta k (v - S' k)';   o = S' q

GDN decays all of a head alike, KDA every key channel by itself. The state is [..., H, K, V] with K = V.
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
    zeros,
)
from dspark_jax.layers import linear, rms_norm


class Slot(NamedTuple):
    """What slots [...] read of z: q, k, v [..., H, S], log decay [..., H, S] (KDA) or [..., H, 1], beta [..., H], and
    the gate of what is read [..., H, S]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    log_decay: jax.Array
    beta: jax.Array
    gate: jax.Array


class _Delta(StateCell):
    def advance(self, w: Weights, state: jax.Array, slot: Slot) -> tuple[jax.Array, jax.Array]:
        state = state * jnp.exp(slot.log_decay)[..., None]
        wrong = slot.v - jnp.einsum("...k,...kv->...v", slot.k, state)
        state += slot.beta[..., None, None] * slot.k[..., :, None] * wrong[..., None, :]
        return state, jnp.einsum("...k,...kv->...v", slot.q, state)

    def unroll(self, w: Weights, slots: Slot) -> jax.Array:
        """One chunk: the corrections u of all slots solve (1 + A) u = beta v, A unit lower triangular in time."""
        q, k, v, log_decay = (jnp.swapaxes(x, -2, -3) for x in slots[:4])  # [..., H, G, *]
        beta = jnp.swapaxes(slots.beta, -1, -2)
        decay = decay_between(jnp.cumsum(log_decay, axis=-2))  # [..., H, G, G, K or 1]

        def products(a: jax.Array, b: jax.Array) -> jax.Array:
            """Over channels c: the sum of a_ic decay_ijc b_jc."""
            if decay.shape[-1] == 1:
                return jnp.einsum("...ic,...jc->...ij", a, b) * decay[..., 0]
            return jnp.einsum("...ic,...ijc,...jc->...ij", a, decay, b)

        correction = jax.lax.linalg.triangular_solve(
            beta[..., None] * products(k, k), beta[..., None] * v, left_side=True, lower=True, unit_diagonal=True
        )
        return jnp.swapaxes(products(q, k) @ correction, -2, -3)

    def finish(self, w: Weights, read: jax.Array, slot: Slot) -> jax.Array:
        normed = rms_norm(read, w["out_norm"], self.config.norm_eps) * slot.gate
        return normed.reshape(*normed.shape[:-2], -1)

    def _qkv(self, w: Weights, z: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        qkv = jax.nn.silu(linear(z, w["cell_qkv"]))
        q, k, v = (qkv[..., i, :, :] for i in range(3))
        return _unit(q) * self.config.cell_size**-0.5, _unit(k), v


class GatedDeltaNet(_Delta):
    def cell_weights(self) -> dict[str, Weight]:
        c = self.config
        heads, size, width = c.cell_heads, c.cell_size, 2 * c.markov_rank
        return {
            "cell_qkv": Weight((3, heads, size, width)),
            "cell_gates": Weight((2, heads, width)),
            "a_log": Weight((heads,), log_decay_init(1e-3)),
            "dt_bias": Weight((heads,), time_step_init),
            "out_gate": Weight((heads, size, width)),
            "out_norm": Weight((size,), ones),
        }

    def read(self, w: Weights, z: jax.Array) -> Slot:
        gates = linear(z, w["cell_gates"])
        step = jax.nn.softplus(gates[..., 0, :] + as_rows(w["dt_bias"], z.ndim))
        log_decay = -as_rows(jnp.exp(w["a_log"]), z.ndim) * step
        gate = jax.nn.silu(linear(z, w["out_gate"]))
        return Slot(*self._qkv(w, z), log_decay[..., None], jax.nn.sigmoid(gates[..., 1, :]), gate)


class KimiDelta(_Delta):
    def cell_weights(self) -> dict[str, Weight]:
        c = self.config
        heads, size, width = c.cell_heads, c.cell_size, 2 * c.markov_rank
        return {
            "cell_qkv": Weight((3, heads, size, width)),
            "cell_beta": Weight((heads, width)),
            "a_log": Weight((heads,), log_decay_init(1.0)),
            "decay_in": Weight((size, width)),
            "decay_out": Weight((heads, size, size)),
            "dt_bias": Weight((heads * size,), zeros),
            "out_gate_in": Weight((size, width)),
            "out_gate_out": Weight((heads, size, size)),
            "out_gate_bias": Weight((heads * size,), zeros),
            "out_norm": Weight((size,), ones),
        }

    def read(self, w: Weights, z: jax.Array) -> Slot:
        heads = self.config.cell_heads, self.config.cell_size
        step = linear(linear(z, w["decay_in"]), w["decay_out"])
        step = jax.nn.softplus(step + as_rows(w["dt_bias"].reshape(heads), step.ndim))
        log_decay = -as_rows(jnp.exp(w["a_log"])[:, None], step.ndim) * step
        gate = linear(linear(z, w["out_gate_in"]), w["out_gate_out"])
        gate = jax.nn.sigmoid(gate + as_rows(w["out_gate_bias"].reshape(heads), gate.ndim))
        return Slot(*self._qkv(w, z), log_decay, jax.nn.sigmoid(linear(z, w["cell_beta"])), gate)


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)
