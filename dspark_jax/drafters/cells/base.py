"""What the cell of a sequential head is: it turns the tokens before a slot, and the slot's hidden state, into a latent.

A cell has one `step`, which the sampler scans over a block, and `block`, which gives at once the latents of a block
whose tokens are known. The two are the same function; where a closed form exists, `block` is it, else a scan of steps.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import layers
from dspark_jax.config import DrafterConfig

Weights = Mapping[str, jax.Array]
zeros, ones = nn.initializers.zeros, nn.initializers.ones


class Weight(NamedTuple):
    """One parameter of a cell. Vectors stay float32 in every compute dtype (see cast_params), matrices do not."""

    shape: tuple[int, ...]
    init: Callable[..., jax.Array] = layers.normal_init


class Previous(NamedTuple):
    """The token before a slot, or before each slot of a block: its id [...], its row of W1 [..., r] (None for a head
    without W1) and its row of the target's embedding [..., D] (None where the head reads none)."""

    token: jax.Array
    row: jax.Array | None
    embedded: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Cell(abc.ABC):
    """The interface, and what most cells share. `projected` is what `project` makes of hidden states [..., G, D]: one
    product for a whole block, of which `step` is given its own slot's part."""

    config: DrafterConfig
    has_rows: ClassVar[bool] = True
    """Whether the head has a W1."""
    w2_init: ClassVar[Callable[..., jax.Array]] = staticmethod(layers.normal_init)

    def weights(self) -> dict[str, Weight]:
        """Parameters beside W1 and W2."""
        return {}

    def project(self, w: Weights, hidden: jax.Array) -> Any:
        """What the hidden states of a block [..., G, D] give to its slots: a tree of [..., G, *], or None."""
        return None

    def first_state(self, leading: tuple[int, ...]) -> Any:
        """The state before a block's first slot; None where there is none."""
        return None

    @abc.abstractmethod
    def step(self, w: Weights, state: Any, previous: Previous, projected: Any) -> tuple[Any, jax.Array]:
        """The next state, and the latent [..., r] of a slot."""

    def block(self, w: Weights, previous: Previous, projected: Any) -> jax.Array:
        """Latents [..., G, r] of blocks whose previous tokens [..., G] are known."""
        axis = previous.token.ndim - 1
        by_slot = jax.tree.map(lambda x: jnp.moveaxis(x, axis, 0), (previous, projected))
        state = self.first_state(previous.token.shape[:-1])
        _, latent = jax.lax.scan(lambda state, slot: self.step(w, state, *slot), state, by_slot)
        return jnp.moveaxis(latent, 0, axis)


class Stateless(Cell):
    """A cell whose latent depends on nothing but its slot: a block is one step on all slots."""

    def block(self, w: Weights, previous: Previous, projected: Any) -> jax.Array:
        return self.step(w, None, previous, projected)[1]


class StateCell(Cell):
    """A recurrent cell beside the Markov row: e + Wo cell(z), z = norm([e; P h]).

    Wo begins as zeros, so the head begins as the vanilla one. A subclass says what a slot reads of z (`read`, in
    parallel), how the state goes on (`advance`), the same for a whole block from the zero state (`unroll`), and what
    Wo is given (`finish`). The short convolutions that these cells have elsewhere are left out: a block is a few
    tokens, and an n-gram head is the better way to read the last two or three.
    """

    @abc.abstractmethod
    def cell_weights(self) -> dict[str, Weight]:
        """Parameters beside P, Wo and the norm of z."""

    @abc.abstractmethod
    def read(self, w: Weights, z: jax.Array) -> Any:
        """What the slots [...] of z [..., 2r] give to the recurrence: a tree of [..., *]."""

    @abc.abstractmethod
    def advance(self, w: Weights, state: jax.Array, slot: Any) -> tuple[jax.Array, jax.Array]:
        """The next state [..., H, *, *], and what is read from it [..., H, S]."""

    @abc.abstractmethod
    def unroll(self, w: Weights, slots: Any) -> jax.Array:
        """What `advance` reads at every slot of blocks [..., G, H, S]: the closed form."""

    @abc.abstractmethod
    def finish(self, w: Weights, read: jax.Array, slot: Any) -> jax.Array:
        """Normed and gated, [..., H S]."""

    def weights(self) -> dict[str, Weight]:
        c = self.config
        width = 2 * c.markov_rank
        return {
            "hidden_in": Weight((c.markov_rank, c.d_model)),
            "z_norm": Weight((width,), ones),
            "cell_out": Weight((c.markov_rank, c.cell_heads * c.cell_size), zeros),
        } | self.cell_weights()

    def project(self, w: Weights, hidden: jax.Array) -> jax.Array:
        return layers.linear(hidden, w["hidden_in"])

    def first_state(self, leading: tuple[int, ...]) -> jax.Array:
        return jnp.zeros((*leading, self.config.cell_heads, self.config.cell_size, self.config.cell_size), jnp.float32)

    def step(self, w: Weights, state: Any, previous: Previous, projected: Any) -> tuple[Any, jax.Array]:
        slot = self._read(w, previous, projected)
        state, read = self.advance(w, state, slot)
        return state, self._latent(w, previous, read, slot)

    def block(self, w: Weights, previous: Previous, projected: Any) -> jax.Array:
        slots = self._read(w, previous, projected)
        return self._latent(w, previous, self.unroll(w, slots), slots)

    def _read(self, w: Weights, previous: Previous, projected: jax.Array) -> Any:
        assert previous.row is not None
        both = jnp.concatenate([previous.row.astype(jnp.float32), projected], axis=-1)
        return self.read(w, layers.rms_norm(both, w["z_norm"], self.config.norm_eps))

    def _latent(self, w: Weights, previous: Previous, read: jax.Array, slot: Any) -> jax.Array:
        assert previous.row is not None
        return previous.row.astype(jnp.float32) + layers.linear(self.finish(w, read, slot), w["cell_out"])


def as_rows(vector: jax.Array, ndim: int) -> jax.Array:
    """A vector, or the last axes of an array, with leading axes of size 1 up to `ndim`."""
    return vector.reshape((1,) * (ndim - vector.ndim) + vector.shape)


def decay_between(total: jax.Array) -> jax.Array:
    """exp(total_i - total_j) for slots j <= i, 0 above: [..., G, *] to [..., G, G, *], for one trailing axis.

    The difference comes first: each of the two factors alone would overflow where a decay is strong.
    """
    difference = total[..., :, None, :] - total[..., None, :, :]
    seen = as_rows(jnp.tri(total.shape[-2], dtype=bool)[:, :, None], difference.ndim)
    return jnp.exp(jnp.where(seen, difference, -jnp.inf))


def log_decay_init(smallest: float) -> Callable[..., jax.Array]:
    """log A for A uniform up to 16."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        return jnp.log(jax.random.uniform(key, shape, dtype, smallest, 16.0))

    return init


def time_step_init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """The inverse softplus of steps drawn log-uniformly from 0.001 to 0.1."""
    step = jnp.exp(jax.random.uniform(key, shape, dtype, jnp.log(1e-3), jnp.log(0.1)))
    return step + jnp.log(-jnp.expm1(-step))
