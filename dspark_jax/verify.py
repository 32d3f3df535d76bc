"""Lossless acceptance of drafted blocks: the token-wise rule, block verification, and the greedy short cut.

Each rule is split in two: the acceptance probabilities are pure functions of the laws, so that tests can
enumerate them exactly, and the draw on top of them is a few lines.

Conventions: R requests, G drafts, V the target's vocabulary (the draft law may be over a smaller one).
`target_law` is the law the request really samples from after draft 0..G, either a rectangle [R, G+1, V] or the
packed rows of a round (`PackedLaw`): verification reads single entries and one row a request, so packing saves the
rectangle. `lengths_R` says how many drafts of each row are under verification. Rows past a length are never looked
at and may hold anything.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from dspark_jax.sampling import BlockSample, sample_rows

_NO_RESIDUAL = 1e-8  # a residual lighter than this is rounding noise: draw from the target's law


class Verdict(NamedTuple):
    """accepted_R drafts stand (0..lengths_R), then next_token_R (a target id) is emitted; both int32."""

    accepted_R: Array
    next_token_R: Array


class PackedLaw(NamedTuple):
    """The law after draft j of request r is row `index_RG1[r, j]` of `law_TV`; an index of T or more: not there."""

    law_TV: Array
    index_RG1: Array

    def rows(self, position_R: Array) -> Array:
        """One row a request, [R, V]."""
        return self.law_TV[self.index_RG1[jnp.arange(position_R.shape[0]), position_R]]

    def entries(self, tokens_RG: Array) -> Array:
        """The chance of each draft, [R, G]."""
        return self.law_TV[self.index_RG1[:, : tokens_RG.shape[1]], tokens_RG]


def _packed(law: Array | PackedLaw) -> PackedLaw:
    if isinstance(law, PackedLaw):
        return law
    num_rows, num_places, vocab_size = law.shape
    index = jnp.arange(num_rows * num_places).reshape(num_rows, num_places)
    return PackedLaw(law.reshape(-1, vocab_size), index)


class Acceptance(NamedTuple):
    """accept_RG: chance that the test of each draft passes, 0 past the length. weight_RG1 [R, G+1]: what the
    target's law is multiplied by in the residual after 0..G drafts (1 under the token-wise rule)."""

    accept_RG: Array
    weight_RG1: Array


def inverse_map(d2t_V: Array, vocab_size: int) -> Array:
    """Draft-id -> target-id map to its inverse: t2d_V [vocab_size] int32, -1 where the draft has no such token."""
    ids = jnp.arange(d2t_V.shape[0], dtype=jnp.int32)
    return jnp.full((vocab_size,), -1, jnp.int32).at[d2t_V].set(ids)


def token_acceptance(target_law: Array | PackedLaw, draft: BlockSample, lengths_R: Array) -> Acceptance:
    """Draft i stands, if those before it do, with probability min(1, p(x_i) / q(x_i)) (Leviathan et al. 2023)."""
    accept_RG = jnp.minimum(_ratio(_packed(target_law), draft, lengths_R), 1.0)
    num_rows, num_drafts = accept_RG.shape
    return Acceptance(accept_RG, jnp.ones((num_rows, num_drafts + 1), jnp.float32))


def block_acceptance(
    target_law: Array | PackedLaw, draft: BlockSample, lengths_R: Array, t2d_V: Array | None = None
) -> Acceptance:
    """Block verification (Sun et al. 2024): the largest i whose independent test passes is accepted.

    m_i = min(1, m_{i-1} p(x_i) / q(x_i)) are the weights; h_i = Z / (Z + 1 - m_i) with Z the mass of
    max(m_i p_{i+1} - q_{i+1}, 0), and h at the row's last draft is m itself.
    """
    ratio_RG = _ratio(_packed(target_law), draft, lengths_R)
    num_rows, num_drafts = ratio_RG.shape
    weights = [jnp.ones((num_rows,), jnp.float32)]
    for i in range(num_drafts):
        weights.append(jnp.minimum(weights[-1] * ratio_RG[:, i], 1.0))
    weight_RG1 = jnp.stack(weights, axis=1)

    def mass_at(position: Array) -> Array:  # one position at a time: no [R, G, V] temporaries
        position_R = jnp.full((num_rows,), position)
        return jnp.sum(_residual(_packed(target_law), draft, position_R, weight_RG1, t2d_V), axis=-1)

    mass_GR = lax.map(mass_at, jnp.arange(1, num_drafts, dtype=jnp.int32))
    mass_RG = jnp.concatenate([mass_GR.T, jnp.zeros((num_rows, 1), jnp.float32)], axis=1)
    drafted_RG = weight_RG1[:, 1:]
    below_RG = mass_RG + 1.0 - drafted_RG
    certain_RG = below_RG == 0  # false for a NaN target law, which then never passes
    inner_RG = jnp.where(certain_RG, 1.0, mass_RG / jnp.where(certain_RG, 1.0, below_RG))
    index_RG = jnp.arange(1, num_drafts + 1)[None, :]
    length_RG = lengths_R[:, None]
    accept_RG = jnp.where(index_RG < length_RG, inner_RG, jnp.where(index_RG == length_RG, drafted_RG, 0.0))
    return Acceptance(accept_RG, weight_RG1)


def next_law(
    target_law: Array | PackedLaw,
    draft: BlockSample,
    lengths_R: Array,
    accepted_R: Array,
    weight_RG1: Array,
    t2d_V: Array | None = None,
) -> Array:
    """Law of the token emitted after the accepted drafts: law_RV, over target ids.

    Everything accepted: the target's own law there. Otherwise max(weight p - q, 0) normalised, or p where that
    mass is below 1e-8. Only the position where each row stopped is read.
    """
    residual_RV = _residual(_packed(target_law), draft, accepted_R, weight_RG1, t2d_V)
    mass_R = jnp.sum(residual_RV, axis=-1)
    stopped_R = (accepted_R < lengths_R) & (mass_R > _NO_RESIDUAL)
    target_RV = _packed(target_law).rows(accepted_R)
    return jnp.where(stopped_R[:, None], residual_RV / jnp.where(stopped_R, mass_R, 1.0)[:, None], target_RV)


def verify_tokens(
    accept_key_R: Array,
    next_key_R: Array,
    target_law: Array | PackedLaw,
    draft: BlockSample,
    lengths_R: Array,
    t2d_V: Array | None = None,
) -> Verdict:
    """Token-wise verification, left to right up to the first failure.

    The two key arrays (one PRNG key a row) must be fresh this round and differ from the ones that drew the
    drafts. `draft.law_RGV` None means the drafts were taken greedily: q is one-hot, whatever the temperature.
    `t2d_V` (see `inverse_map`) is given when the draft law is over a reduced vocabulary. A NaN draft law is
    rejected where it stands and the token comes from the target; a NaN target law within the length is the
    caller's to find.
    """
    accept_RG, weight_RG1 = token_acceptance(target_law, draft, lengths_R)
    passed_RG = _uniforms(accept_key_R, accept_RG.shape[1]) < accept_RG
    accepted_R = jnp.sum(jnp.cumprod(passed_RG.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    law_RV = next_law(target_law, draft, lengths_R, accepted_R, weight_RG1, t2d_V)
    return Verdict(accepted_R, sample_rows(next_key_R, law_RV))


def verify_block(
    accept_key_R: Array,
    next_key_R: Array,
    target_law: Array | PackedLaw,
    draft: BlockSample,
    lengths_R: Array,
    t2d_V: Array | None = None,
) -> Verdict:
    """Block verification; arguments as `verify_tokens`. Never accepts fewer drafts on average, same output law."""
    accept_RG, weight_RG1 = block_acceptance(target_law, draft, lengths_R, t2d_V)
    passed_RG = _uniforms(accept_key_R, accept_RG.shape[1]) < accept_RG
    index_RG = jnp.arange(1, accept_RG.shape[1] + 1, dtype=jnp.int32)[None, :]
    accepted_R = jnp.max(jnp.where(passed_RG, index_RG, 0), axis=1)
    law_RV = next_law(target_law, draft, lengths_R, accepted_R, weight_RG1, t2d_V)
    return Verdict(accepted_R, sample_rows(next_key_R, law_RV))


def verify_greedy(target_argmax_RG1: Array, draft_ids_RG: Array, lengths_R: Array) -> Verdict:
    """Both rules at temperature 0: a draft stands while it is the target's argmax (target ids [R, G+1], [R, G])."""
    num_drafts = draft_ids_RG.shape[1]
    inside_RG = jnp.arange(num_drafts)[None, :] < lengths_R[:, None]
    match_RG = inside_RG & (target_argmax_RG1[:, :num_drafts] == draft_ids_RG)
    accepted_R = jnp.sum(jnp.cumprod(match_RG.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    next_R = jnp.take_along_axis(target_argmax_RG1, accepted_R[:, None], axis=1)[:, 0]
    return Verdict(accepted_R, next_R.astype(jnp.int32))


def _uniforms(key_R: Array, num_drafts: int) -> Array:
    # uniforms lie in [0, 1): "u < accept" never passes at 0 and always passes at 1
    return jax.vmap(lambda key: jax.random.uniform(key, (num_drafts,)))(key_R)


def _ratio(target: PackedLaw, draft: BlockSample, lengths_R: Array) -> Array:
    """p(x) / q(x) of each draft [R, G]; 0 past the length and where q(x) is not positive (a NaN draft law)."""
    num_rows, num_drafts = draft.tokens_RG.shape
    row_RG, position_RG = jnp.arange(num_rows)[:, None], jnp.arange(num_drafts)[None, :]
    p_RG = target.entries(draft.tokens_RG)
    q_RG = jnp.ones_like(p_RG) if draft.law_RGV is None else draft.law_RGV[row_RG, position_RG, draft.draft_ids_RG]
    usable_RG = (q_RG > 0) & (position_RG < lengths_R[:, None])
    return jnp.where(usable_RG, p_RG / jnp.where(usable_RG, q_RG, 1.0), 0.0)


def _residual(
    target: PackedLaw, draft: BlockSample, position_R: Array, weight_RG1: Array, t2d_V: Array | None
) -> Array:
    """max(weight p - q, 0) [R, V] at one position a row; a NaN q counts as 0, as its token was never accepted."""
    rows_R = jnp.arange(position_R.shape[0])
    drafted_R = jnp.minimum(position_R, draft.tokens_RG.shape[1] - 1)
    scaled_RV = weight_RG1[rows_R, position_R][:, None] * target.rows(position_R)
    if draft.law_RGV is None:
        ids_V = jnp.arange(scaled_RV.shape[1])[None, :]
        return jnp.where(ids_V == draft.tokens_RG[rows_R, drafted_R][:, None], 0.0, scaled_RV)
    q_RV = draft.law_RGV[rows_R, drafted_R]
    q_RV = jnp.where(jnp.isnan(q_RV), 0.0, q_RV)
    if draft.support_RGK is not None:  # K entries a row differ from the target's law: no [R, V] copy of q
        support_RK = draft.support_RGK[rows_R, drafted_R]
        return jnp.maximum(scaled_RV.at[rows_R[:, None], support_RK].add(-q_RV), 0.0)
    if t2d_V is not None:  # a gather: a scatter of the q row would run serially on CPU and TPU
        q_RV = jnp.where((t2d_V >= 0)[None, :], q_RV[:, jnp.maximum(t2d_V, 0)], 0.0)
    return jnp.maximum(scaled_RV - q_RV, 0.0)
