"""The measuring half of benchmarks/drafters.py: what one trained drafter is worth, and what it costs."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import Drafter, SamplingParams, Target, generate
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters.base import Committed
from dspark_jax.drafters.registry import algorithm, init_caches
from dspark_jax.generate import GREEDY, bucket
from dspark_jax.sampling import sampling_rows
from serve import measure
from serve.suite_sets import PromptSet

CONTEXT = 256
REQUESTS = (1, 8)
REPEATS = 20


def accepted(
    target: Target, drafter: Drafter, sets: Sequence[PromptSet], temperatures: Sequence[float], tokens: int,
    batch_size: int, seed: int, say: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each set and temperature. `emitted` and `rounds` have one entry a prompt, from which lengths, ratios
    and their intervals follow; `conditional` is the acceptance of each position, given that all before it stand."""
    rows = []
    for prompts, temperature in ((prompts, temperature) for prompts in sets for temperature in temperatures):
        eos = target.config.eos_token_ids
        sampling, ids = SamplingParams(temperature), [list(ids) for ids in prompts.ids]
        texts = generate(target, drafter, ids, tokens, sampling, seed, eos, batch_size=batch_size)
        counts, by_prompt = measure.count_rounds(texts, eos), measure.count_prompts(texts, eos)
        length = measure.accepted_length(counts)
        say(f"{prompts.name}, temperature {temperature:g}: accepted length {length or 1:.3f}")
        rows.append({
            "set": prompts.name, "domain": prompts.domain, "temperature": temperature,
            "emitted": by_prompt.emitted_N.tolist(), "rounds": by_prompt.rounds_N.tolist(),
            "conditional": measure.conditional_acceptance_by_position(counts, drafter.config.num_drafts),
        })  # fmt: skip
    return rows


def parameters(config: DrafterConfig) -> dict[str, int]:
    """Trained weights, and how many of them lie in tables with a row for each id of a vocabulary."""
    shapes = jax.eval_shape(lambda: algorithm(config).init_params(config, jax.random.key(0)))
    leaves: list[Any] = jax.tree.leaves(shapes)
    rows = {config.vocab_size, config.head_rows}
    tables = sum(leaf.size for leaf in leaves if rows & set(leaf.shape))
    return {"parameters": sum(leaf.size for leaf in leaves), "in_tables": tables}


def draft_seconds(drafter: Drafter, requests: int, dtype: str) -> float:
    """Median seconds of one compiled greedy draft of a block, for `requests` at once with CONTEXT tokens each.

    What follows a verification, adding committed tokens to the drafter's context, is not part of it. The context is
    random: what a draft costs does not depend on it.
    """
    c, rng = drafter.config, np.random.default_rng(0)
    run, shape = algorithm(c), (requests, CONTEXT)
    committed = Committed(
        jnp.asarray(rng.integers(0, c.vocab_size, shape), jnp.int32),
        jnp.asarray(rng.normal(size=(*shape, len(c.target_layer_ids), c.d_model)), dtype),
        jnp.asarray(rng.normal(size=(*shape, c.d_model)), dtype),
    )
    position_RS = jnp.broadcast_to(jnp.arange(CONTEXT, dtype=jnp.int32)[None, :], shape)
    caches = init_caches(c, requests, bucket(CONTEXT + c.num_drafts + 1, 64), jnp.dtype(dtype))
    caches = jax.jit(functools.partial(run.commit, c))(drafter.params, drafter.frozen, caches, committed, position_RS)
    first_R, anchor_R = committed.tokens_BS[:, 0], jnp.full(requests, CONTEXT, jnp.int32)
    keys_RG = jax.random.split(jax.random.key(0), (requests, c.num_drafts))
    propose = jax.jit(functools.partial(run.propose, c, greedy=True))
    given = (drafter.params, drafter.frozen, caches, first_R, anchor_R, keys_RG, sampling_rows([GREEDY] * requests))
    jax.block_until_ready(propose(*given))
    seconds = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        jax.block_until_ready(propose(*given))
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)
