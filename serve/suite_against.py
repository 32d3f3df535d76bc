"""Two runs of an evaluation side by side: what changed, with intervals where the numbers have a spread."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax import ConfigError
from serve import measure
from serve.measure import PromptCounts
from serve.suite_numbers import ALL, mean_length
from serve.suite_store import FORMAT

Row = dict[str, Any]
_UNPAIRED = 1  # another seed than the first run's: draws that have nothing to do with each other


def read(path: Path) -> Row:
    """results.json of an earlier run. Raises ConfigError for any other file."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error}); expected the results.json of an evaluation") from None
    if not isinstance(result, dict) or "accepted" not in result:
        raise ConfigError(f"{path}: not the results.json of an evaluation (serve.bench --suite)")
    if result.get("format") != FORMAT:
        raise ConfigError(
            f"{path}: made by another version of the suite (format {result.get('format')}, this one is {FORMAT}): run"
            " it again"
        )
    return result


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Row:
    """Differences new - old of accepted lengths, ratios new / old of speeds, and the settings that are not the same.

    Drafters are matched by name; where both runs have a single one, these two are compared whatever they are called.
    """
    names = match(old, [row["name"] for row in new["drafters"]])
    settings = [
        {"setting": name, "old": old["settings"].get(name), "new": value}
        for name, value in new["settings"].items()
        if old["settings"].get(name) != value
    ]
    settings += [
        {"setting": name, "old": old[name], "new": new[name]}
        for name in ("target", "dtype", "machine", "versions")
        if old[name] != new[name]
    ]
    return {
        "command": old["command"],
        "drafters": [{"old": a, "new": b} for a, b in names.items()],
        "settings": settings,
        "accepted": _lengths(old["accepted"], new["accepted"], names),
        "speeds": _speeds(old, new, names),
    }


def match(old: Mapping[str, Any], after: Sequence[str]) -> dict[str, str]:
    """Names of the same drafter in both runs: old -> new. Raises ConfigError where there is none."""
    before = [row["name"] for row in old["drafters"]]
    if len(before) == len(after) == 1:
        return {before[0]: after[0]}
    names = {name: name for name in before if name in after}
    if not names:
        raise ConfigError(
            f"--against: no drafter is in both runs; the earlier one has {', '.join(before)}, this one"
            f" {', '.join(after)}"
        )
    return names


def _lengths(old: Sequence[Row], new: Sequence[Row], names: Mapping[str, str]) -> list[Row]:
    """By set, by domain and over all sets that both runs have."""
    before = {(names[r["drafter"]], r["set"], r["temperature"]): r for r in old if r["drafter"] in names}
    pairs = [(before[k], r) for r in new if (k := (r["drafter"], r["set"], r["temperature"])) in before]
    groups: dict[tuple[str, float, str], list[tuple[Row, Row]]] = {}
    for a, b in pairs:
        for name in (b["set"], f"mean of {b['domain']}", f"mean of {ALL}"):
            groups.setdefault((b["drafter"], b["temperature"], name), []).append((a, b))
    rows = []
    for (drafter, temperature, name), group in groups.items():
        known = [(c, d) for a, b in group if (c := _counts(a)).rounds_N.size and (d := _counts(b)).rounds_N.size]
        if not known:
            continue
        one, other = [c for c, _ in known], [d for _, d in known]
        paired = all(a["digest"] == b["digest"] for a, b in group) and all(
            c.rounds_N.size == d.rounds_N.size for c, d in known
        )
        draws = measure.accepted_length_draws(other) - measure.accepted_length_draws(
            one, seed=0 if paired else _UNPAIRED
        )
        was, is_ = mean_length(one) or 0.0, mean_length(other) or 0.0
        several = max(min(c.rounds_N.size, d.rounds_N.size) for c, d in known) > 1
        rows.append({
            "drafter": drafter, "temperature": temperature, "where": name, "old": was, "new": is_,
            "difference": is_ - was, "interval": measure.interval(draws) if several else None, "paired": paired,
        })  # fmt: skip
    return rows


def _counts(row: Row) -> PromptCounts:
    emitted_N, rounds_N = np.array(row["emitted_by_prompt"]), np.array(row["rounds_by_prompt"])
    return PromptCounts(emitted_N[rounds_N > 0], rounds_N[rounds_N > 0])


def _speeds(old: Mapping[str, Any], new: Mapping[str, Any], names: Mapping[str, str]) -> list[Row]:
    """Full rounds a second and tokens a second under load."""
    rows = []
    for what, of in (("full rounds/s", _rounds), ("tokens/s under load", _loads)):
        before = {(names[a], b, c): values for (a, b, c), values in of(old).items() if a in names}
        for key, values in of(new).items():
            if key in before:
                rows.append({"drafter": key[0], "what": what, "where": ", ".join(key[1:])} | ratio(before[key], values))
    return rows


def _rounds(result: Mapping[str, Any]) -> dict[tuple[str, str, str], list[float]]:
    return {
        (r["drafter"], f"{r['requests']} requests", f"block {r['block']}" if r["block"] else "plain"):
            [1 / s for s in r["seconds"]]
        for r in result["latency"]
    }  # fmt: skip


def _loads(result: Mapping[str, Any]) -> dict[tuple[str, str, str], list[float]]:
    values: dict[tuple[str, str, str], list[float]] = {}
    for r in result["load"]:
        values.setdefault((r["drafter"], f"{r['users']} users", r["policy"]), []).append(r["tokens_per_second"])
    return values


def ratio(old: Sequence[float], new: Sequence[float]) -> Row:
    """Median over median with its bootstrap interval over repeats; None for fewer than three of either."""
    was, is_ = float(np.median(old)), float(np.median(new))
    row: Row = {"old": was, "new": is_, "ratio": is_ / was, "interval": None}
    if min(len(old), len(new)) >= 3:
        rng = np.random.default_rng(0)
        before, after = (np.array(x)[rng.integers(0, len(x), (1000, len(x)))] for x in (old, new))
        row["interval"] = measure.interval(np.median(after, axis=1) / np.median(before, axis=1))
    return row
