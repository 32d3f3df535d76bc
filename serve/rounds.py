"""The decode round as one pure function: draft, choose prefixes, pack, verify, commit (DSpark paper, section 5).

Every shape is a bucket: R requests of a round, T packed tokens. A round of exactly one token a request (`plain_round`)
skips the draft pass. All requests live in slots of one donated state; a round touches the slots it is given.

Losslessness: draft (r, j) is verified when its rank by (survival, position, request) is below a capacity that the host
took from earlier rounds. Its survival is a product of confidences that were computed before x_{r,j} was drawn.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax import scanned_target
from dspark_jax import target as target_lib
from dspark_jax import verify as verify_lib
from dspark_jax.calibrate import survival
from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.drafters.base import Committed, Frozen
from dspark_jax.drafters.registry import algorithm
from dspark_jax.kv_cache import Packing
from dspark_jax.sampling import BlockSample, SamplingRows, request_law, sample_rows
from dspark_jax.schedule import admit_top, prefix_schedule, threshold_lengths
from dspark_jax.sharding import constrain
from dspark_jax.tpu_cache import paged_cache

_LAW_ROWS = 8
Params = dict[str, Any]
Pages = list[tuple[jax.Array, ...]]  # a layer each; `tpu_cache.paged_cache` says what a page looks like


class Models(NamedTuple):
    """Static: what is compiled. `shortlist` candidates a draft position, 0: the whole draft vocabulary. `scan_layers`:
    the target is one loop over its layers (scanned_target.py); its weights are stacked and its pages one pool."""

    target: TargetConfig
    drafter: DrafterConfig | None
    verifier: Literal["token", "block"]
    shortlist: int
    scan_layers: bool = False


class Weights(NamedTuple):
    target: Params
    drafter: Params
    frozen: Frozen | None


class Slots(NamedTuple):
    """One entry a slot. `length` tokens are in the caches; `newest`, at that position, is not yet. `key` is raw key
    data: a request's draws come from its own seed and its own count of rounds, whatever runs beside it."""

    length_N: jax.Array
    newest_N: jax.Array
    round_N: jax.Array
    key_N2: jax.Array
    sampling: SamplingRows
    page_table_NP: jax.Array


class State(NamedTuple):
    """Everything on the device between rounds; donated to each."""

    target_pages: Pages
    draft_pages: Pages
    slots: Slots


class Knobs(NamedTuple):
    """How a round chooses prefixes, traced, so that all policies share one program.

    Drafts compete for the room in T by survival, or in order of position where `by_survival` is false; only the first
    `longest` of a block, and only those before the first confidence below `threshold`. `temperatures_G` calibrate
    the confidence head. `prior_G` stands for the confidences of a drafter that has no such head.
    """

    by_survival: jax.Array
    threshold: jax.Array
    longest: jax.Array
    temperatures_G: jax.Array
    prior_G: jax.Array


class Drafted(NamedTuple):
    """A drafted block with calibrated confidences and their running products."""

    sample: BlockSample
    logit_RG: jax.Array
    confidence_RG: jax.Array
    survival_RG: jax.Array


class Output(NamedTuple):
    """What the host reads: the first `accepted` of `tokens` [R, G] and then `next` go to the text. `lengths` were
    verified. `bad`: the target's logits were not finite, nothing of that request counts."""

    tokens_RG: jax.Array
    lengths_R: jax.Array
    accepted_R: jax.Array
    next_R: jax.Array
    bad_R: jax.Array
    logit_RG: jax.Array
    survival_RG: jax.Array


class _View(NamedTuple):
    """The slots of one round, gathered. Fillers (slot N) read some slot, greedily, and write none."""

    length_R: jax.Array
    newest_R: jax.Array
    key_R: jax.Array
    sampling: SamplingRows
    page_table_RP: jax.Array
    active_R: jax.Array


def _view(slots: Slots, slot_R: jax.Array) -> _View:
    num_slots = slots.length_N.shape[0]
    index_R = jnp.minimum(slot_R, num_slots - 1)
    keys_R = jax.random.wrap_key_data(slots.key_N2[index_R])
    key_R = jax.vmap(jax.random.fold_in)(keys_R, slots.round_N[index_R])
    active_R = slot_R < num_slots
    # A filler that sampled, as the slot's last request did, would cost a greedy round a search over the vocabulary.
    rows = SamplingRows(
        *(
            jnp.where(active_R, jnp.asarray(x)[index_R], usual)
            for x, usual in zip(slots.sampling, (0.0, 0, 1.0), strict=True)
        )
    )
    return _View(
        jnp.where(active_R, slots.length_N[index_R], 0),
        slots.newest_N[index_R],
        key_R,
        rows,
        slots.page_table_NP[index_R],
        active_R,
    )


def _streams(view: _View, count: int) -> jax.Array:
    return jax.vmap(functools.partial(jax.random.split, num=count))(view.key_R)


def _layers(pages: Pages, packing: Packing) -> list[Any]:
    kind: Any = paged_cache()  # the two kinds keep one array of pages or two
    return [kind(*arrays, packing) for arrays in pages]


def _pages(layers: Any) -> Pages:
    return [layer[:-1] for layer in layers]


def pack(lengths_R: jax.Array, view: _View, drafts: int, num_tokens: int) -> Packing:
    """Lays lengths + 1 rows of every active request side by side into T places; the rest are fillers."""
    count_R = jnp.where(view.active_R, lengths_R + 1, 0)
    end_R = jnp.cumsum(count_R)
    start_R = end_R - count_R
    token_T = jnp.arange(num_tokens, dtype=jnp.int32)
    row_T = jnp.sum(token_T[:, None] >= end_R[None, :], axis=1, dtype=jnp.int32)
    place_T = jnp.where(row_T < end_R.shape[0], token_T - start_R[jnp.minimum(row_T, end_R.shape[0] - 1)], 0)
    place_1S = jnp.arange(drafts + 1, dtype=jnp.int32)[None, :]
    index_RS = jnp.where(place_1S < count_R[:, None], start_R[:, None] + place_1S, num_tokens)
    return Packing(row_T, place_T, index_RS, view.page_table_RP)


def draft(models: Models, weights: Weights, state: State, slot_R: jax.Array, knobs: Knobs) -> Drafted:
    """The draft pass over every slot of the round: one parallel backbone pass, then the sequential head."""
    assert models.drafter is not None and weights.frozen is not None
    config, view = models.drafter, _view(state.slots, slot_R)
    keys = _streams(view, config.num_drafts + 2)
    nowhere = jnp.zeros((slot_R.shape[0], 0), jnp.int32)
    packing = Packing(nowhere, nowhere, nowhere, view.page_table_RP)  # drafts attend, they append nothing
    proposal = algorithm(config).propose(
        config, weights.drafter, weights.frozen, _layers(state.draft_pages, packing), view.newest_R, view.length_R,
        keys[:, : config.num_drafts], view.sampling, shortlist=models.shortlist,
    )  # fmt: skip
    if proposal.confidence_RG is None:
        confidence_RG = jnp.broadcast_to(knobs.prior_G[None, :], proposal.sample.tokens_RG.shape)
        logit_RG = jnp.log(confidence_RG) - jnp.log1p(-confidence_RG)
        return Drafted(proposal.sample, logit_RG, confidence_RG, jnp.cumprod(confidence_RG, axis=1))
    logit_RG = proposal.confidence_RG
    confidence_RG = jax.nn.sigmoid(logit_RG / knobs.temperatures_G[None, :])
    return Drafted(proposal.sample, logit_RG, confidence_RG, survival(logit_RG, knobs.temperatures_G))


def choose(drafted: Drafted, slot_R: jax.Array, num_slots: int, knobs: Knobs, num_tokens: int) -> jax.Array:
    """Lengths of the prefixes that fill the T places of the round (see the module's head for why this is lossless)."""
    active_R = slot_R < num_slots
    position_1G = jnp.arange(drafted.survival_RG.shape[1])[None, :]
    longest_R = jnp.minimum(threshold_lengths(drafted.confidence_RG, knobs.threshold), knobs.longest)
    longest_R = jnp.where(active_R, longest_R, 0)
    rank_RG = jnp.where(knobs.by_survival, drafted.survival_RG, 1.0)
    rank_RG = jnp.where(position_1G < longest_R[:, None], rank_RG, 0.0)
    return admit_top(rank_RG, num_tokens - jnp.sum(active_R, dtype=jnp.int32))


def choose_now(drafted: Drafted, slot_R: jax.Array, num_slots: int, steps_per_second_B: jax.Array) -> jax.Array:
    """The paper's Algorithm 1 on the current confidences, with its early stop; fillers stay at 0."""
    active_R = slot_R < num_slots
    confidence_RG = jnp.where(active_R[:, None], drafted.confidence_RG, 0.0)
    return prefix_schedule(confidence_RG, steps_per_second_B, jnp.sum(active_R, dtype=jnp.int32))


def verify(
    models: Models,
    weights: Weights,
    state: State,
    slot_R: jax.Array,
    drafted: Drafted,
    lengths_R: jax.Array,
    num_tokens: int,
) -> tuple[State, Output]:
    """One target pass over the packed tokens, acceptance, and the commit to both caches."""
    assert models.drafter is not None and weights.frozen is not None
    drafts, view = models.drafter.num_drafts, _view(state.slots, slot_R)
    keys = _streams(view, drafts + 2)
    packing = pack(lengths_R, view, drafts, num_tokens)
    row_T = jnp.minimum(packing.row_T, slot_R.shape[0] - 1)
    block_RS = jnp.concatenate([view.newest_R[:, None], drafted.sample.tokens_RG], axis=1)
    position_1T = (view.length_R[row_T] + packing.place_T)[None]
    tokens_T = block_RS[row_T, packing.place_T]
    state, hidden_TD = _target_pass(models, weights, state, tokens_T, position_1T, packing)
    logits_TV = _logits(models, weights, hidden_TD)

    index_RS = jnp.minimum(packing.index_RS, num_tokens - 1)
    sample = drafted.sample

    def greedy() -> verify_lib.Verdict:
        best_T = jnp.argmax(logits_TV, axis=-1)
        return verify_lib.verify_greedy(best_T[index_RS], sample.tokens_RG, lengths_R)

    def sampled() -> verify_lib.Verdict:
        law_TV = _laws(logits_TV, SamplingRows(*(jnp.asarray(x)[row_T] for x in view.sampling)))
        accept = verify_lib.verify_block if models.verifier == "block" else verify_lib.verify_tokens
        t2d_V = None
        if sample.support_RGK is None and weights.frozen is not None and weights.frozen.draft_to_target_V is not None:
            t2d_V = verify_lib.inverse_map(weights.frozen.draft_to_target_V, models.target.vocab_size)
        law = verify_lib.PackedLaw(law_TV, index_RS)
        return accept(keys[:, drafts], keys[:, drafts + 1], law, sample, lengths_R, t2d_V)

    verdict = jax.lax.cond(jnp.any(jnp.asarray(view.sampling.temperature_R) > 0), sampled, greedy)
    finite_T = jnp.isfinite(jnp.max(logits_TV, axis=-1))
    # Rows behind the first draft that fell are nobody's: plain decoding would not have computed them.
    seen_RS = jnp.arange(index_RS.shape[1])[None, :] <= verdict.accepted_R[:, None]
    bad_R = jnp.any((packing.index_RS < num_tokens) & seen_RS & ~finite_T[index_RS], axis=1)
    slots = _advance(state.slots, slot_R, verdict, bad_R)
    output = Output(
        sample.tokens_RG, lengths_R, verdict.accepted_R, verdict.next_token_R, bad_R, drafted.logit_RG,
        drafted.survival_RG,
    )  # fmt: skip
    return state._replace(slots=slots), output


def _laws(logits_TV: jax.Array, rows: SamplingRows) -> jax.Array:
    """`request_law` a few rows at a time: its searches hold several copies of what they look at, and so never more
    than the logits and the laws themselves are whole."""
    num_tokens, vocab_size = logits_TV.shape
    if num_tokens <= _LAW_ROWS or num_tokens % _LAW_ROWS:
        return request_law(logits_TV, *rows)
    grouped = jax.tree.map(lambda x: x.reshape(-1, _LAW_ROWS, *x.shape[1:]), (logits_TV, rows))
    return jax.lax.map(lambda part: request_law(part[0], *part[1]), grouped).reshape(num_tokens, vocab_size)


def _target_pass(
    models: Models, weights: Weights, state: State, tokens_T: jax.Array, position_1T: jax.Array, packing: Packing
) -> tuple[State, jax.Array]:
    """Packed tokens through the target and, as features, into the drafter's caches: hidden states [T, D]."""
    taps = models.drafter.target_layer_ids if models.drafter else ()
    arguments, caches = (
        (models.target, weights.target, tokens_T[None], position_1T),
        _layers(state.target_pages, packing),
    )
    if models.scan_layers:
        features = scanned_target.features(*arguments, caches[0], taps)
    else:
        features = target_lib.features(*arguments, caches, taps)
    draft_pages = _commit(models, weights, state.draft_pages, tokens_T[None], features, position_1T, packing)
    state = state._replace(target_pages=_pages(features.caches), draft_pages=draft_pages)
    return state, features.hidden_BSD[0]


def _logits(models: Models, weights: Weights, hidden_TD: jax.Array) -> jax.Array:
    return target_lib.logits(weights.target, hidden_TD, models.target.logit_softcap)


def _commit(
    models: Models, weights: Weights, pages: Pages, tokens_1T: jax.Array, features: target_lib.Features,
    position_1T: jax.Array, packing: Packing,
) -> Pages:  # fmt: skip
    """The drafter's caches with the tokens of a target pass; none where nothing drafts."""
    if models.drafter is None or weights.frozen is None:
        return pages
    committed = Committed(tokens_1T, features.taps_BSMD, features.hidden_BSD)
    caches = _layers(pages, packing)
    run = algorithm(models.drafter)
    return _pages(run.commit(models.drafter, weights.drafter, weights.frozen, caches, committed, position_1T))


def _advance(slots: Slots, slot_R: jax.Array, verdict: verify_lib.Verdict, bad_R: jax.Array) -> Slots:
    gained_R = jnp.where(bad_R, 0, verdict.accepted_R + 1)
    return slots._replace(
        length_N=slots.length_N.at[slot_R].add(gained_R, mode="drop"),
        newest_N=slots.newest_N.at[slot_R].set(verdict.next_token_R, mode="drop"),
        round_N=slots.round_N.at[slot_R].add(1, mode="drop"),
    )


def draft_round(
    models: Models, num_tokens: int, weights: Weights, state: State, slot_R: jax.Array, knobs: Knobs
) -> tuple[State, Output]:
    """The whole round in T packed tokens."""
    drafted = draft(models, weights, state, slot_R, knobs)
    lengths_R = choose(drafted, slot_R, state.slots.length_N.shape[0], knobs, num_tokens)
    lengths_R = constrain(lengths_R)  # on a mesh: decided whole, the same on every device
    return verify(models, weights, state, slot_R, drafted, lengths_R, num_tokens)


def plain_round(models: Models, weights: Weights, state: State, slot_R: jax.Array) -> tuple[State, Output]:
    """One token a request and no draft pass; the drafter's caches are kept up to date."""
    view, num_rows = _view(state.slots, slot_R), slot_R.shape[0]
    key_R = _streams(view, 1)[:, 0]
    none_R = jnp.zeros(num_rows, jnp.int32)
    row_R = jnp.arange(num_rows, dtype=jnp.int32)
    index_R1 = jnp.where(view.active_R, row_R, num_rows)[:, None]
    packing = Packing(index_R1[:, 0], none_R, index_R1, view.page_table_RP)
    state, hidden_RD = _target_pass(models, weights, state, view.newest_R, view.length_R[None], packing)
    logits_RV = _logits(models, weights, hidden_RD)
    next_R = _draw(logits_RV, key_R, view.sampling)
    bad_R = view.active_R & ~jnp.isfinite(jnp.max(logits_RV, axis=-1))
    verdict = verify_lib.Verdict(none_R, next_R)
    nothing = jnp.zeros((num_rows, 0))
    output = Output(nothing.astype(jnp.int32), none_R, none_R, next_R, bad_R, nothing, nothing)
    return state._replace(slots=_advance(state.slots, slot_R, verdict, bad_R)), output


def _draw(logits_RV: jax.Array, key_R: jax.Array, rows: SamplingRows) -> jax.Array:
    return jax.lax.cond(
        jnp.any(jnp.asarray(rows.temperature_R) > 0),
        lambda: sample_rows(key_R, request_law(logits_RV, *rows)),
        lambda: jnp.argmax(logits_RV, axis=-1).astype(jnp.int32),
    )


class NewRequest(NamedTuple):
    """What a prefill writes into its slot."""

    slot: jax.Array
    key_2: jax.Array
    sampling_1: SamplingRows
    page_row_P: jax.Array


def prefill(
    models: Models, weights: Weights, state: State, tokens_S: jax.Array, start: jax.Array, count: jax.Array,
    request: NewRequest,
) -> tuple[State, Output]:  # fmt: skip
    """One chunk of one prompt: `count` of the S tokens, at positions from `start` on, into both caches.

    Each chunk leaves its slot as if the prompt ended with it and draws the token after it; of the last one that is
    the first new token.
    """
    place_S = jnp.arange(tokens_S.shape[0], dtype=jnp.int32)
    inside_S = place_S < count
    index_1S = jnp.where(inside_S, place_S, tokens_S.shape[0])[None]
    row_S = jnp.where(inside_S, 0, 1).astype(jnp.int32)
    packing = Packing(row_S, jnp.where(inside_S, place_S, 0), index_1S, request.page_row_P[None])
    position_1S = jnp.where(inside_S, start + place_S, 0)[None]
    state, hidden_SD = _target_pass(models, weights, state, tokens_S, position_1S, packing)
    logits_1V = _logits(models, weights, jax.lax.dynamic_index_in_dim(hidden_SD, count - 1, axis=0, keepdims=True))
    key_1 = jax.random.fold_in(jax.random.wrap_key_data(request.key_2), 0)[None]
    next_1 = _draw(logits_1V, key_1, request.sampling_1)
    # What the cache stores of a row that is not finite is finite: nobody behind it would notice.
    lost_S = inside_S & ~jnp.all(jnp.isfinite(hidden_SD), axis=-1)
    bad_1 = ~jnp.isfinite(jnp.max(logits_1V, axis=-1)) | jnp.any(lost_S)
    old, slot = state.slots, request.slot
    slots = Slots(
        old.length_N.at[slot].set(start + count),
        old.newest_N.at[slot].set(next_1[0]),
        old.round_N.at[slot].set(1),
        old.key_N2.at[slot].set(request.key_2),
        SamplingRows(
            *(
                jnp.asarray(x).at[slot].set(jnp.asarray(new)[0])
                for x, new in zip(old.sampling, request.sampling_1, strict=True)
            )
        ),
        old.page_table_NP.at[slot].set(request.page_row_P),
    )
    none_1 = jnp.zeros(1, jnp.int32)
    nothing = jnp.zeros((1, 0))
    output = Output(nothing.astype(jnp.int32), none_1, none_1, next_1, bad_1, nothing, nothing)
    return state._replace(slots=slots), output
