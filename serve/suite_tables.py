"""The tables of an evaluation, question by question: results.json in, rows of text out, for HTML and Markdown."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from serve import load_plots
from serve.report import interval_text, number_text

Result = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Table:
    """A title, names of columns, and rows of as many texts."""

    title: str
    columns: tuple[str, ...]
    rows: list[list[str]]


def _table(title: str, columns: str, rows: Sequence[Sequence[Any]]) -> list[Table]:
    """One table, or none where there are no rows. `columns` are separated by bars."""
    names = tuple(columns.split(" | "))
    return [Table(title, names, [[str(x) for x in row] for row in rows])] if rows else []


def _n(value: float | None, digits: int = 2) -> str:
    return number_text(value, f".{digits}f")


def _percent(value: float | None, digits: int = 0) -> str:
    return number_text(value, f".{digits}%")


def _with_interval(row: Mapping[str, Any], name: str) -> str:
    return _n(row[name]) + interval_text(row["interval"])


def accepted(result: Result) -> list[Table]:
    """Question 1."""
    temperatures = list(dict.fromkeys(row["temperature"] for row in result["accepted"]))
    names = [d["name"] for d in result["drafters"]]
    tables = []
    for t in temperatures:
        cells: dict[str, dict[str, str]] = {}
        for row in (r for r in result["accepted"] if r["temperature"] == t):
            cells.setdefault(f"{row['set']} ({row['domain']})", {})[row["drafter"]] = _with_interval(
                row, "accepted_length"
            )
        for row in (r for r in result["means"] if r["temperature"] == t):
            cells.setdefault(f"mean of {row['domain']}", {})[row["drafter"]] = _with_interval(row, "accepted_length")
        rows = [[place, *(mine.get(name, "-") for name in names)] for place, mine in cells.items()]
        tables += _table(f"Accepted length, temperature {t:g}", " | ".join(["set", *names]), rows)
    rows = [[r["drafter"], f"{r['temperature']:g}", r["domain"], _with_interval(r, "ratio")] for r in result["ratios"]]
    first = names[0] if names else ""
    return tables + _table(f"Accepted length over that of {first}", "drafter | temperature | domain | ratio", rows)


def acceptance(result: Result) -> list[Table]:
    """Question 2."""
    rows = [
        [
            r["drafter"], r["domain"], f"{r['temperature']:g}", "with" if r["head"] else "without", r["prompts"],
            _n(r["accepted_length"]), " ".join(_percent(x).rstrip("%") for x in r["by_position"]),
            " ".join(_percent(x).rstrip("%") for x in r["conditional"]),
        ]
        for r in result["acceptance"]
    ]  # fmt: skip
    columns = (
        "drafter | domain | temperature | sequential head | prompts | accepted length"
        " | accepted by position, % | given those before, %"
    )
    return _table("Acceptance by position", columns, rows)


def latencies(result: Result) -> dict[tuple[str, int, int], float]:
    """Median seconds by drafter, requests and block; block 0 is plain."""
    return {(p["drafter"], p["requests"], p["block"]): statistics.median(p["seconds"]) for p in result["latency"]}


def blocks(result: Result) -> list[Table]:
    """Question 3."""
    seconds = latencies(result)
    requests = sorted({r for _, r, _ in seconds})
    domains = list(dict.fromkeys(row["domain"] for row in result["blocks"]))
    lengths: dict[tuple[str, float, int], dict[str, str]] = {}
    for row in result["blocks"]:
        key = row["drafter"], row["temperature"], row["block"]
        lengths.setdefault(key, {})[row["domain"]] = _with_interval(row, "accepted_length")
    layers = {d["name"]: d["layers"] for d in result["drafters"]}
    rows = [
        [
            drafter, layers[drafter], block, f"{t:g}", *(mine.get(domain, "-") for domain in domains),
            *(_milliseconds(seconds, drafter, r, block) for r in requests),
        ]
        for (drafter, t, block), mine in sorted(lengths.items())
    ]  # fmt: skip
    columns = ["drafter", "layers", "block", "temperature", *domains]
    columns += [f"full round, {r} request{'s' if r > 1 else ''}" for r in requests]
    return _table("Accepted length and full rounds by block size and depth", " | ".join(columns), rows)


def _milliseconds(seconds: Mapping[tuple[str, int, int], float], drafter: str, requests: int, block: int) -> str:
    full, plain = seconds.get((drafter, requests, block)), seconds.get((drafter, requests, 0))
    return "-" if not full or not plain else f"{1000 * full:.1f} ms ({full / plain:.2f} plain)"


def threshold(result: Result) -> list[Table]:
    """Question 4."""
    rows = [
        [
            r["drafter"], r["domain"], f"{r['temperature']:g}", f"{r['threshold']:g}", _n(r["accepted"]),
            _n(r["rejected"]), _percent(r["acceptance_rate"], 1), _n(r["accepted_length"]), r["rounds"],
        ]
        for r in result["sweep"]
    ]  # fmt: skip
    columns = (
        "drafter | domain | temperature | threshold | accepted a round | rejected"
        " | acceptance rate | accepted length | rounds"
    )
    return _table("Static confidence threshold", columns, rows)


def calibration(result: Result) -> list[Table]:
    """Question 5."""
    known = [c for c in result["calibration"] if not c["why_not"]]
    rows = [
        [
            c["drafter"], c["domain"], f"{c['temperature']:g}", k + 1, f"{scale:.2f}",
            *(f"{_n(c['before'][m][k], 3)} to {_n(c['after'][m][k], 3)}" for m in ("ece", "auroc", "brier")),
            c["blocks"]["held_out"],
        ]
        for c in known
        for k, scale in enumerate(c["temperatures"])
    ]  # fmt: skip
    columns = (
        "drafter | domain | decoding temperature | position | fitted temperature"
        " | ECE | AUROC | Brier | held-out blocks"
    )
    few = [
        [c["drafter"], c["domain"], f"{c['temperature']:g}", c["why_not"]]
        for c in result["calibration"]
        if c["why_not"]
    ]
    return _table("Calibration before and after scaling", columns, rows) + _table(
        "Not calibrated", "drafter | domain | decoding temperature | why", few
    )


def under_load(result: Result) -> list[Table]:
    """Question 6."""
    rows = []
    for drafter in dict.fromkeys(row["drafter"] for row in result["load"]):
        means = load_plots.average([row for row in result["load"] if row["drafter"] == drafter])
        off = {row["users"]: row["tokens_per_second"] for row in means if row["policy"] == "off"}
        rows += [
            [
                drafter, r["users"], r["policy"], _n(r["tokens_per_second"], 1),
                _n(r["tokens_per_second"] / off[r["users"]] if r["users"] in off else None),
                _n(r["tokens_per_second_per_user_p50"], 1), _n(r["verified_per_request_round"]),
                _n(r["accepted_per_request_round"]),
                ", ".join(f"{d} {_n(x['verified'])}/{_n(x['accepted'])}" for d, x in r["by_domain"].items()),
            ]
            for r in means
        ]  # fmt: skip
    columns = (
        "drafter | users | policy | tokens/s | of off | tokens/s a user, p50 | verified | accepted"
        " | verified/accepted by domain"
    )
    return _table("Policies under load, drafts a request and round", columns, rows)


def lossless(result: Result) -> list[Table]:
    """Question 7."""
    groups: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for row in result["lossless"]:
        if row["policy"] != "off":
            groups.setdefault((row["drafter"], row["requests"], row["policy"]), []).append(row)
    rows = []
    for (drafter, requests, policy), group in groups.items():
        prompts = sum(row["prompts"] for row in group)
        equal = round(sum(row["exact_match"] * row["prompts"] for row in group))
        margins = [
            d["margin"]
            for d in result["differences"]
            if (d["drafter"], d["requests"], d["policy"]) == (drafter, requests, policy)
        ]
        largest = f"{max(margins):.2g}" if margins else "-"
        rows.append([drafter, requests, policy, f"{equal} of {prompts}", _percent(equal / prompts, 1), largest])
    columns = (
        "drafter | requests | policy | greedy texts equal to plain ones"
        " | share | largest logit margin at a first difference"
    )
    laws = [
        [
            r["drafter"], r["policy"], r["tokens"], _n(r["chi_square"], 1), _n(r["p"], 3),
            _n(r["control_chi_square"], 1), number_text(r["control_p"], ".1e"),
        ]
        for r in result["law"]
    ]  # fmt: skip
    return _table("Exact match at temperature 0", columns, rows) + _table(
        "Law at temperature 1", "drafter | policy | tokens | chi-square (9) | p | of the law at 0.8 | p", laws
    )


def against(result: Result) -> list[Table]:
    """The comparison with an earlier run, if there was one."""
    diff = result.get("against")
    if not diff:
        return []
    lengths = [
        [
            r["drafter"], f"{r['temperature']:g}", r["where"], _n(r["old"]), _n(r["new"]), f"{r['difference']:+.2f}",
            _signed(r["interval"]), "yes" if r["paired"] else "no",
        ]
        for r in diff["accepted"]
    ]  # fmt: skip
    speeds = [
        [r["drafter"], r["what"], r["where"], _n(r["old"], 1), _n(r["new"], 1), _with_interval(r, "ratio")]
        for r in diff["speeds"]
    ]
    settings = [[s["setting"], s["old"], s["new"]] for s in diff["settings"]]
    columns = "drafter | temperature | set | old | new | difference | interval | same prompts"
    return (
        _table("Accepted length, new - old", columns, lengths)
        + _table("Speed, new / old", "drafter | what | where | old | new | ratio", speeds)
        + _table("Settings that differ", "setting | old | new", settings)
    )


def _signed(interval: Sequence[float] | None) -> str:
    return "-" if interval is None else f"{interval[0]:+.2f} to {interval[1]:+.2f}"


def setup(result: Result) -> list[Table]:
    """Drafters, prompt sets, machine and versions."""
    drafters = [
        [d["name"], d["algorithm"], d["layers"], d["block"], f"{d['head']} {d['rank']}" if d["head"] else "none",
         "yes" if d["confidence"] else "no", d["vocabulary"], f"{d['weights'] / 1e6:.1f} M", d["fingerprint"]]
        for d in result["drafters"]
    ]  # fmt: skip
    sets = [[s["set"], s["domain"], s["prompts"], f"{s['prompt_tokens']:.0f}", s["left_out"]] for s in result["sets"]]
    facts = {"target": result["target"], "dtype": result["dtype"]} | result["machine"] | result["versions"]
    facts |= {f"setting {name}": value for name, value in result["settings"].items()}
    columns = (
        "drafter | algorithm | layers | block | sequential head | confidence head | draft vocabulary | weights | files"
    )
    return (
        _table("Drafters", columns, drafters)
        + _table("Prompt sets", "set | domain | prompts | mean tokens | too long, passed over", sets)
        + _table("Machine, versions, settings", "what | value", [[name, _list(value)] for name, value in facts.items()])
    )


def _list(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


TABLES: dict[int, Callable[[Result], list[Table]]] = {
    1: accepted,
    2: acceptance,
    3: blocks,
    4: threshold,
    5: calibration,
    6: under_load,
    7: lossless,
}
