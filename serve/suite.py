"""The evaluation: seven questions about drafters, answered in one folder with a report that needs nothing beside it.

    python -m serve.bench --suite quick [--drafter A B --data FOLDER --out FOLDER --against OLD/results.json]

1 accepted length, 2 acceptance by position, 3 block size and depth, 4 confidence threshold, 5 calibration, 6 load,
7 losslessness. Each measurement is a cell whose numbers are kept in OUT/cells: a run that was killed goes on with the
cells that are missing. `quick` is meant for minutes on two cores, `paper` for an hour.
"""

import dataclasses
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from dspark_jax import ConfigError, Target
from serve import load, report, suite_against, suite_numbers, suite_report
from serve.setup import cache_programs, load_several
from serve.suite_args import Args, Sizes
from serve.suite_cells import KINDS, Contender, Lab, Result, Tell, replay_limit
from serve.suite_sets import PromptSet, encode_sets, find_sets
from serve.suite_store import FORMAT, Cell, Store, finite

PACKAGES = ("dspark-jax", "jax", "jaxlib", "flax", "numpy", "transformers")


def plan(lab: Lab, sizes: Sizes, questions: Collection[int], seed: int) -> list[Cell]:
    """Every cell that the questions need, each once, drafter by drafter."""
    machine, weights = report.machine(), np.asarray(lab.target.params["final_norm"]).tobytes()
    base = {
        "target": [repr(lab.target.config), str(lab.target.dtype), suite_numbers.digest(weights)],
        "jax": [machine["jax"], machine["platform"]],
        "seed": seed,
        "tokens": sizes.tokens,
    }
    timed = {"machine": [machine["cpu"], machine["cores"], machine["devices"]]}
    cells: dict[str, Cell] = {}
    for who in lab.contenders.values():
        mine = base | {"drafter": who.fingerprint}
        for cell in (*_texts(lab, who, sizes, questions, mine), *_timed(lab, who, sizes, questions, mine | timed)):
            cells.setdefault(cell.key, cell)
    return list(cells.values())


def _texts(
    lab: Lab, who: Contender, sizes: Sizes, questions: Collection[int], base: Mapping[str, Any]
) -> Iterator[Cell]:
    """Decoding with every draft verified, as the drafter is and in its variants."""
    config = who.drafter.config
    whole = config.num_drafts

    def cell(on: PromptSet, limit: int, temperature: float, block: int, head: bool) -> Cell:
        some = on.first(limit)
        variant = {"temperature": temperature, "block": block, "head": head}
        return Cell("rollout", who.name, on.name, {**base, **variant, "prompts": some.digest, "limit": len(some.ids)})

    for on in lab.sets.values():
        if {1, 2, 3, 4, 5} & set(questions):
            for temperature in sizes.temperatures:
                yield cell(on, sizes.prompts, temperature, whole, True)
        for temperature in sizes.variant_temperatures:
            if 2 in questions and config.markov_rank:
                yield cell(on, sizes.variant_prompts, temperature, whole, False)
            if 3 in questions:
                for block in _blocks(who, sizes)[:-1]:
                    yield cell(on, sizes.variant_prompts, temperature, block, True)


def _timed(
    lab: Lab, who: Contender, sizes: Sizes, questions: Collection[int], base: Mapping[str, Any]
) -> Iterator[Cell]:
    """What is measured with a clock, and the losslessness of what serves."""
    if 3 in questions:
        shapes = {"blocks": _blocks(who, sizes), "requests": [1, max(sizes.concurrency)]}
        yield Cell("latency", who.name, "", {**base, **shapes})
    if not {6, 7} & set(questions):
        return
    base = {**base, "longest": lab.longest, "concurrency": list(sizes.concurrency)}
    curves = Cell("curves", who.name, "", base)
    yield curves
    full = f"fixed:{who.drafter.config.num_drafts}"
    if 6 in questions:
        policies = _usable(dict.fromkeys(("off", *sizes.policies, full, "scheduled")), who)
        much = {"requests": sizes.requests, "repeats": sizes.repeats, "policies": policies}
        prompts = [on.digest for on in lab.sets.values()]
        yield Cell("load", who.name, "", {**base, **much, "prompts": prompts}, (curves,))
    for on in lab.sets.values() if 7 in questions else ():
        some = on.first(sizes.lossless_prompts)
        much = {"policies": ["off", full, "scheduled"], "limit": len(some.ids), "single": sizes.single_prompts}
        yield Cell("lossless", who.name, on.name, {**base, **much, "prompts": some.digest}, (curves,))


def _blocks(who: Contender, sizes: Sizes) -> list[int]:
    """Block sizes that a drafter can be run with, its own last."""
    own = who.drafter.config.num_drafts
    return [*(block for block in sizes.blocks if block < own), own]


def _usable(policies: Iterable[str], who: Contender) -> list[str]:
    """Policies that this drafter can follow: a threshold needs confidences, a fixed length so many drafts."""
    config = who.drafter.config
    return [
        p
        for p in policies
        if (config.confidence_head or not p.startswith("threshold"))
        and not (p.startswith("fixed:") and int(p.partition(":")[2]) > config.num_drafts)
    ]


def measure(lab: Lab, cells: Sequence[Cell], store: Store, on_step: Callable[[str, int], None]) -> dict[str, Result]:
    """All results by key; cells that are finished already are read. `on_step` hears what comes, and of each that is
    done."""
    done: dict[str, Result] = {}
    for cell in cells:
        where = " ".join(filter(None, (cell.drafter, cell.kind, cell.set)))
        result = store.get(cell)
        if result is None:
            on_step(where, 0)
            tell: Tell = lambda text, where=where: on_step(f"{where}: {text}", 0)  # noqa: E731
            result = store.put(cell, KINDS[cell.kind](lab, cell, [done[need.key] for need in cell.needs], tell))
        done[cell.key] = result
        on_step(where, 1)
    return done


def prepare(args: Args, sizes: Sizes) -> Lab:
    """Loads target, drafters and prompts. Raises ConfigError for what is missing or does not fit."""
    texts = find_sets(args.data, args.sets, sizes.sets)
    target, drafters = load_several(args.target, args.drafter or (None,), args.dtype, args.tensor)
    for drafter, path in drafters:
        if replay_limit(sizes.tokens, drafter.config.num_drafts) < 2:
            raise ConfigError(
                f"--tokens {sizes.tokens}: give at least {drafter.config.num_drafts + 1}, one more than {path} drafts"
            )
    sets = encode_sets(target, texts, sizes.prompts, sizes.max_prompt_tokens, sizes.tokens)
    under_load = load.Args(
        concurrency=sizes.concurrency, requests=sizes.requests, tokens=sizes.tokens, repeats=sizes.repeats,
        seed=args.seed,
    )  # fmt: skip
    names = _names([path for _, path in drafters])
    contenders = {n: Contender(n, path, d) for n, (d, path) in zip(names, drafters, strict=True)}
    if len({who.fingerprint for who in contenders.values()}) < len(drafters):
        raise ConfigError(f"--drafter: two of {', '.join(names)} have the same files; give each drafter once")
    return Lab(target, contenders, sets, under_load)


def _names(paths: Sequence[Path]) -> list[str]:
    """Folder names, with as many parents as it takes to tell them apart."""
    parts = [path.resolve().parts for path in paths]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(set(parts)):
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]


def about(args: Args, sizes: Sizes, lab: Lab, command: str) -> dict[str, Any]:
    """What was run, on what: the head of results.json."""
    target: Target = lab.target
    return {
        "format": FORMAT,
        "suite": args.suite,
        "command": command,
        "machine": report.machine(),
        "versions": {name: report.version(name) for name in PACKAGES},
        "target": args.target,
        "dtype": str(target.dtype),
        "settings": dataclasses.asdict(sizes) | {"sets": list(lab.sets), "seed": args.seed},
        "drafters": [suite_numbers.describe(c) for c in lab.contenders.values()],
        "sets": [
            {"set": s.name, "domain": s.domain, "prompts": len(s.ids), "left_out": s.left_out, "digest": s.digest,
             "prompt_tokens": float(np.mean([len(ids) for ids in s.ids]))}
            for s in lab.sets.values()
        ],
    }  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """`serve.bench --suite` ends up here."""
    try:
        args = tyro.cli(Args, args=argv, prog="serve.bench", description=__doc__)
        sizes = args.sizes()
        earlier = suite_against.read(args.against) if args.against else None
        out = args.out or Path(f"suite-{args.suite}")
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {out}: cannot be made ({error.strerror})") from None
        cache_programs()
        lab = prepare(args, sizes)
        if earlier:
            suite_against.match(earlier, list(lab.contenders))
        cells = plan(lab, sizes, args.questions, args.seed)
        with report.progress() as progress:
            task = progress.add_task("", total=len(cells))
            done = measure(
                lab, cells, Store(out / "cells"),
                lambda text, ended: progress.update(task, description=text, advance=ended),
            )  # fmt: skip
            progress.update(task, description="statistics and pictures")
            command = shlex.join(["python", "-m", "serve.bench", *argv])
            result = finite(about(args, sizes, lab, command) | suite_numbers.answers(lab, cells, done, sizes.tokens))
            result["against"] = suite_against.compare(earlier, result) if earlier else None
            report.write_json(out / "results.json", result)
            suite_report.write(result, out)
        suite_report.show(result)
        report.console().print(f"wrote {out}/report.html, results.json and pictures", highlight=False)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
