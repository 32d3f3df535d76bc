"""The published Markov heads: DSpark's three, and Domino's.

vanilla   e                                      e = W1[previous token]
gated     sigmoid(Wg [h; e] + b) * e             h = the backbone's hidden state of the slot
rnn       tanh(o), with [g, c, o] = W [s; e; h] + b, next state sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c);
          the state starts at zero, so a latent knows every token of the block before it
domino    silu(Wa [h; s']), s' the next state of a GRU over the target's frozen embedding of the tokens
"""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from dspark_jax.drafters.cells.base import Cell, Previous, Stateless, Weight, Weights, as_rows, zeros
from dspark_jax.layers import linear


class Vanilla(Stateless):
    """DSpark's default: the bias is a low-rank table of transitions."""

    def step(self, w: Weights, state: Any, previous: Previous, projected: Any) -> tuple[Any, jax.Array]:
        assert previous.row is not None
        return state, previous.row


class Gated(Stateless):
    def weights(self) -> dict[str, Weight]:
        r, d = self.config.markov_rank, self.config.d_model
        return {"gate": Weight((r, d + r)), "gate_bias": Weight((r,), zeros)}

    def project(self, w: Weights, hidden: jax.Array) -> jax.Array:
        return linear(hidden, w["gate"][:, : self.config.d_model]) + as_rows(w["gate_bias"], hidden.ndim)

    def step(self, w: Weights, state: Any, previous: Previous, projected: Any) -> tuple[Any, jax.Array]:
        assert previous.row is not None
        gate = projected + linear(previous.row, w["gate"][:, self.config.d_model :])
        return state, jax.nn.sigmoid(gate) * previous.row.astype(jnp.float32)


class Rnn(Cell):
    def weights(self) -> dict[str, Weight]:
        r, d = self.config.markov_rank, self.config.d_model
        return {"joint": Weight((3 * r, 2 * r + d)), "joint_bias": Weight((3 * r,), zeros)}

    def project(self, w: Weights, hidden: jax.Array) -> jax.Array:
        return linear(hidden, w["joint"][:, 2 * self.config.markov_rank :]) + as_rows(w["joint_bias"], hidden.ndim)

    def first_state(self, leading: tuple[int, ...]) -> jax.Array:
        return jnp.zeros((*leading, self.config.markov_rank), jnp.float32)

    def step(self, w: Weights, state: Any, previous: Previous, projected: Any) -> tuple[Any, jax.Array]:
        assert previous.row is not None
        seen = jnp.concatenate([state, previous.row.astype(jnp.float32)], axis=-1)
        joint = projected + linear(seen, w["joint"][:, : 2 * self.config.markov_rank])
        gate, candidate, out = jnp.split(joint, 3, axis=-1)
        gate = jax.nn.sigmoid(gate)
        return gate * state + (1 - gate) * jnp.tanh(candidate), jnp.tanh(out)


def _gru_init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """PyTorch's: uniform within one over the root of the state's width. Shape [3, state, in]."""
    edge = shape[1] ** -0.5
    return jax.random.uniform(key, shape, dtype, -edge, edge)


class Domino(Cell):
    """Domino's "causal encoder" (arXiv 2605.29707): no W1, no bias vectors, gates in the order r, z, n.

    The first `pure_draft_prefix_len` slots get a latent of zeros, hence no bias. W2 begins as zeros: such a drafter
    begins as DFlash.
    """

    has_rows: ClassVar[bool] = False
    w2_init: ClassVar[Any] = staticmethod(zeros)

    def weights(self) -> dict[str, Weight]:
        c = self.config
        return {
            "gru_in": Weight((3, c.cell_size, c.d_model), _gru_init),
            "gru_state": Weight((3, c.cell_size, c.cell_size), _gru_init),
            "merge": Weight((c.markov_rank, c.d_model + c.cell_size)),
        }

    def project(self, w: Weights, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        biased_G = jnp.arange(hidden.shape[-2]) >= self.config.pure_draft_prefix_len
        biased = jnp.broadcast_to(as_rows(biased_G[:, None], hidden.ndim), (*hidden.shape[:-1], 1))
        return linear(hidden, w["merge"][:, : self.config.d_model]), biased

    def first_state(self, leading: tuple[int, ...]) -> jax.Array:
        return jnp.zeros((*leading, self.config.cell_size), jnp.float32)

    def step(self, w: Weights, state: Any, previous: Previous, projected: Any) -> tuple[Any, jax.Array]:
        assert previous.embedded is not None
        return self._advance(w, state, linear(previous.embedded, w["gru_in"]), projected)

    def block(self, w: Weights, previous: Previous, projected: Any) -> jax.Array:
        """The product with the embeddings, which is most of the work, is one for all slots."""
        assert previous.embedded is not None
        axis = previous.token.ndim - 1
        inputs = linear(previous.embedded, w["gru_in"])
        by_slot = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), (inputs, projected))
        state = self.first_state(previous.token.shape[:-1])
        _, latent = jax.lax.scan(lambda state, slot: self._advance(w, state, *slot), state, by_slot)
        return jnp.moveaxis(latent, 0, axis)

    def _advance(self, w: Weights, state: jax.Array, inputs: jax.Array, projected: Any) -> tuple[jax.Array, jax.Array]:
        from_state, (from_hidden, biased) = linear(state, w["gru_state"]), projected
        reset, update = (jax.nn.sigmoid(inputs[..., i, :] + from_state[..., i, :]) for i in range(2))
        new = jnp.tanh(inputs[..., 2, :] + reset * from_state[..., 2, :])
        state = (1 - update) * new + update * state
        latent = jax.nn.silu(from_hidden + linear(state, w["merge"][:, self.config.d_model :]))
        return state, jnp.where(biased, latent, 0.0)
