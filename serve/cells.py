"""One cell of the benchmark: a domain at one temperature and number of requests, under every policy in turn.

All policies decode the same batches one after the other, so that whatever else the machine does falls on all alike.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dspark_jax import Generation, SamplingParams, Target
from dspark_jax.generate import Round
from serve import measure
from serve.curves import Curves
from serve.engine import Engine
from serve.measure import Speed
from serve.scheduler import Request, Text
from serve.server import Server

Prompts = Mapping[str, Sequence[Sequence[int]]]


class Batch(NamedTuple):
    """Texts decoded together. `seconds` run from the end of prefill to the end of the last text."""

    generations: list[Generation]
    seconds: float
    rounds: int

    @property
    def speed(self) -> Speed:
        return Speed(sum(len(g.tokens) - 1 for g in self.generations), self.seconds)


class Cell(NamedTuple):
    """A row a policy, and where greedy texts differ from plain ones."""

    rows: list[dict[str, Any]]
    differences: list[dict[str, Any]]


def as_generation(text: Text) -> Generation:
    """A served text in the form of `generate`: rounds hold what was verified."""
    return Generation(text.tokens, [Round(r.draft, r.accepted, None) for r in text.rounds if r.draft])


class Bench:
    """What all cells share: `plain` decodes without a drafter, `drafting` with one."""

    def __init__(self, target: Target, plain: Engine, drafting: Engine, curves: Curves, tokens: int, seed: int) -> None:
        self.target, self.plain, self.drafting, self.curves = target, plain, drafting, curves
        self.tokens, self.seed = tokens, seed
        self._servers: dict[str, Server] = {}

    def warm_up(self, prompts: Sequence[Sequence[int]]) -> None:
        """Decodes once for nothing: the first texts of a process are slow, whatever policy they happen to have."""
        self.decode(prompts, "off", 0.0, 0)

    def cell(
        self, domain: str, prompts: Sequence[Sequence[int]], requests: int, temperature: float,
        policies: Sequence[str], on_policy: Callable[[str], None],
    ) -> Cell:  # fmt: skip
        """Decodes all prompts, `requests` at a time; the first policy is what the others are compared with."""
        done: dict[str, list[Batch]] = {policy: [] for policy in policies}
        for start in range(0, len(prompts), requests):
            for policy in policies:
                on_policy(policy)
                done[policy].append(self.decode(prompts[start : start + requests], policy, temperature, start))
        texts = {policy: [g.tokens for batch in done[policy] for g in batch.generations] for policy in policies}
        rows, differences = [], []
        for policy in policies:
            row = {"domain": domain, "temperature": temperature, "policy": policy, "requests": requests}
            rows.append(row | {"prompts": len(prompts)} | self._numbers(done[policies[0]], done[policy]))
            if temperature == 0 and policy != policies[0]:
                found = [
                    {"domain": domain, "requests": requests, "policy": policy, "prompt": index, "position": position}
                    | self._margin(prompts[index], one, other, position)
                    for index, (one, other) in enumerate(zip(texts[policies[0]], texts[policy], strict=True))
                    if (position := measure.first_difference(one, other)) is not None
                ]
                rows[-1]["exact_match"] = 1 - len(found) / len(prompts)
                differences += found
        return Cell(rows, differences)

    def decode(self, prompts: Sequence[Sequence[int]], policy: str, temperature: float, first: int) -> Batch:
        """Prompts all at once under a policy; prompt i draws with the bench's seed + first + i."""
        server = self._server(policy)
        before, stop = server.totals.rounds, self.target.config.eos_token_ids
        texts = [
            server.submit(Request(tuple(ids), self.tokens, SamplingParams(temperature), self.seed + first + i, stop))
            for i, ids in enumerate(prompts)
        ]
        server.start()
        start = server.clock()
        server.run()
        return Batch([as_generation(text) for text in texts], server.clock() - start, server.totals.rounds - before)

    def _server(self, policy: str) -> Server:
        """One server a policy for the whole run, as in use: what a policy has learnt of a drafter it keeps."""
        if policy not in self._servers:
            self._servers[policy] = Server(self.plain if policy == "off" else self.drafting, policy, self.curves)
        return self._servers[policy]

    def _numbers(self, base: Sequence[Batch], batches: Sequence[Batch]) -> dict[str, Any]:
        generations = [g for batch in batches for g in batch.generations]
        speeds, eos = [batch.speed for batch in batches], self.target.config.eos_token_ids
        counts = measure.count_rounds(generations, eos)
        speedup, interval = measure.speedup([batch.speed for batch in base], speeds)
        drafts = self.drafting.num_drafts
        verified = sum(len(r.draft) for g in generations for r in g.rounds)
        return {
            "tokens": sum(speed.tokens for speed in speeds),
            "seconds": sum(batch.seconds for batch in batches),
            "tokens_per_second": measure.tokens_per_second(speeds),
            "speedup": speedup,
            "speedup_interval": interval,
            "rounds": sum(batch.rounds for batch in batches),
            "drafted_rounds": len(counts.emitted_N),
            "verified_a_drafted_round": verified / len(counts.emitted_N) if len(counts.emitted_N) else None,
            "accepted_length": measure.accepted_length(counts),
            "accepted_length_interval": measure.accepted_length_interval(generations, eos),
            "acceptance_by_position": measure.acceptance_by_position(counts, drafts),
            "conditional_acceptance_by_position": measure.conditional_acceptance_by_position(counts, drafts),
            "exact_match": None,
        }

    def _margin(
        self, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int], position: int
    ) -> dict[str, Any]:
        """The two tokens at the first difference, and how near they were to a tie in the target's full forward."""
        row_S = np.zeros(-(-(len(prompt) + self.tokens) // 64) * 64, np.int32)
        prefix = [*prompt, *plain[:position]]
        row_S[: len(prefix)] = prefix
        logits_V = np.asarray(self.target.forward(jnp.asarray(row_S)[None]).logits_BSV[0, len(prefix) - 1])
        margin = measure.logit_margin(logits_V, plain[position], other[position])
        return {"plain_token": plain[position], "draft_token": other[position], "margin": margin}
