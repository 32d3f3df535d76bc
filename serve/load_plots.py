"""Pictures of `serve.bench --load`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Row = Mapping[str, Any]


def average(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Repeats of a load and policy as one row, in order of first appearance: means of times, rates and shares; counts
    are the first repeat's. Tokens a second are those of all repeats over their seconds."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["users"], row["rate"], row["domain"], row["policy"]), []).append(row)
    means = []
    for group in groups.values():
        mean = dict(group[0])
        for name, value in group[0].items():
            numbers = [row[name] for row in group if row[name] is not None]
            if isinstance(value, float) and numbers:
                mean[name] = float(np.mean(numbers))
        mean["tokens_per_second"] = sum(row["tokens"] for row in group) / sum(row["seconds"] for row in group)
        mean["by_domain"] = {
            domain: {key: float(np.mean([row["by_domain"][domain][key] for row in group])) for key in drafts}
            for domain, drafts in group[0]["by_domain"].items()
        }
        means.append(mean)
    return means


def draw(rows: Sequence[Row], folder: Path) -> None:
    """pareto.png, lengths.png and, where domains were mixed, domains.png."""
    means = [row for row in average(rows) if not row["rate"]]
    if not means:
        return
    domain = means[0]["domain"]
    mine = [row for row in means if row["domain"] == domain]
    _pareto(mine, folder / "pareto.png")
    _lengths(mine, folder / "lengths.png")
    if any(len(row["by_domain"]) > 1 for row in mine):
        _domains([row for row in mine if row["policy"] == "scheduled"], folder / "domains.png")


def _lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["users"]):
        lines.setdefault(row["policy"], []).append(row)
    return lines


def _pareto(rows: Sequence[Row], path: Path) -> None:
    title = "Throughput against speed for each user; numbers are users"
    figure, axes = picture(title, "tokens a second a user (median)", "tokens a second, all users")
    for policy, line in _lines(rows).items():
        x = [row["tokens_per_second_per_user_p50"] for row in line]
        y = [row["tokens_per_second"] for row in line]
        axes.plot(x, y, marker="o", label=policy, linewidth=2.6 if policy == "scheduled" else 1.4)
    for row in _lines(rows).get("scheduled", []):
        place = (row["tokens_per_second_per_user_p50"], row["tokens_per_second"])
        axes.annotate(str(row["users"]), place, xytext=(4, 4), textcoords="offset points", fontsize=8)
    axes.legend()
    figure.savefig(path, dpi=120)


def _lengths(rows: Sequence[Row], path: Path) -> None:
    lines = {
        policy: (
            [row["users"] for row in line],
            [row["verified_per_request_round"] for row in line],
            [row["accepted_per_request_round"] for row in line],
        )
        for policy, line in _lines(rows).items()
        if policy != "off"
    }
    _drafts("Verified (solid) and accepted (dotted) drafts against load", lines, path)


def _domains(rows: Sequence[Row], path: Path) -> None:
    users = [row["users"] for row in rows]

    def of(name: str, key: str) -> list[float]:
        return [row["by_domain"].get(name, {}).get(key, np.nan) for row in rows]

    names = sorted({name for row in rows for name in row["by_domain"]})
    lines = {name: (users, of(name, "verified"), of(name, "accepted")) for name in names}
    _drafts("scheduled: verified (solid) and accepted (dotted) by domain", lines, path)


def _drafts(title: str, lines: Mapping[str, tuple[list[int], list[float], list[float]]], path: Path) -> None:
    """Users, verified and accepted drafts of each line."""
    figure, axes = picture(title, "users", "drafts a request and round")
    for name, (users, verified, accepted) in lines.items():
        (drawn,) = axes.plot(users, verified, marker="o", label=name)
        axes.plot(users, accepted, marker="x", linestyle=":", color=drawn.get_color())
    axes.set_xscale("log", base=2)
    axes.legend()
    figure.savefig(path, dpi=120)


def picture(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    """An empty plot with its words."""
    figure = Figure(figsize=(6.5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return figure, axes
