"""Offline decoding of a batch: the short loop for tests, evaluation and data generation.

Each round is one compiled call with a donated state: draft a block, run the target on [newest token, drafts], accept,
commit to both caches. Shapes come from buckets, so lengths grow without a new trace.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import target as target_lib
from dspark_jax import verify as verify_lib
from dspark_jax.config import ConfigError, DrafterConfig, SamplingParams, TargetConfig
from dspark_jax.drafters import Drafter
from dspark_jax.drafters.base import Committed, Frozen
from dspark_jax.drafters.registry import algorithm, init_caches
from dspark_jax.kv_cache import Cache, LayerCache
from dspark_jax.sampling import SamplingRows, request_law, sample_rows, sampling_rows
from dspark_jax.target import Target

GREEDY = SamplingParams(temperature=0.0)
Verifier = Literal["token", "block"]
Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Round:
    """One draft-and-verify round: `accepted` of the drafted tokens were kept, then the target added one of its own.

    `confidence` holds the logits of the confidence head, None without one.
    """

    draft: list[int]
    accepted: int
    confidence: list[float] | None


@dataclasses.dataclass(frozen=True)
class Generation:
    """New tokens of one prompt (an end-of-sequence token is kept, nothing follows it) and how they came about."""

    tokens: list[int]
    rounds: list[Round]


class _State(NamedTuple):
    """Everything that lives on the device between rounds. Caches hold positions below `length`; the newest token
    of a request, at position `length`, has not been through the target yet."""

    target_caches: list[Cache]
    draft_caches: list[LayerCache]
    length_R: jax.Array
    newest_R: jax.Array
    round_: jax.Array


class _Models(NamedTuple):
    """Static shapes of one decoding run: the compile key."""

    target: TargetConfig
    drafter: DrafterConfig | None
    greedy: bool
    verifier: Verifier
    shortlist: int


class _Weights(NamedTuple):
    target: Params
    drafter: Params
    frozen: Frozen | None


def _round_keys(key_R: jax.Array, round_: jax.Array, streams: int) -> jax.Array:
    """Fresh keys [R, streams] for a round: a stream reused after a rejection would correlate the new draft with it."""
    return jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, round_), streams))(key_R)


def _commit(
    models: _Models, weights: _Weights, caches: list[LayerCache], tokens_RS: jax.Array, features: target_lib.Features,
    position_RS: jax.Array,
) -> list[LayerCache]:  # fmt: skip
    assert models.drafter is not None and weights.frozen is not None
    committed = Committed(tokens_RS, features.taps_BSMD, features.hidden_BSD)
    run = algorithm(models.drafter)
    return run.commit(models.drafter, weights.drafter, weights.frozen, caches, committed, position_RS)


@functools.partial(jax.jit, static_argnames=("models", "cache_length"))
def _prefill(
    models: _Models,
    weights: _Weights,
    tokens_RS: jax.Array,
    prompt_length_R: jax.Array,
    key_R: jax.Array,
    rows: SamplingRows,
    cache_length: int,
) -> tuple[_State, jax.Array]:
    """Runs the prompts through the target, fills both caches and draws the first new token of every request."""
    batch, dtype = tokens_RS.shape[0], weights.target["embed"].dtype
    position_RS = jnp.broadcast_to(jnp.arange(tokens_RS.shape[1])[None, :], tokens_RS.shape)
    taps = models.drafter.target_layer_ids if models.drafter else ()
    caches = target_lib.init_caches(models.target, batch, cache_length, dtype)
    features = target_lib.features(models.target, weights.target, tokens_RS, position_RS, caches, taps)
    last_R1D = jnp.take_along_axis(features.hidden_BSD, (prompt_length_R - 1)[:, None, None], axis=1)
    logits_RV = target_lib.logits(weights.target, last_R1D, models.target.logit_softcap)[:, 0]
    if models.greedy:
        first_R = jnp.argmax(logits_RV, axis=-1).astype(jnp.int32)
    else:
        first_R = sample_rows(_round_keys(key_R, jnp.int32(0), 1)[:, 0], request_law(logits_RV, *rows))
    draft_caches: list[LayerCache] = []
    if models.drafter:
        draft_caches = init_caches(models.drafter, batch, cache_length, dtype)
        draft_caches = _commit(models, weights, draft_caches, tokens_RS, features, position_RS)
    return _State(features.caches, draft_caches, prompt_length_R, first_R, jnp.int32(1)), first_R


class _RoundOutput(NamedTuple):
    """`tokens` are the drafts [R, G]; the first `accepted` of them and then `next` are emitted."""

    tokens_RG: jax.Array
    accepted_R: jax.Array
    next_R: jax.Array
    confidence_RG: jax.Array | None


@functools.partial(jax.jit, static_argnames=("models",), donate_argnames=("state",))
def _plain_round(
    models: _Models, weights: _Weights, state: _State, active_R: jax.Array, key_R: jax.Array, rows: SamplingRows
) -> tuple[_State, _RoundOutput]:
    """One token a request, straight from the target."""
    features = target_lib.features(
        models.target, weights.target, state.newest_R[:, None], state.length_R[:, None], state.target_caches
    )
    logits_RV = target_lib.logits(weights.target, features.hidden_BSD, models.target.logit_softcap)[:, 0]
    if models.greedy:
        next_R = jnp.argmax(logits_RV, axis=-1).astype(jnp.int32)
    else:
        next_R = sample_rows(_round_keys(key_R, state.round_, 1)[:, 0], request_law(logits_RV, *rows))
    none_R0 = jnp.zeros((next_R.shape[0], 0), jnp.int32)
    length_R = state.length_R + active_R.astype(jnp.int32)
    output = _RoundOutput(none_R0, jnp.zeros_like(next_R), next_R, None)
    return _State(features.caches, [], length_R, next_R, state.round_ + 1), output


@functools.partial(jax.jit, static_argnames=("models",), donate_argnames=("state",))
def _draft_round(
    models: _Models, weights: _Weights, state: _State, active_R: jax.Array, key_R: jax.Array, rows: SamplingRows
) -> tuple[_State, _RoundOutput]:
    """Draft a block, verify all of it, commit what was accepted."""
    assert models.drafter is not None and weights.frozen is not None
    num_drafts = models.drafter.num_drafts
    keys = _round_keys(key_R, state.round_, num_drafts + 2)
    proposal = algorithm(models.drafter).propose(
        models.drafter, weights.drafter, weights.frozen, state.draft_caches, state.newest_R, state.length_R,
        keys[:, :num_drafts], rows, models.greedy, models.shortlist,
    )  # fmt: skip
    block_RS = jnp.concatenate([state.newest_R[:, None], proposal.sample.tokens_RG], axis=1)
    position_RS = state.length_R[:, None] + jnp.arange(num_drafts + 1)[None, :]
    features = target_lib.features(
        models.target, weights.target, block_RS, position_RS, state.target_caches, models.drafter.target_layer_ids
    )
    logits_RSV = target_lib.logits(weights.target, features.hidden_BSD, models.target.logit_softcap)
    lengths_R = jnp.full(state.length_R.shape, num_drafts, jnp.int32)
    sample = proposal.sample
    if models.greedy:
        verdict = verify_lib.verify_greedy(jnp.argmax(logits_RSV, axis=-1), sample.tokens_RG, lengths_R)
    else:
        d2t_V = weights.frozen.draft_to_target_V
        t2d_V = None
        if d2t_V is not None and sample.support_RGK is None:  # a shortlist names target ids
            t2d_V = verify_lib.inverse_map(d2t_V, models.target.vocab_size)
        verify = verify_lib.verify_block if models.verifier == "block" else verify_lib.verify_tokens
        accept_key_R, next_key_R = keys[:, num_drafts], keys[:, num_drafts + 1]
        verdict = verify(accept_key_R, next_key_R, request_law(logits_RSV, *rows), sample, lengths_R, t2d_V)
    draft_caches = _commit(models, weights, state.draft_caches, block_RS, features, position_RS)
    # A finished request keeps its length: its rows are recomputed in place and read by nobody.
    length_R = state.length_R + jnp.where(active_R, verdict.accepted_R + 1, 0)
    state = _State(features.caches, draft_caches, length_R, verdict.next_token_R, state.round_ + 1)
    return state, _RoundOutput(sample.tokens_RG, verdict.accepted_R, verdict.next_token_R, proposal.confidence_RG)


def bucket(size: int, smallest: int) -> int:
    """The next size of the ladder smallest * (1, 1.5, 2, 3, 4, 6, ...): few shapes to compile, under a third wasted."""
    step = smallest
    while step < size:
        if step * 3 // 2 >= size and step % 2 == 0:
            return step * 3 // 2
        step *= 2
    return step


def generate(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    seed: int = 0,
    eos_token_ids: Sequence[int] = (),
    verify: Verifier = "token",
    *,
    batch_size: int = 32,
    longest_prompt: int = 0,
    shortlist: int = 0,
    on_progress: Callable[[int], None] | None = None,
) -> list[Generation]:
    """Decodes prompts (token ids, any lengths) with the target's own law; `drafter` None is plain decoding.

    `sampling` is one for all or one a prompt. Prompt i draws from fold_in(seed, i), so its text depends neither on
    its neighbours nor on `batch_size`, the number decoded together. A text ends with the first token of
    `eos_token_ids`, which is kept, or after exactly `max_new_tokens`. `verify` picks token-wise or block
    verification; both leave the law unchanged. `longest_prompt` sizes the shapes for prompts up to that length,
    so that several calls share their programs. `shortlist` K > 0 drafts among the K tokens that the drafter
    ranks highest at each position, as the serving engine does; the law stays the target's. `on_progress` is told the
    number of new tokens as they come.
    Raises ConfigError on an empty prompt, ids outside the vocabulary, or a prompt that does not fit the context.
    """
    params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    if batch_size < 1:
        raise ConfigError(f"batch_size = {batch_size}: expected at least 1")
    _check(target, drafter, prompts, max_new_tokens, params, verify, shortlist)
    greedy = all(p.temperature == 0 for p in params)
    models = _Models(target.config, drafter.config if drafter else None, greedy, verify, shortlist)
    weights = _Weights(target.params, drafter.params if drafter else {}, drafter.frozen if drafter else None)
    key = jax.random.key(seed)
    # Prompts of like length share a batch; results go back to their places.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    results: dict[int, Generation] = {}
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        filled = batch + [0] * (bucket(len(batch), 1) - len(batch))
        keys_R = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.asarray(filled, jnp.uint32))
        done = _decode(models, weights, [prompts[i] for i in batch], [params[i] for i in batch], keys_R,
                       max_new_tokens, frozenset(eos_token_ids), longest_prompt, on_progress)  # fmt: skip
        results.update(zip(batch, done, strict=True))
    return [results[i] for i in range(len(prompts))]


def _decode(
    models: _Models,
    weights: _Weights,
    prompts: list[Sequence[int]],
    params: list[SamplingParams],
    key_R: jax.Array,
    max_new_tokens: int,
    eos: frozenset[int],
    longest_prompt: int,
    on_progress: Callable[[int], None] | None,
) -> list[Generation]:
    """One batch, from prefill to the last end of sequence."""
    batch = key_R.shape[0]
    reserve = models.drafter.num_drafts + 1 if models.drafter else 1
    longest = max(longest_prompt, *(len(prompt) for prompt in prompts))
    tokens_RS = np.zeros((batch, bucket(longest, 32)), np.int32)
    prompt_length_R = np.ones(batch, np.int32)
    for row, prompt in enumerate(prompts):
        tokens_RS[row, : len(prompt)] = prompt
        prompt_length_R[row] = len(prompt)
    filler = [GREEDY] * (batch - len(prompts))
    rows = sampling_rows(params + filler)
    cache_length = max(tokens_RS.shape[1], bucket(longest + max_new_tokens + reserve, 64))
    state, first_R = _prefill(models, weights, tokens_RS, prompt_length_R, key_R, rows, cache_length)

    texts: list[list[int]] = [[] for _ in prompts]
    rounds: list[list[Round]] = [[] for _ in prompts]
    active_R = np.arange(batch) < len(prompts)

    def emit(row: int, new_tokens: list[int]) -> None:
        room = max_new_tokens - len(texts[row])
        ends = [i for i, token in enumerate(new_tokens[:room]) if token in eos]
        new_tokens = new_tokens[: ends[0] + 1] if ends else new_tokens[:room]
        texts[row].extend(new_tokens)
        if ends or len(texts[row]) >= max_new_tokens:
            active_R[row] = False
        if on_progress:
            on_progress(len(new_tokens))

    for row, token in enumerate(np.asarray(first_R)[: len(prompts)].tolist()):
        emit(row, [token])
    step = _draft_round if models.drafter else _plain_round
    while active_R.any():
        state, output = step(models, weights, state, active_R.copy(), key_R, rows)
        drafts, accepted, next_tokens, confidence = jax.device_get(output)
        for row in np.flatnonzero(active_R).tolist():
            draft = drafts[row].tolist()
            if models.drafter:
                logits = None if confidence is None else confidence[row].tolist()
                rounds[row].append(Round(draft, int(accepted[row]), logits))
            emit(row, [*draft[: accepted[row]], int(next_tokens[row])])
    return [Generation(text, row_rounds) for text, row_rounds in zip(texts, rounds, strict=True)]


def _check(
    target: Target,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    params: list[SamplingParams],
    verify: str,
    shortlist: int,
) -> None:
    c = target.config
    if shortlist < 0:
        raise ConfigError(f"shortlist = {shortlist}: expected 0 (whole vocabulary) or more")
    if verify not in ("token", "block"):
        raise ConfigError(f"verify = {verify!r}: expected 'token' or 'block'")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens = {max_new_tokens}: expected at least 1")
    if len(params) != len(prompts):
        raise ConfigError(f"{len(params)} sampling settings for {len(prompts)} prompts: give one, or one a prompt")
    if drafter is not None and drafter.config.vocab_size != c.vocab_size:
        raise ConfigError(
            f"the drafter was made for a vocabulary of {drafter.config.vocab_size}, this target has {c.vocab_size}"
        )
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ConfigError(f"prompt {i} is empty: decoding needs at least one token to start from")
        if not 0 <= min(prompt) <= max(prompt) < c.vocab_size:
            raise ConfigError(
                f"prompt {i} has ids from {min(prompt)} to {max(prompt)}: the vocabulary is {c.vocab_size}"
            )
        if len(prompt) + max_new_tokens > c.max_length:
            raise ConfigError(
                f"prompt {i} has {len(prompt)} tokens; with {max_new_tokens} new ones it exceeds the target's context"
                f" of {c.max_length}"
            )
