"""The tables of benchmarks/drafters.py: a dictionary of results in, tables for the terminal and for Markdown out."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from serve.measure import PromptCounts, accepted_length_draws, interval
from serve.report import number_text

Result = Mapping[str, Any]

# Accepted length of the first over that of the second, and what others report at temperature 1 for larger targets.
PAIRS = (
    ("dspark-5-vanilla", "dflash-5", "+16 to +18 % (paper, four targets)"),
    ("dspark-5-vanilla", "eagle-3", "+27 to +31 % (paper, Qwen3), +6 % (Gemma 4)"),
    ("dspark-2-vanilla", "dflash-5", "above 0 (paper)"),
    ("dspark-2-vanilla", "dflash-2", ""),
    ("dspark-2-vanilla", "eagle-3", ""),
    ("dspark-2-vanilla", "mtp-1", "+19 to +23 % (DFlash 2's authors, GSM8K and MATH)"),
    ("dflash-v2", "dspark-2-vanilla", "+9 % (DFlash 2's authors, GSM8K and MATH)"),
    ("dspark-2-gated", "dspark-2-vanilla", ""),
    ("dspark-2-rnn", "dspark-2-vanilla", "a small gain (paper)"),
    ("dspark-2-kda", "dspark-2-vanilla", ""),
    ("dspark-2-ngram", "dspark-2-vanilla", ""),
    ("dspark-2-corpus", "dspark-2-vanilla", ""),
    ("dspark-2-corpus", "eagle-3", ""),
)


@dataclasses.dataclass(frozen=True)
class Sheet:
    """One table. The first column is words, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def names(result: Result) -> list[str]:
    return list(dict.fromkeys(run["name"] for run in result["drafters"]))


def runs(result: Result, name: str) -> list[Mapping[str, Any]]:
    """Of a drafter, one a seed."""
    return [run for run in result["drafters"] if run["name"] == name]


def temperatures(result: Result) -> list[float]:
    return list(dict.fromkeys(row["temperature"] for run in result["drafters"] for row in run["rows"]))


def headings(result: Result) -> list[str]:
    """Of the sets: their domains, or their names where two share a domain."""
    domains = [s["domain"] for s in result["sets"]]
    return domains if len(set(domains)) == len(domains) else [s["name"] for s in result["sets"]]


def counts(result: Result, name: str, temperature: float) -> list[PromptCounts]:
    """Tokens and rounds of each prompt, summed over the seeds; an entry a set."""
    found = []
    for prompts in result["sets"]:
        rows = [
            row
            for run in runs(result, name)
            for row in run["rows"]
            if (row["set"], row["temperature"]) == (prompts["name"], temperature)
        ]
        found.append(PromptCounts(*(np.sum([row[key] for row in rows], axis=0) for key in ("emitted", "rounds"))))
    return found


def length(sets: Sequence[PromptCounts]) -> float | None:
    """Mean over sets of their accepted lengths. None where a set had no rounds."""
    if not all(s.rounds_N.sum() for s in sets):
        return None
    return float(np.mean([s.emitted_N.sum() / s.rounds_N.sum() for s in sets]))


def length_interval(sets: Sequence[PromptCounts]) -> tuple[float, float] | None:
    """95 % over prompts, of two or more that had rounds in every set."""
    used = [PromptCounts(s.emitted_N[s.rounds_N > 0], s.rounds_N[s.rounds_N > 0]) for s in sets]
    return interval(accepted_length_draws(used)) if min(s.rounds_N.size for s in used) >= 2 else None


def gain(one: Sequence[PromptCounts], other: Sequence[PromptCounts]) -> tuple[float | None, tuple[float, float] | None]:
    """Accepted length of the first over that of the second, less one, and its 95 % interval over the same prompts."""
    pairs = []
    for a, b in zip(one, other, strict=True):
        both = (a.rounds_N > 0) & (b.rounds_N > 0)
        pairs.append([PromptCounts(x.emitted_N[both], x.rounds_N[both]) for x in (a, b)])
    lengths = length([a for a, _ in pairs]), length([b for _, b in pairs])
    ratio = lengths[0] / lengths[1] - 1 if lengths[0] and lengths[1] else None
    if ratio is None or min(a.rounds_N.size for a, _ in pairs) < 2:
        return ratio, None
    draws = [accepted_length_draws([pair[i] for pair in pairs]) for i in (0, 1)]  # paired: the same prompts are drawn
    return ratio, interval(draws[0] / draws[1] - 1)


def conditional(result: Result, name: str, prompts: str, temperature: float) -> list[float | None]:
    """Acceptance of each position, given that all before it stand, in one set of prompts: the mean over seeds."""
    found = [
        row["conditional"]
        for run in runs(result, name)
        for row in run["rows"]
        if (row["set"], row["temperature"]) == (prompts, temperature)
    ]
    known = [[share for share in shares if share is not None] for shares in zip(*found, strict=True)]
    return [float(np.mean(shares)) if shares else None for shares in known]


def sheets(result: Result) -> list[Sheet]:
    """All tables of the results."""
    made = [_lengths(result, t) for t in temperatures(result)]
    made += [sheet for t in reversed(temperatures(result)) if (sheet := _gains(result, t)).rows]
    return [*made, _costs(result), *(_conditional(result, t) for t in temperatures(result))]


def _with_interval(sets: Sequence[PromptCounts]) -> str:
    found, bounds = length(sets), length_interval(sets)
    return number_text(found, ".2f") + ("" if bounds is None else f" ({bounds[0]:.2f} to {bounds[1]:.2f})")


def _lengths(result: Result, temperature: float) -> Sheet:
    several = len({run["seed"] for run in result["drafters"]}) > 1
    rows = []
    for name in names(result):
        sets = counts(result, name, temperature)
        row = [name, *(_with_interval([one]) for one in sets), _with_interval(sets)]
        if several:
            each = [length(counts({**result, "drafters": [run]}, name, temperature)) for run in runs(result, name)]
            row.append(", ".join(number_text(one, ".2f") for one in each))
        rows.append(tuple(row))
    columns = ("drafter", *headings(result), "mean of sets", *(["by seed"] if several else []))
    return Sheet(f"Accepted length at temperature {temperature:g} (95 % interval over prompts)", columns, tuple(rows))


def _gains(result: Result, temperature: float) -> Sheet:
    there, rows = names(result), []
    for one, other, published in PAIRS:
        if one in there and other in there:
            a, b = counts(result, one, temperature), counts(result, other, temperature)
            each = [gain([x], [y])[0] for x, y in zip(a, b, strict=True)]
            ratio, bounds = gain(a, b)
            between = "" if bounds is None else f" ({100 * bounds[0]:+.1f} to {100 * bounds[1]:+.1f})"
            percent = [_percent(value) for value in each]
            rows.append((f"{one} over {other}", *percent, _percent(ratio) + between, published or "-"))
    columns = ("accepted length of", *headings(result), "mean of sets", "elsewhere, temperature 1")
    title = f"One drafter over another at temperature {temperature:g}, in percent (95 % interval, same prompts)"
    return Sheet(title, columns, tuple(rows))


def _percent(ratio: float | None) -> str:
    return number_text(None if ratio is None else 100 * ratio, "+.1f")


def _costs(result: Result) -> Sheet:
    requests = list(result["drafters"][0]["draft_seconds"])
    rows = []
    for name in names(result):
        mine = runs(result, name)
        first, blocks, positions = mine[0], _mean(mine, "blocks"), _mean(mine, "positions")
        times = [1000 * float(np.mean([run["draft_seconds"][r] for run in mine])) for r in requests]
        rows.append((
            name, str(first["layers"]), f"{first['parameters'] / 1e6:.2f}",
            f"{first['in_tables'] / 1e6:.2f}", *(f"{ms:.2f}" for ms in times), f"{_mean(mine, 'seconds') / 60:.1f}",
            f"{blocks:,.0f}", f"{positions:,.0f}",
        ))  # fmt: skip
    columns = (
        "drafter", "layers", "million weights", "of these in token tables",
        *(f"ms a block, {r} at once" for r in requests), "training, minutes", "blocks", "supervised positions",
    )  # fmt: skip
    title = f"Size, draft time (greedy, {result['context']} tokens of context) and training of a seed"
    return Sheet(title, columns, tuple(rows))


def _mean(mine: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(np.mean([run[key] for run in mine]))


def _conditional(result: Result, temperature: float) -> Sheet:
    rows = [
        (
            name,
            *(
                " ".join(number_text(share, ".2f") for share in conditional(result, name, prompts["name"], temperature))
                for prompts in result["sets"]
            ),
        )
        for name in names(result)
    ]
    title = f"Acceptance of drafts 1, 2, ... given that all before stand, temperature {temperature:g}"
    return Sheet(title, ("drafter", *headings(result)), tuple(rows))


def notes(result: Result) -> list[str]:
    """What was equal, what was not, and where this was measured."""
    c, machine = result["common"], result["machine"]
    sets = ", ".join(f"{s['name']} ({s['prompts']} prompts, {s['domain']})" for s in result["sets"])
    device = machine["cpu"] if machine["platform"] == "cpu" else ", ".join(machine["devices"])
    seeds = ", ".join(map(str, dict.fromkeys(run["seed"] for run in result["drafters"])))
    lines = [
        f"Equal for all: {c['steps']} steps of {c['batch_size']} rows with up to {c['num_anchors']} anchors, the same"
        f" rows and anchors in the same order for a seed (seeds: {seeds}), AdamW with a peak rate of"
        f" {c['learning_rate']:g}, a draft vocabulary of {c['draft_vocab_size']} ids, training in {c['dtype']}"
        + (", cached target features." if c["cached_features"] else "."),
        f"Decoded: {sets}; {result['tokens']} new tokens each, in {result['drafters'][0]['dtype']}.",
    ]
    lines += [
        f"Trained otherwise: {name} has {', '.join(differs)}; in brackets what the others have."
        for name in names(result)
        if (differs := runs(result, name)[0]["differs"])
    ]
    if skipped := sum(run["skipped"] for run in result["drafters"]):
        lines.append(f"Steps skipped for a loss that was not finite: {skipped}.")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines.append(f"Machine: {device}, {machine['cores']} cores, {machine['system']}, Python {machine['python']}.")
    return [*lines, f"Versions: {versions}.", f"Command: {result['command']}"]


def markdown(result: Result) -> str:
    """The tables and notes for docs/drafters.md."""
    parts = []
    for sheet in sheets(result):
        rule = ["---", *["---:"] * (len(sheet.columns) - 1)]
        lines = ["| " + " | ".join(cells) + " |" for cells in (sheet.columns, rule, *sheet.rows)]
        parts.append("\n".join([f"**{sheet.title}**", "", *lines]))
    return "\n\n".join([*parts, "\n".join(f"* {line}" for line in notes(result))])


def show(result: Result, console: Console) -> None:
    """Prints the tables."""
    for sheet in sheets(result):
        table = Table(title=sheet.title, title_justify="left")
        for number, column in enumerate(sheet.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in sheet.rows:
            table.add_row(*row)
        console.print(table)
    for line in notes(result):
        console.print(line, highlight=False, markup=False)
