"""From finished cells to the answers of an evaluation, ready for JSON. No model, no clock: the same cells give the same
numbers. Intervals are 95 % bootstrap intervals over prompts; means over a domain weigh its sets alike."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dspark_jax import ConfigError, Generation, Round
from serve import calibrate, law, measure, sweep
from serve.calibration import read_temperatures
from serve.measure import PromptCounts
from serve.suite_cells import Contender, Lab, Result, generations, replay_limit
from serve.suite_store import Cell

THRESHOLDS = tuple(i / 10 for i in range(10))
ALL = "all"  # the mean over every set
Row = dict[str, Any]


class Rollout(NamedTuple):
    """A finished `rollout` cell. `blocks`, where they were drafted, are those of `sweep.blocks_everywhere`."""

    drafter: str
    set: str
    domain: str
    temperature: float
    block: int
    head: bool
    digest: str
    texts: list[Generation]
    blocks: list[list[Round]] | None

    def first(self, limit: int) -> "Rollout":
        return self._replace(texts=self.texts[:limit])


def digest(content: bytes) -> str:
    """A short name for bytes."""
    return hashlib.sha256(content).hexdigest()[:16]


def describe(who: Contender) -> Row:
    """A drafter in the report."""
    c = who.drafter.config
    weights = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(who.drafter.params))
    return {
        "name": who.name, "algorithm": c.algorithm, "layers": c.num_layers, "block": c.num_drafts,
        "head": c.markov_head_type if c.markov_rank else None, "rank": c.markov_rank, "confidence": c.confidence_head,
        "vocabulary": c.head_rows, "weights": weights, "fingerprint": who.fingerprint,
    }  # fmt: skip


def answers(lab: Lab, cells: Sequence[Cell], done: Mapping[str, Result], tokens: int) -> Row:
    """Every answer that these cells hold; lists are empty where nothing was measured."""
    eos = lab.target.config.eos_token_ids
    runs = [_rollout(lab, cell, done[cell.key]) for cell in cells if cell.kind == "rollout"]
    blocks = {who.name: who.drafter.config.num_drafts for who in lab.contenders.values()}
    whole = [run for run in runs if run.head and run.block == blocks[run.drafter]]
    sure = [run for run in whole if lab.contenders[run.drafter].drafter.config.confidence_head]
    scales = {who.name: read_temperatures(who.path, blocks[who.name]) for who in lab.contenders.values()}

    def of(kind: str) -> list[tuple[Cell, Result]]:
        return [(cell, done[cell.key]) for cell in cells if cell.kind == kind]

    return {
        "accepted": [_accepted(run, eos) for run in whole],
        "means": means(whole, eos),
        "ratios": ratios(whole, list(lab.contenders), eos),
        "acceptance": acceptance(runs, whole, eos),
        "blocks": [row for name in blocks for row in _block_rows(name, runs, whole, eos)],
        "latency": [{"drafter": c.drafter} | point for c, r in of("latency") for point in r["points"]],
        "sweep": [row for name, run in _by_domain(sure) for row in _sweep(name, run, scales, tokens, eos)],
        "calibration": [_calibration(name, run, eos) for name, run in [*_over_all(sure), *_by_domain(sure)]],
        "load": [{"drafter": c.drafter} | row for c, r in of("load") for row in r["rows"]],
        "curves": [{"drafter": c.drafter} | point for c, r in of("curves") for point in r["curves"]],
        "lossless": [{"drafter": c.drafter} | row for c, r in of("lossless") for row in r["rows"]],
        "differences": [{"drafter": c.drafter} | row for c, r in of("lossless") for row in r["differences"]],
        "law": _law(of("lossless")),
    }


def _rollout(lab: Lab, cell: Cell, result: Result) -> Rollout:
    s = cell.settings
    blocks = [[Round(*r) for r in row] for row in result["blocks"]] if "blocks" in result else None
    domain = lab.sets[cell.set].domain
    where = cell.drafter, cell.set, domain, s["temperature"], s["block"], s["head"], s["prompts"]
    return Rollout(*where, generations(result), blocks)


Grouped = list[tuple[str, list[Rollout]]]


def _group(runs: Sequence[Rollout], by: Callable[[Rollout], tuple[Any, ...]]) -> list[list[Rollout]]:
    groups: dict[tuple[Any, ...], list[Rollout]] = {}
    for run in runs:
        groups.setdefault(by(run), []).append(run)
    return list(groups.values())


def _by_domain(runs: Sequence[Rollout]) -> Grouped:
    """Runs of one drafter, variant, temperature and domain."""
    groups = _group(runs, lambda r: (r.drafter, r.block, r.head, r.temperature, r.domain))
    return [(group[0].domain, group) for group in groups]


def _over_all(runs: Sequence[Rollout]) -> Grouped:
    """Runs of one drafter, variant and temperature."""
    return [(ALL, group) for group in _group(runs, lambda r: (r.drafter, r.block, r.head, r.temperature))]


# -- 1: accepted length ----------------------------------------------------------------------------------------


def _accepted(run: Rollout, eos: Sequence[int]) -> Row:
    counts = measure.count_prompts(run.texts, eos)
    return {
        "drafter": run.drafter, "set": run.set, "domain": run.domain, "temperature": run.temperature,
        "prompts": len(run.texts), "rounds": int(counts.rounds_N.sum()),
        "accepted_length": measure.accepted_length(measure.count_rounds(run.texts, eos)),
        "interval": measure.accepted_length_interval(run.texts, eos),
        "digest": run.digest, "emitted_by_prompt": counts.emitted_N.tolist(),
        "rounds_by_prompt": counts.rounds_N.tolist(),
    }  # fmt: skip


def _counts(runs: Sequence[Rollout], eos: Sequence[int]) -> list[PromptCounts]:
    """Of sets with rounds. A prompt whose first token ends its text says nothing about drafters, to none of them."""
    counts = [measure.count_prompts([text for text in run.texts if text.rounds], eos) for run in runs]
    return [c for c in counts if c.rounds_N.size]


def mean_length(counts: Sequence[PromptCounts]) -> float | None:
    """Mean over sets of their accepted lengths."""
    return float(np.mean([c.emitted_N.sum() / c.rounds_N.sum() for c in counts])) if counts else None


def mean_interval(counts: Sequence[PromptCounts]) -> tuple[float, float] | None:
    """Its interval; None where no set has two prompts with rounds."""
    if max((c.rounds_N.size for c in counts), default=0) < 2:
        return None
    return measure.interval(measure.accepted_length_draws(counts))


def _mean_row(name: str, runs: Sequence[Rollout], eos: Sequence[int]) -> Row:
    counts, one = _counts(runs, eos), runs[0]
    return {
        "drafter": one.drafter, "domain": name, "temperature": one.temperature, "sets": [run.set for run in runs],
        "accepted_length": mean_length(counts), "interval": mean_interval(counts),
    }  # fmt: skip


def means(runs: Sequence[Rollout], eos: Sequence[int]) -> list[Row]:
    """Macro means by domain and over all sets."""
    return [_mean_row(name, some, eos) for name, some in [*_by_domain(runs), *_over_all(runs)]]


def ratios(runs: Sequence[Rollout], names: Sequence[str], eos: Sequence[int]) -> list[Row]:
    """Accepted length of each further drafter over the first one's: same prompts, paired draws."""
    rows = []
    groups = {(g[0].drafter, g[0].temperature, name): g for name, g in [*_by_domain(runs), *_over_all(runs)]}
    for (drafter, temperature, name), group in groups.items():
        first, mine = _counts(groups[names[0], temperature, name], eos), _counts(group, eos)
        if drafter == names[0] or not first or not mine:
            continue
        draws = measure.accepted_length_draws(mine) / measure.accepted_length_draws(first)
        ratio = (mean_length(mine) or 0.0) / (mean_length(first) or 1.0)
        rows.append({
            "drafter": drafter, "over": names[0], "temperature": temperature, "domain": name, "ratio": ratio,
            "interval": measure.interval(draws),
        })  # fmt: skip
    return rows


# -- 2: acceptance by position ---------------------------------------------------------------------------------


def acceptance(runs: Sequence[Rollout], whole: Sequence[Rollout], eos: Sequence[int]) -> list[Row]:
    """By position, with the sequential head and, on the same prompts, without it."""
    without = [run for run in runs if not run.head]
    limits = {(run.drafter, run.set, run.temperature): len(run.texts) for run in without}
    with_ = [run.first(limits.get((run.drafter, run.set, run.temperature), len(run.texts))) for run in whole]
    rows = []
    for name, group in [*_by_domain(with_), *_by_domain(without)]:
        counts = measure.count_rounds([text for run in group for text in run.texts], eos)
        rows.append({
            "drafter": group[0].drafter, "domain": name, "temperature": group[0].temperature, "head": group[0].head,
            "prompts": sum(len(run.texts) for run in group), "rounds": len(counts.accepted_N),
            "accepted_length": measure.accepted_length(counts),
            "by_position": measure.acceptance_by_position(counts, group[0].block),
            "conditional": measure.conditional_acceptance_by_position(counts, group[0].block),
        })  # fmt: skip
    return rows


# -- 3: block size ---------------------------------------------------------------------------------------------


def _block_rows(name: str, runs: Sequence[Rollout], whole: Sequence[Rollout], eos: Sequence[int]) -> list[Row]:
    """Accepted length by block size, all on the prompts and temperatures of the shortened ones."""
    mine = [r for r in whole if r.drafter == name]
    shorter = [r for r in runs if r.drafter == name and r.head and r.block < mine[0].block] if mine else []
    limits = {(r.set, r.temperature): len(r.texts) for r in shorter}
    if limits:
        mine = [r.first(limits[r.set, r.temperature]) for r in mine if (r.set, r.temperature) in limits]
    both = [*shorter, *mine]
    return [{"block": g[0].block} | _mean_row(n, g, eos) for n, g in [*_by_domain(both), *_over_all(both)]]


# -- 4, 5: confidences -----------------------------------------------------------------------------------------


def _sweep(
    name: str, runs: Sequence[Rollout], scales: Mapping[str, np.ndarray], tokens: int, eos: Sequence[int]
) -> list[Row]:
    """Each threshold: exactly replayed at temperature 0, else the recorded rounds cut short where they are."""
    one, scale, rows = runs[0], scales[runs[0].drafter], []
    for threshold in THRESHOLDS:
        texts = []
        for run in runs:
            if run.blocks is not None:
                limit = replay_limit(tokens, run.block)
                rounds = [
                    sweep.replay(text.tokens, blocks, limit, scale, threshold)
                    for text, blocks in zip(run.texts, run.blocks, strict=True)
                ]
            else:
                rounds = [[sweep.shorten(r, scale, threshold) for r in text.rounds] for text in run.texts]
            texts += [Generation(text.tokens, mine) for text, mine in zip(run.texts, rounds, strict=True)]
        counts = measure.count_rounds(texts, eos)
        verified, accepted, n = int(counts.attempted_N.sum()), int(counts.accepted_N.sum()), len(counts.accepted_N)
        rows.append({
            "drafter": one.drafter, "domain": name, "temperature": one.temperature, "threshold": threshold,
            "replayed": one.blocks is not None, "rounds": n,
            "accepted": accepted / n if n else None, "rejected": (verified - accepted) / n if n else None,
            "acceptance_rate": accepted / verified if verified else None,
            "accepted_length": measure.accepted_length(counts),
        })  # fmt: skip
    return rows


def _calibration(name: str, runs: Sequence[Rollout], eos: Sequence[int]) -> Row:
    """Fitted on half of every set, judged on a quarter; `why_not` says what is missing where there are too few."""
    one = runs[0]
    row: Row = {"drafter": one.drafter, "domain": name, "temperature": one.temperature, "why_not": None}
    try:
        scale, result, held = calibrate.fit([run.texts for run in runs], eos, one.block)
    except ConfigError as error:
        return row | {"why_not": str(error)}
    measures = {side: {k: [_known(x) for x in v] for k, v in result[side].items()} for side in ("before", "after")}
    return row | result | measures | {"temperatures": scale.tolist(), "diagrams": calibrate.diagrams(held, scale)}


def _known(x: float) -> float | None:
    return x if np.isfinite(x) else None


# -- 7: losslessness -------------------------------------------------------------------------------------------


def _law(cells: Sequence[tuple[Cell, Result]]) -> list[Row]:
    """For each drafter and policy: are the places of all sampled tokens uniform? `control` asks the same of a wrong
    law, and must say no."""
    pooled: dict[tuple[str, str], list[np.ndarray]] = {}
    for cell, result in cells:
        for policy, places in result["places"].items():
            pooled.setdefault((cell.drafter, policy), []).append(np.array(places))
    rows = []
    for (drafter, policy), parts in pooled.items():
        right_N, wrong_N = np.concatenate(parts, axis=1)
        right, wrong = law.uniform_test(right_N), law.uniform_test(wrong_N)
        rows.append({
            "drafter": drafter, "policy": policy, "tokens": right_N.size,
            "chi_square": right and right[0], "p": right and right[1],
            "control_chi_square": wrong and wrong[0], "control_p": wrong and wrong[1],
            "histogram": np.histogram(right_N, law.BINS, (0, 1))[0].tolist(),
        })  # fmt: skip
    return rows
