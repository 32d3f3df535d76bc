"""Serving under load: each policy in one run, closed loops of N users and open loops of Poisson arrivals.

    python -m serve.bench --load [--concurrency 1 2 4 8] [--rates 0.5 2] [--policies off scheduled] [--plots FOLDER]

Policies take turns at every load, so that whatever else the machine does falls on all alike.
"""

import dataclasses
import itertools
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.table import Table

from dspark_jax import ConfigError, SamplingParams
from dspark_jax.config import DrafterConfig
from serve import load_plots, profile, report
from serve.calibration import read_temperatures
from serve.curves import Curves
from serve.dtype import Dtype
from serve.engine import Engine, EngineConfig
from serve.policy import parse
from serve.prompts import choose_prompts, encode
from serve.scheduler import Request, Text, positions
from serve.server import Server
from serve.setup import cache_programs, load_models


@dataclasses.dataclass(frozen=True)
class Args:
    """Measure policies under load."""

    target: str = "smollm2-135m"
    """safetensors directory, .gguf file, or smollm2-135m."""
    drafter: Path | None = None
    """A drafter of that target; without it the one shipped for smollm2-135m."""
    dtype: Dtype = "fast"
    """Compute dtype of target and drafter; fast: the one that is faster on this machine."""
    tensor: int = 1
    """Devices that weights and caches are split over."""
    prompts: Path | None = None
    """JSONL, {"turns": ["text"]} a line; without it built-in prompts of three domains."""
    limit: int = 24
    """Prompts a domain."""
    policies: tuple[str, ...] = ()
    """Without any: off, fixed:2, verifying all drafts, threshold:0.5 and scheduled."""
    concurrency: tuple[int, ...] = (1, 2, 4, 8)
    """Users of the closed loops: each sends its next request when the last one is answered."""
    rates: tuple[float, ...] = ()
    """Requests a second of the open loops, at the largest concurrency."""
    domains: tuple[str, ...] = ("mixed",)
    """mixed, or names of single domains."""
    requests: int = 3
    """Requests of each user and, in open loops, of each slot."""
    tokens: int = 48
    """New tokens a request."""
    temperature: float = 0.0
    repeats: int = 1
    """Times each load is measured with each policy, in turn."""
    profile: bool = False
    """Measure the step times even if they are kept for this machine, model and version."""
    seed: int = 0
    json: Path | None = None
    """Where to write every number."""
    plots: Path | None = None
    """Folder for the pictures."""

    def check(self) -> None:
        """Raises ConfigError for settings that measure nothing."""
        if not (self.concurrency or self.rates):
            raise ConfigError("--concurrency and --rates: give at least one load")
        if self.seed < 0:
            raise ConfigError(f"--seed {self.seed}: expected 0 or more")
        if min((*self.concurrency, self.limit, self.requests, self.tokens - 1, self.repeats)) < 1:
            raise ConfigError("--concurrency, --limit, --requests and --repeats must be positive, --tokens at least 2")
        if self.rates and min(self.rates) <= 0:
            raise ConfigError(f"--rates {self.rates}: expected positive requests a second")
        SamplingParams(self.temperature)  # raises where it is none


def usual_policies(drafter: DrafterConfig) -> tuple[str, ...]:
    """What is compared where nobody says what: a threshold means nothing without confidences."""
    fixed = dict.fromkeys(f"fixed:{count}" for count in (2, drafter.num_drafts) if count <= drafter.num_drafts)
    threshold = ("threshold:0.5",) if drafter.confidence_head else ()
    return ("off", *fixed, *threshold, "scheduled")


@dataclasses.dataclass(frozen=True)
class Load:
    """One point: `users` in a closed loop, or `rate` arrivals a second into `users` slots."""

    users: int
    rate: float
    domain: str


def run_point(
    server: Server, load: Load, requests: Sequence[Request], seed: int, sleep: Callable[[float], None] = time.sleep
) -> tuple[list[Text], float]:
    """Serves all requests under one load; returns the texts and the seconds from first arrival to last end.

    A text of an open loop waits from its arrival on, so for the step that is under way then too.
    """
    arrivals = np.zeros(len(requests))
    if load.rate:
        arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / load.rate, len(requests)))
    queue, texts, start = list(zip(arrivals, requests, strict=True)), [], server.clock()
    while queue or not server.idle:
        now = server.clock() - start
        open_texts = sum(text.reason is None for text in texts)
        while queue and queue[0][0] <= now and (load.rate or open_texts < load.users):
            arrival, request = queue.pop(0)
            sent = start + float(arrival) if load.rate else server.clock()
            texts.append(server.scheduler.submit(request, sent))
            open_texts += 1
        if server.idle:
            sleep(max(0.0, min(queue[0][0] - now, 0.05)))
        else:
            server.step()
    return texts, server.clock() - start


def numbers(server: Server, texts: Sequence[Text], seconds: float) -> dict[str, Any]:
    """The statistics of one point. Speeds a user run from its first token to its last."""
    totals = server.totals
    rates = [
        (len(t.tokens) - 1) / (t.finished - t.first_token)
        for t in texts
        if t.finished is not None and t.first_token is not None and len(t.tokens) > 1 and t.finished > t.first_token
    ]
    waits = [t.first_token - t.submitted for t in texts if t.first_token is not None]
    rounds = sum(len(t.rounds) for t in texts)
    return {
        "texts": len(texts),
        "tokens": sum(len(t.tokens) for t in texts),
        "seconds": seconds,
        "tokens_per_second": sum(len(t.tokens) for t in texts) / seconds,
        "tokens_per_second_per_user_p50": _quantile(rates, 0.5),
        "tokens_per_second_per_user_p95": _quantile(rates, 0.05),
        "time_to_first_token_p50": _quantile(waits, 0.5),
        "time_to_first_token_p95": _quantile(waits, 0.95),
        "rounds": totals.rounds,
        "draft_rounds": totals.draft_rounds,
        "verified_per_request_round": sum(t.verified for t in texts) / rounds if rounds else None,
        "accepted_per_request_round": sum(t.accepted for t in texts) / rounds if rounds else None,
        "padding_share": 1 - totals.filled / totals.packed if totals.packed else None,
        "host_share": totals.host / (totals.host + totals.waiting) if totals.waiting else None,
        "idle_share": totals.idle / (totals.host + totals.waiting) if totals.waiting else None,
        "calibration_error": server.monitor.error,
    }


def _quantile(values: Sequence[float], q: float) -> float | None:
    return float(np.quantile(values, q)) if values else None


def make_requests(
    prompts: Mapping[str, Sequence[Sequence[int]]], load: Load, args: Args, stop: tuple[int, ...]
) -> list[Request]:
    """The same requests for every policy: domains in turn, or one of them."""
    chosen = prompts if load.domain == "mixed" else {load.domain: prompts[load.domain]}
    rows = [
        (domain, tuple(ids))
        for group in itertools.zip_longest(*([(d, p) for p in ps] for d, ps in chosen.items()))
        for domain, ids in filter(None, group)
    ]
    count = args.requests * load.users
    return [
        Request(ids, args.tokens, SamplingParams(args.temperature), args.seed + i, stop, domain)
        for i, (domain, ids) in enumerate(itertools.islice(itertools.cycle(rows), count))
    ]


def run(
    engines: Mapping[bool, Engine],
    curves: Curves,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    args: Args,
    on_point: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Every load with every policy; `engines[True]` drafts, `engines[False]` has no drafter."""
    users = max(args.concurrency, default=engines[True].config.max_requests)
    loads = [Load(n, 0.0, domain) for n in args.concurrency for domain in args.domains]
    loads += [Load(users, rate, domain) for rate in args.rates for domain in args.domains]
    rows, stop = [], engines[True].target_config.eos_token_ids
    first = make_requests(prompts, loads[0], args, stop)[:1]
    for policy in args.policies:  # the first texts of a process are slow, whatever policy they happen to have
        run_point(Server(engines[policy != "off"], policy, curves), loads[0], first, args.seed)
    for load in loads:
        requests = make_requests(prompts, load, args, stop)
        for repeat in range(args.repeats):
            for policy in args.policies:
                on_point(f"{load.users} users{f', {load.rate:g}/s' if load.rate else ''}, {load.domain}: {policy}")
                server = Server(engines[policy != "off"], policy, curves)
                texts, seconds = run_point(server, load, requests, args.seed + repeat)
                rows.append({"policy": policy, "repeat": repeat, **dataclasses.asdict(load)}
                            | numbers(server, texts, seconds)
                            | {"by_domain": _by_domain(texts)})  # fmt: skip
    return rows


def _by_domain(texts: Sequence[Text]) -> dict[str, dict[str, float]]:
    result = {}
    for domain in sorted({t.request.domain for t in texts}):
        mine = [t for t in texts if t.request.domain == domain]
        rounds = max(sum(len(t.rounds) for t in mine), 1)
        result[domain] = {
            "verified": sum(t.verified for t in mine) / rounds,
            "accepted": sum(t.accepted for t in mine) / rounds,
        }
    return result


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """One table: a block a load, a line a policy (repeats are averaged)."""
    table = Table(title="Policies under load")
    for name in ("users", "arrivals/s", "domain", "policy"):
        table.add_column(name)
    for name in ("tokens/s", "x off", "tokens/s/user p50", "p95", "first token p50", "verified", "accepted", "padding",
                 "host", "idle"):  # fmt: skip
        table.add_column(name, justify="right")
    means = load_plots.average(rows)
    for load, group in itertools.groupby(means, key=lambda row: (row["users"], row["rate"], row["domain"])):
        lines = list(group)
        off = next((row["tokens_per_second"] for row in lines if row["policy"] == "off"), None)
        for row in lines:
            table.add_row(
                str(load[0]), f"{load[1]:g}" if load[1] else "", load[2], row["policy"],
                f"{row['tokens_per_second']:.1f}",
                f"{row['tokens_per_second'] / off:.2f}" if off else "",
                report.number_text(row["tokens_per_second_per_user_p50"], ".1f"),
                report.number_text(row["tokens_per_second_per_user_p95"], ".1f"),
                report.number_text(row["time_to_first_token_p50"], ".2f", " s"),
                report.number_text(row["verified_per_request_round"], ".2f"),
                report.number_text(row["accepted_per_request_round"], ".2f"),
                report.number_text(row["padding_share"], ".0%"),
                report.number_text(row["host_share"], ".1%"),
                report.number_text(row["idle_share"], ".1%"),
                end_section=row is lines[-1],
            )  # fmt: skip
    report.console().print(table)


def make_engines(args: Args, longest: int, target: Any, drafter: Any, path: Path) -> dict[bool, Engine]:
    """One engine with the drafter and one without, both compiled for every concurrency."""
    users = max((*args.concurrency, 1))
    context = positions(longest, args.tokens, drafter.config.num_drafts)
    config = EngineConfig(
        max_requests=users,
        request_sizes=tuple(sorted({*args.concurrency, users})),
        max_context=-(-context // 128) * 128,
        prefill_lengths=(64, 256),
    )
    temperatures = read_temperatures(path, drafter.config.num_drafts)
    return {True: Engine(target, drafter, config, temperatures), False: Engine(target, None, config)}


def main(argv: Sequence[str]) -> int:
    """`serve.bench --load` ends up here."""
    try:
        args = tyro.cli(Args, args=argv, prog="serve.bench --load", description=__doc__)
        args.check()
        chosen = choose_prompts(args.prompts, args.limit)
        if args.json:
            report.check_writable(args.json)
        if args.plots:
            report.make_folder(args.plots, "--plots")
        cache_programs()
        target, drafter, path = load_models(args.target, args.drafter, args.dtype, args.tensor)
        args = dataclasses.replace(args, policies=args.policies or usual_policies(drafter.config))
        for policy in args.policies:
            parse(policy, drafter.config.num_drafts)
        prompts = encode(target, chosen, args.tokens)
        if unknown := set(args.domains) - {"mixed", *prompts}:
            raise ConfigError(f"--domains {sorted(unknown)}: the prompts have {sorted(prompts)}, or say mixed")
        longest = max(len(ids) for domain in prompts.values() for ids in domain)
        engines = make_engines(args, longest, target, drafter, path)
        sync = "scheduled:sync" in args.policies
        points = len(args.policies) * args.repeats * len(args.domains) * (len(args.concurrency) + len(args.rates))
        keys = {drafts: engine.program_keys(sync and drafts) for drafts, engine in engines.items()}
        with report.progress() as progress:
            task = progress.add_task("compiling", total=points + sum(map(len, keys.values())))
            began = time.perf_counter()
            for drafts, engine in engines.items():
                engine.compile(
                    keys[drafts], lambda key: progress.update(task, advance=1, description=f"compiled {key}")
                )
            compiled = time.perf_counter() - began
            curves = profile.curves_for(
                engines[True], args.profile, lambda text: progress.update(task, description=f"timing {text}")
            )
            rows = run(engines, curves, prompts, args, lambda text: progress.update(task, advance=1, description=text))
        profile.show(curves, drafter.config.num_drafts, report.console())
        show(rows)
        result = {
            "command": shlex.join(["python", "-m", "serve.bench", "--load", *argv]),
            "machine": report.machine(),
            "target": args.target,
            "drafter": str(args.drafter or path.name),
            "dtype": str(target.dtype),
            "compile_seconds": compiled,
            "curves": curves.to_json(),
            "rows": rows,
        }
        if args.json:
            report.write_json(args.json, result)
        if args.plots:
            profile.plot(curves, args.plots / "step-times.png")
            load_plots.draw(rows, args.plots)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
