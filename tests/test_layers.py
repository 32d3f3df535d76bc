"""The one product and its gradients, on the routes a CPU takes: thin, turned, and transposed by tiles. Lookups too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.layers import linear, rows_of


def integers(seed: int, *shape: int) -> np.ndarray:
    """Small whole numbers: bfloat16 products of them, and float32 sums, are exact."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 6, 17, 32, 64, 75, 320])
@pytest.mark.parametrize("outputs", [5, 24, 128])
def test_values_and_gradients_are_those_of_the_product(dtype: jnp.dtype, rows: int, outputs: int):
    x, w, of = integers(0, rows, 12), integers(1, outputs, 12), integers(2, rows, outputs)
    y, pull_back = jax.vjp(linear, jnp.asarray(x), jnp.asarray(w, dtype))
    of_x, of_w = pull_back(jnp.asarray(of))
    assert (y.dtype, of_x.dtype, of_w.dtype) == (jnp.float32, jnp.float32, dtype)
    np.testing.assert_array_equal(y, x @ w.T)
    np.testing.assert_array_equal(of_x, of @ w)
    # The gradient leaves in the dtype of the weight: rounded once, from the exact sum.
    np.testing.assert_array_equal(of_w, jnp.asarray(of.T @ x, dtype))


def test_leading_axes_are_rows_and_output_axes_are_kept():
    x, w = integers(0, 2, 5, 12), integers(1, 3, 4, 12)
    np.testing.assert_array_equal(linear(jnp.asarray(x), jnp.asarray(w)), np.einsum("abi,opi->abop", x, w))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_and_their_gradients_are_those_of_indexing(dtype: jnp.dtype):
    table, ids = jnp.asarray(integers(0, 50, 8), dtype), jnp.array([[3, 0, 3], [49, 7, 3]])
    weight = jnp.asarray(integers(1, 2, 3, 8), dtype)
    np.testing.assert_array_equal(rows_of(table, ids), table[ids])
    found = jax.jit(jax.grad(lambda t: jnp.sum(rows_of(t, ids) * weight)))(table)
    np.testing.assert_array_equal(found, jax.jit(jax.grad(lambda t: jnp.sum(t[ids] * weight)))(table))


def test_a_loop_widens_only_the_rows_that_it_looks_up():
    """On a CPU, where a bfloat16 table looked up in a loop was widened as a whole."""
    table = jnp.zeros((4096, 64), jnp.bfloat16)

    def follow(table: jax.Array, ids: jax.Array) -> jax.Array:
        def step(ids: jax.Array, slot: jax.Array) -> tuple[jax.Array, None]:
            return jnp.argmax(rows_of(table, ids).astype(jnp.float32), axis=1).astype(jnp.int32) + slot, None

        return jax.lax.scan(step, ids, jnp.arange(5, dtype=jnp.int32))[0]

    whole = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        compiled = jax.jit(follow).lower(table, jnp.zeros(8, jnp.int32)).compile()
    finally:
        jax.config.update("jax_disable_most_optimizations", whole)
    used = compiled.memory_analysis()
    assert used is not None and used.temp_size_in_bytes < table.nbytes
