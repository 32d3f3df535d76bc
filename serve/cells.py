"""One cell of the benchmark: a domain at one temperature and number of requests, plain and drafted.

Both policies decode the same batches in turn, so that whatever else the machine does falls on both alike.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from dspark_jax import Drafter, Generation, SamplingParams, Target, generate
from dspark_jax.drafters.drafter import frozen_parts
from dspark_jax.generate import bucket
from dspark_jax.target import cast_params
from serve import measure
from serve.measure import Speed

Prompts = Mapping[str, Sequence[Sequence[int]]]
Policy = Literal["plain", "draft"]
POLICIES: tuple[Policy, Policy] = ("plain", "draft")
COMPILERS = 2  # programs compiled side by side: one leaves cores idle


class Batch(NamedTuple):
    """Texts decoded together. `seconds` run from the first token of each text to its end, prefill comes before."""

    generations: list[Generation]
    prefill_seconds: float
    seconds: float

    @property
    def speed(self) -> Speed:
        return Speed(sum(len(g.tokens) - 1 for g in self.generations), self.seconds)

    @property
    def steps(self) -> int:
        """Compiled calls after prefill: rounds, or single tokens, until the last text ended."""
        return max(len(g.rounds) or len(g.tokens) - 1 for g in self.generations)


def _batches(prompts: Sequence[Sequence[int]], requests: int) -> list[Sequence[Sequence[int]]]:
    return [prompts[start : start + requests] for start in range(0, len(prompts), requests)]


class _CompiledError(Exception):
    """Ends a warm-up: its prefill and its first round have run."""


class Cell(NamedTuple):
    """Two rows of the result, plain and drafted, and where greedy texts differ."""

    rows: list[dict[str, Any]]
    differences: list[dict[str, Any]]


class Bench:
    """What all cells share: models by dtype, shapes, and the greedy texts already decoded."""

    def __init__(self, target: Target, drafter: Drafter, prompts: Prompts, tokens: int, seed: int) -> None:
        self.tokens, self.seed = tokens, seed
        self.eos = target.config.eos_token_ids
        self.longest = max(len(ids) for domain in prompts.values() for ids in domain)
        self.cache_length = bucket(self.longest + tokens + drafter.config.num_drafts + 1, 64)
        self._models = {str(target.dtype): (target, drafter)}
        self._loaded = target, drafter
        self._greedy: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def models(self, dtype: str) -> tuple[Target, Drafter]:
        """Target and drafter in a compute dtype."""
        if dtype not in self._models:
            target, drafter = self._loaded
            cast = replace(target, params=cast_params(target.params, dtype))
            d2t_V = drafter.frozen.draft_to_target_V
            frozen = frozen_parts(cast.params, None if d2t_V is None else np.asarray(d2t_V))
            self._models[dtype] = cast, replace(drafter, params=cast_params(drafter.params, dtype), frozen=frozen)
        return self._models[dtype]

    def warm_up(
        self, prompts: Prompts, requests: int, temperatures: Sequence[float], dtypes: Mapping[Policy, str]
    ) -> float:
        """Compiles all that these cells need, which depends on batch sizes alone (see `_decode`). Returns seconds."""
        start = time.perf_counter()
        batches = {len(batch): batch for ids in prompts.values() for batch in _batches(ids, requests)}
        for dtype in dtypes.values():
            self.models(dtype)  # once, before threads ask for it

        def one(batch: Sequence[Sequence[int]], policy: Policy, temperature: float) -> None:
            ticks = itertools.count(1)

            def stop_after_a_round(_: int) -> None:
                if next(ticks) > len(batch):  # prefill gave a token each
                    raise _CompiledError

            with contextlib.suppress(_CompiledError):
                self._decode(batch, policy, dtypes[policy], temperature, (), on_progress=stop_after_a_round)

        jobs = list(itertools.product(batches.values(), POLICIES, temperatures))
        with ThreadPoolExecutor(COMPILERS) as pool:
            list(pool.map(one, *zip(*jobs, strict=True)))
        return time.perf_counter() - start

    def cell(
        self, domain: str, prompts: Sequence[Sequence[int]], requests: int, temperature: float,
        dtypes: Mapping[Policy, str], on_policy: Callable[[Policy], None],
    ) -> Cell:  # fmt: skip
        """Decodes all prompts, `requests` at a time, under both policies."""
        done: dict[Policy, list[Batch]] = {"plain": [], "draft": []}
        for number, batch in enumerate(_batches(prompts, requests)):
            for policy in POLICIES:
                on_policy(policy)
                done[policy].append(self._decode(batch, policy, dtypes[policy], temperature, self.eos, number))
        rows = [
            {"domain": domain, "temperature": temperature, "policy": policy, "requests": requests}
            | {"prompts": len(prompts), "dtype": dtypes[policy]}
            | self._numbers(policy, done)
            for policy in POLICIES
        ]
        if temperature > 0:
            return Cell(rows, [])
        texts = {policy: [g.tokens for batch in done[policy] for g in batch.generations] for policy in POLICIES}
        self._greedy |= {(dtypes["plain"], tuple(p)): text for p, text in zip(prompts, texts["plain"], strict=True)}
        plain = self._greedy_texts(prompts, dtypes["draft"])
        differences = []
        for index, (one, other) in enumerate(zip(plain, texts["draft"], strict=True)):
            position = measure.first_difference(one, other)
            if position is not None:
                where = {"domain": domain, "requests": requests, "prompt": index, "position": position}
                differences.append(where | self._margin(prompts[index], one, other, position, dtypes["draft"]))
        rows[1]["exact_match"] = 1 - len(differences) / len(prompts)
        return Cell(rows, differences)

    def _decode(
        self, prompts: Sequence[Sequence[int]], policy: Policy, dtype: str, temperature: float,
        eos: Sequence[int], seed: int = 0, on_progress: Callable[[int], None] = lambda _: None,
    ) -> Batch:  # fmt: skip
        """One batch. All batches of a size share their shapes, those of the longest prompt: two programs a policy."""
        target, drafter = self.models(dtype)
        ticks: list[float] = []

        def tick(count: int) -> None:
            ticks.append(time.perf_counter())
            on_progress(count)

        start = time.perf_counter()
        generations = generate(
            target,
            drafter if policy == "draft" else None,
            prompts,
            self.tokens,
            SamplingParams(temperature),
            seed=self.seed + seed,
            eos_token_ids=eos,
            batch_size=len(prompts),
            longest_prompt=self.longest,
            on_progress=tick,
        )
        end = time.perf_counter()
        return Batch(generations, ticks[0] - start, end - ticks[0])

    def _numbers(self, policy: Policy, done: Mapping[Policy, Sequence[Batch]]) -> dict[str, Any]:
        batches = done[policy]
        generations = [g for batch in batches for g in batch.generations]
        speeds = {name: [batch.speed for batch in done[name]] for name in POLICIES}
        tokens = sum(speed.tokens for speed in speeds[policy])
        numbers: dict[str, Any] = {
            "tokens": tokens,
            "seconds": sum(batch.seconds for batch in batches),
            "prefill_seconds": sum(batch.prefill_seconds for batch in batches),
            "tokens_per_second": measure.tokens_per_second(speeds[policy]),
            "steps": sum(batch.steps for batch in batches),
            "exact_match": None,
        }
        if policy == "plain":
            return numbers | {
                "speedup": 1.0, "speedup_interval": None, "rounds": tokens,
                "accepted_length": 1.0, "accepted_length_interval": None,
                "acceptance_by_position": [], "conditional_acceptance_by_position": [],
            }  # fmt: skip
        num_drafts = self._loaded[1].config.num_drafts
        counts = measure.count_rounds(generations, self.eos)
        speedup, speedup_interval = measure.speedup(speeds["plain"], speeds["draft"])
        return numbers | {
            "speedup": speedup,
            "speedup_interval": speedup_interval,
            "rounds": len(counts.emitted_N),
            "accepted_length": measure.accepted_length(counts),
            "accepted_length_interval": measure.accepted_length_interval(generations, self.eos),
            "acceptance_by_position": measure.acceptance_by_position(counts, num_drafts),
            "conditional_acceptance_by_position": measure.conditional_acceptance_by_position(counts, num_drafts),
        }

    def _greedy_texts(self, prompts: Sequence[Sequence[int]], dtype: str) -> list[list[int]]:
        """Plain texts in the drafted ones' dtype; decoded here if plain decoding was timed in another."""
        missing = [ids for ids in prompts if (dtype, tuple(ids)) not in self._greedy]
        if missing:
            batch = self._decode(missing, "plain", dtype, 0.0, self.eos)
            self._greedy |= {(dtype, tuple(p)): g.tokens for p, g in zip(missing, batch.generations, strict=True)}
        return [self._greedy[dtype, tuple(ids)] for ids in prompts]

    def _margin(
        self, prompt: Sequence[int], plain: Sequence[int], draft: Sequence[int], position: int, dtype: str
    ) -> dict[str, Any]:
        """The two tokens at the first difference, and how near they were to a tie in the target's full forward."""
        row_S = np.zeros(self.longest + self.tokens, np.int32)  # one shape for all differences
        prefix = [*prompt, *plain[:position]]
        row_S[: len(prefix)] = prefix
        logits_V = np.asarray(self.models(dtype)[0].forward(jnp.asarray(row_S)[None]).logits_BSV[0, len(prefix) - 1])
        margin = measure.logit_margin(logits_V, plain[position], draft[position])
        return {"plain_token": plain[position], "draft_token": draft[position], "margin": margin, "dtype": dtype}
