"""The sequential heads and the confidence head (DSpark): small things that see the token just drafted.

A Markov head gives each slot a latent of rank r, from which W2 makes a bias over the draft vocabulary:

    vanilla   e                        e = W1[previous token]
    gated     sigmoid(Wg [h; e]) * e   h = the backbone's hidden state of the slot
    rnn       tanh(o), with [g, c, o] = W [s; e; h] and the next state sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c);
              the state starts at zero, so a latent knows every token of the block before it
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import layers
from dspark_jax.config import DrafterConfig, MarkovHeadType

_zeros = nn.initializers.zeros


class MarkovHead(nn.Module):
    """One cell for training and sampling: `latents` runs `step` over blocks of known tokens."""

    config: DrafterConfig

    def setup(self) -> None:
        c = self.config
        self.w1 = self.param("w1", layers.normal_init, (c.vocab_size, c.markov_rank))
        self.w2 = self.param("w2", layers.normal_init, (c.head_rows, c.markov_rank))
        for name, shape in gate_shapes(c).items():
            setattr(self, name, self.param(name, _zeros if name.endswith("bias") else layers.normal_init, shape))

    def embed(self, previous: jax.Array) -> jax.Array:
        """[...] target ids to [..., r]."""
        return self.w1[previous]

    def bias(self, latent: jax.Array, ids: jax.Array | None = None) -> jax.Array:
        """[..., r] to float32 logits [..., V] that are added to the backbone's; with `ids`, only theirs [..., K]."""
        if ids is None:
            return layers.linear(latent, self.w2)
        return jnp.einsum("...r,...Kr->...K", latent.astype(jnp.float32), self.w2[ids].astype(jnp.float32))

    def project(self, hidden: jax.Array) -> jax.Array | None:
        """What [..., D] hidden states add to the cell's gates: one product for all slots, outside the scan."""
        c = self.config
        match c.markov_head_type:
            case "gated":
                return layers.linear(hidden, self.gate[:, : c.d_model]) + _row(self.gate_bias, hidden.ndim)
            case "rnn":
                return layers.linear(hidden, self.joint[:, 2 * c.markov_rank :]) + _row(self.joint_bias, hidden.ndim)
        return None

    def step(self, state: Any, embedded: jax.Array, projected: jax.Array | None) -> tuple[Any, jax.Array]:
        """The next state and this slot's latent [..., r], from `embed` and `project` of the slot."""
        c = self.config
        match c.markov_head_type:
            case "gated":
                assert projected is not None
                gate = projected + layers.linear(embedded, self.gate[:, c.d_model :])
                return state, jax.nn.sigmoid(gate) * embedded.astype(jnp.float32)
            case "rnn":
                seen = jnp.concatenate([state, embedded.astype(jnp.float32)], axis=-1)
                assert projected is not None
                joint = projected + layers.linear(seen, self.joint[:, : 2 * c.markov_rank])
                gate, candidate, out = jnp.split(joint, 3, axis=-1)
                gate = jax.nn.sigmoid(gate)
                return gate * state + (1 - gate) * jnp.tanh(candidate), jnp.tanh(out)
        return state, embedded

    def latents(self, hidden: jax.Array, embedded: jax.Array) -> jax.Array:
        """Latents [..., G, r] of blocks whose previous tokens are known (teacher forcing)."""
        projected = self.project(hidden)
        if self.config.markov_head_type != "rnn":
            return self.step(None, embedded, projected)[1]
        assert projected is not None
        state = first_state(self.config, embedded.shape[:-2])
        by_slot = (jnp.moveaxis(x, -2, 0) for x in (embedded, projected))
        _, latent = jax.lax.scan(lambda state, slot: self.step(state, *slot), state, tuple(by_slot))
        return jnp.moveaxis(latent, 0, -2)


def gate_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Weights of a head's type beside W1 and W2: gate over [h; e], joint over [s; e; h]."""
    r, d = config.markov_rank, config.d_model
    shapes: dict[MarkovHeadType, dict[str, tuple[int, ...]]] = {
        "vanilla": {},
        "gated": {"gate": (r, d + r), "gate_bias": (r,)},
        "rnn": {"joint": (3 * r, 2 * r + d), "joint_bias": (3 * r,)},
    }
    return shapes[config.markov_head_type]


def first_state(config: DrafterConfig, leading: tuple[int, ...]) -> jax.Array | None:
    """The state before a block's first slot; None where the head keeps none."""
    return jnp.zeros((*leading, config.markov_rank), jnp.float32) if config.markov_head_type == "rnn" else None


def _row(vector: jax.Array, ndim: int) -> jax.Array:
    return vector.reshape((1,) * (ndim - 1) + vector.shape)


class ConfidenceHead(nn.Module):
    """One logit a draft from the backbone's hidden state and, with a Markov head, the previous token's row of W1."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        weight = self.param("weight", layers.normal_init, (x.shape[-1],))
        bias = self.param("bias", _zeros, ())
        # A vector weight stays float32 (see cast_params): this logit is a probability, not a hidden state.
        return jnp.einsum("...D,D->...", x.astype(jnp.float32), weight) + bias
