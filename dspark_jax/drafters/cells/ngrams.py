"""Heads that look at the last two or three tokens: rows that add up, or hashed rows of whole n-grams.

The window stops at the block's start: tokens before the anchor are not read, though they are known, since `propose` is
given the anchor alone; training does the same. What would reach past the start counts as nothing.
"""

import abc
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.drafters.cells.base import Cell, Previous, Weight, Weights, as_rows, zeros
from dspark_jax.layers import linear, rows_of

_NONE = -1  # the id of a token before the block


class _Window(Cell):
    """The state is the `ngram_tokens` - 1 ids before the previous token, newest first."""

    def first_state(self, leading: tuple[int, ...]) -> jax.Array:
        return jnp.full((*leading, self.config.ngram_tokens - 1), _NONE, jnp.int32)

    def step(self, w: Weights, state: Any, previous: Previous, projected: Any) -> tuple[Any, jax.Array]:
        window = jnp.concatenate([previous.token[..., None].astype(jnp.int32), state], axis=-1)
        return window[..., :-1], self.latent(w, window, previous, projected)

    def block(self, w: Weights, previous: Previous, projected: Any) -> jax.Array:
        tokens = previous.token.astype(jnp.int32)
        before = self.first_state(tokens.shape[:-1])
        padded = jnp.concatenate([before, tokens], axis=-1)
        length, reach = tokens.shape[-1], before.shape[-1]
        shifted = [padded[..., reach - back : reach - back + length] for back in range(reach + 1)]
        return self.latent(w, jnp.stack(shifted, axis=-1), previous, projected)

    @abc.abstractmethod
    def latent(self, w: Weights, window: jax.Array, previous: Previous, projected: Any) -> jax.Array:
        """[..., r] from the window's ids [..., N], newest first."""


class Ngram(_Window):
    """A table of its own for each distance, W1[x] + W1'[x'] + ...: skip-grams, V r weights each. All but W1 begin as
    zeros, so the head begins as the vanilla one."""

    def weights(self) -> dict[str, Weight]:
        c = self.config
        return {"ngram": Weight((c.ngram_tokens - 1, c.vocab_size, c.markov_rank), zeros)}

    def latent(self, w: Weights, window: jax.Array, previous: Previous, projected: Any) -> jax.Array:
        assert previous.row is not None
        latent, table = previous.row.astype(jnp.float32), w["ngram"].reshape(-1, self.config.markov_rank)
        for back in range(1, self.config.ngram_tokens):
            token = window[..., back]
            row = rows_of(table, (back - 1) * self.config.vocab_size + token)
            latent += jnp.where((token != _NONE)[..., None], row.astype(jnp.float32), 0.0)
        return latent


class HashedNgram(_Window):
    """Rows of whole n-grams, of two tokens up to `ngram_tokens`, found by hashing (after Engram).

    Each order has `hash_tables` tables of at most `hash_rows` rows: an n-gram's row of each is

        (XOR over its tokens t_m of t_m * odd[m]) mod prime

    with factors and a prime of the table's own, and its rows of width r / `hash_tables` side by side are its vector of
    width r. With the vectors of all orders as E, the latent is

        e + sigmoid(signed root of <rms(K E), rms(P h)> / sqrt r) * O E

    so the hidden state weighs what the table remembers, collisions included. O begins as zeros: the head begins as the
    vanilla one.
    """

    def weights(self) -> dict[str, Weight]:
        c = self.config
        r, orders = c.markov_rank, c.ngram_tokens - 1
        return {
            "hash_table": Weight((orders * c.hash_tables * c.hash_rows, r // c.hash_tables)),
            "hash_key": Weight((r, orders * r)),
            "hash_out": Weight((r, orders * r), zeros),
            "hidden_in": Weight((r, c.d_model)),
        }

    def project(self, w: Weights, hidden: jax.Array) -> jax.Array:
        return linear(hidden, w["hidden_in"])

    def latent(self, w: Weights, window: jax.Array, previous: Previous, projected: Any) -> jax.Array:
        assert previous.row is not None
        c = self.config
        vectors = []
        for order in range(2, c.ngram_tokens + 1):
            known = window[..., order - 1] != _NONE  # then all of the n-gram's tokens are
            rows = rows_of(w["hash_table"], self._places(window[..., :order])).astype(jnp.float32)
            vectors.append(jnp.where(known[..., None], rows.reshape(*known.shape, c.markov_rank), 0.0))
        found = jnp.concatenate(vectors, axis=-1)
        score = jnp.mean(_rms(linear(found, w["hash_key"])) * _rms(projected), axis=-1, keepdims=True)
        score *= c.markov_rank**0.5
        gate = jax.nn.sigmoid(score * jax.lax.rsqrt(jnp.abs(score) + 1e-6))
        return previous.row.astype(jnp.float32) + gate * linear(found, w["hash_out"])

    def _places(self, ngram: jax.Array) -> jax.Array:
        """Row numbers [..., tables] of n-grams [..., n], newest first."""
        c, order = self.config, ngram.shape[-1]
        primes = _primes((c.ngram_tokens - 1) * c.hash_tables, c.hash_rows)
        first = (order - 2) * c.hash_tables
        mixed = jnp.zeros((*ngram.shape[:-1], c.hash_tables), jnp.uint32)
        for back in range(order):
            odd = as_rows(jnp.asarray(_odd_factors(order, back, c.hash_tables)), mixed.ndim)
            mixed ^= ngram[..., back, None].astype(jnp.uint32) * odd
        own = np.asarray(primes[first : first + c.hash_tables], np.uint32)
        start = np.arange(first, first + c.hash_tables, dtype=np.int32) * c.hash_rows
        return (mixed % as_rows(jnp.asarray(own), mixed.ndim)).astype(jnp.int32) + as_rows(
            jnp.asarray(start), mixed.ndim
        )


def _rms(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


@functools.cache
def _primes(count: int, largest: int) -> tuple[int, ...]:
    """The `count` largest primes up to `largest`, descending. A trained table depends on them: never change this."""
    found: list[int] = []
    candidate = largest
    while len(found) < count:
        if all(candidate % divisor for divisor in range(2, int(candidate**0.5) + 1)):
            found.append(candidate)
        candidate -= 1
    return tuple(found)


def _odd_factors(order: int, back: int, tables: int) -> np.ndarray:
    """One odd 32-bit factor a table, by Weyl's sequence. A trained table depends on them: never change this."""
    number = (np.arange(tables, dtype=np.uint64) + np.uint64(1)) * np.uint64(64) + np.uint64(8 * order + back)
    return ((number * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
