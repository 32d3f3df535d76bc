"""The pictures of an evaluation: results.json in, PNG files out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from serve import calibrate, curves, law, load_plots, profile
from serve.suite_numbers import ALL
from serve.suite_tables import latencies

Result = Mapping[str, Any]
Row = Mapping[str, Any]


class Picture(NamedTuple):
    """A file and what it shows. `question` 1 to 7."""

    question: int
    title: str
    path: Path


def draw(result: Result, folder: Path) -> list[Picture]:
    """Every picture that the results allow."""
    folder.mkdir(parents=True, exist_ok=True)
    pictures = []
    for t in _temperatures(result["accepted"]):
        path = folder / f"1-accepted-length-t{t:g}.png"
        _accepted([row for row in result["accepted"] if row["temperature"] == t], path)
        pictures.append(Picture(1, f"Accepted length by set, temperature {t:g}", path))
    for name in _names(result["acceptance"]):
        for t in _temperatures(mine := _of(result["acceptance"], name)):
            path = folder / f"2-acceptance-{_file(name)}-t{t:g}.png"
            _acceptance([row for row in mine if row["temperature"] == t], path)
            pictures.append(Picture(2, f"{name}: acceptance by position, temperature {t:g}", path))
    if result["blocks"]:
        _blocks(result, folder / "3-blocks.png")
        title = "Accepted length and full round by block size; a line a drafter, with its layers"
        pictures.append(Picture(3, title, folder / "3-blocks.png"))
    for name in _names(result["sweep"]):
        for t in _temperatures(mine := _of(result["sweep"], name)):
            path = folder / f"4-threshold-{_file(name)}-t{t:g}.png"
            _threshold([row for row in mine if row["temperature"] == t], path)
            pictures.append(Picture(4, f"{name}: static threshold, temperature {t:g}", path))
    for row in (c for c in result["calibration"] if not c["why_not"]):
        path = folder / f"5-reliability-{_file(row['drafter'])}-{row['domain']}-t{row['temperature']:g}.png"
        calibrate.plot(row["diagrams"], path)
        title = f"{row['drafter']}: survival of the first drafts, {row['domain']}, temperature {row['temperature']:g}"
        pictures.append(Picture(5, title, path))
    for name in _names(result["load"]):
        pictures += _load(name, result, folder)
    if result["law"]:
        _law(result["law"], folder / "7-law.png")
        pictures.append(Picture(7, "Places of sampled tokens in the target's law", folder / "7-law.png"))
    return pictures


def _file(name: str) -> str:
    return name.replace("/", "-")


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["drafter"] for row in rows))


def _of(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row["drafter"] == name]


def _temperatures(rows: Sequence[Row]) -> list[float]:
    return list(dict.fromkeys(row["temperature"] for row in rows))


def _panels(names: Sequence[str], y: str) -> tuple[Figure, list[Axes]]:
    """Plots side by side that share their y axis."""
    figure = Figure(figsize=(3.4 * len(names) + 0.6, 3.4), layout="constrained")
    axes = list(figure.subplots(1, len(names), sharey=True, squeeze=False)[0])
    for axis, name in zip(axes, names, strict=True):
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(y)
    return figure, axes


def _accepted(rows: Sequence[Row], path: Path) -> None:
    names, sets = _names(rows), list(dict.fromkeys(row["set"] for row in rows))
    figure = Figure(figsize=(max(6.0, 0.5 * len(sets) * len(names) + 2.0), 3.8), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        known = [row for row in _of(rows, name) if row["accepted_length"] is not None]
        x = [sets.index(row["set"]) + (number - (len(names) - 1) / 2) * width for row in known]
        axes.bar(x, [row["accepted_length"] for row in known], width * 0.9, label=name)
        for place, row in ((place, row) for place, row in zip(x, known, strict=True) if row["interval"]):
            axes.plot([place, place], row["interval"], color="0.2", linewidth=1.2)
    axes.set_xticks(range(len(sets)), sets, rotation=20 if len(sets) > 4 else 0)
    axes.set_ylabel("tokens a round")
    axes.axhline(1, color="0.4", linewidth=1)
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _acceptance(rows: Sequence[Row], path: Path) -> None:
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    figure, axes = _panels(domains, "share accepted")
    for axis, domain in zip(axes, domains, strict=True):
        for row in (row for row in rows if row["domain"] == domain):
            color, name = ("C0", "head") if row["head"] else ("C1", "no head")
            for key, line, what in (("by_position", "-", "all before stand too"), ("conditional", ":", "given those")):
                y = [np.nan if share is None else share for share in row[key]]
                axis.plot(np.arange(1, len(y) + 1), y, line, color=color, marker="o", markersize=4,
                          label=f"{name}, {what}")  # fmt: skip
        axis.set_xlabel("position")
        axis.set_ylim(0, 1)
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def _blocks(result: Result, path: Path) -> None:
    layers = {d["name"]: d["layers"] for d in result["drafters"]}
    rows = [row for row in result["blocks"] if row["domain"] == ALL and row["accepted_length"] is not None]
    seconds = latencies(result)
    figure = Figure(figsize=(9.5, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    styles = dict(zip(sorted({r for _, r, _ in seconds}), ("-", "--", ":", "-."), strict=False))
    names = list(dict.fromkeys([*_names(rows), *(name for name, _, _ in seconds)]))
    for number, name in enumerate(names):
        look = {"color": f"C{number}", "marker": "o", "markersize": 4}
        for t in _temperatures(mine := _of(rows, name)):
            line = sorted((row["block"], row["accepted_length"]) for row in mine if row["temperature"] == t)
            left.plot(*zip(*line, strict=True), "--" if t else "-", **look)
        for requests, style in styles.items():
            line = sorted((b, s) for (d, r, b), s in seconds.items() if (d, r) == (name, requests) and b)
            plain = seconds.get((name, requests, 0))
            if line and plain:
                right.plot(*zip(*((b, s / plain) for b, s in line), strict=True), style, **look)
    left.set_ylabel("tokens a round, mean of sets")
    left.set_title("temperature 0 drawn through, others broken", fontsize=8)
    right.set_ylabel("full round over plain round")
    right.set_title("requests at a time: " + ", ".join(f"{r} ({s})" for r, s in styles.items()), fontsize=8)
    for axis in (left, right):
        axis.set_xlabel("drafts a block")
        axis.grid(alpha=0.3)
    handles = [
        Line2D(
            [],
            [],
            color=f"C{number}",
            marker="o",
            markersize=4,
            label=f"{name}, {layers[name]} layer{'s' * (layers[name] > 1)}",
        )
        for number, name in enumerate(names)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=7)
    figure.savefig(path, dpi=120)


def _threshold(rows: Sequence[Row], path: Path) -> None:
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    figure, axes = _panels(domains, "drafts a round")
    for axis, domain in zip(axes, domains, strict=True):
        mine = [row for row in rows if row["domain"] == domain and row["accepted"] is not None]
        x = [row["threshold"] for row in mine]
        accepted = np.array([row["accepted"] for row in mine])
        rejected = np.array([row["rejected"] for row in mine])
        axis.bar(x, accepted, 0.08, label="accepted")
        axis.bar(x, rejected, 0.08, bottom=accepted, color="0.8", label="rejected")
        share = axis.twinx()
        rate = [np.nan if row["acceptance_rate"] is None else row["acceptance_rate"] for row in mine]
        share.plot(x, rate, color="C3", marker="o", markersize=4, label="acceptance rate")
        share.set_ylim(0, 1)
        axis.set_xlabel("threshold")
        if axis is axes[-1]:
            share.set_ylabel("acceptance rate")
        else:
            share.set_yticklabels([])
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=120)


def _load(name: str, result: Result, folder: Path) -> list[Picture]:
    """The pictures of `serve.bench --load`, each drafter's in a folder of its own."""
    mine = folder / f"6-load-{_file(name)}"
    mine.mkdir(exist_ok=True)
    load_plots.draw(_of(result["load"], name), mine)
    profile.plot(curves.from_json(_of(result["curves"], name)), mine / "step-times.png")
    titles = {
        "pareto.png": "throughput against speed for each user",
        "lengths.png": "verified and accepted drafts against load",
        "domains.png": "the same by domain, scheduled",
        "step-times.png": "what a verified token costs here",
    }
    return [Picture(6, f"{name}: {text}", mine / file) for file, text in titles.items() if (mine / file).is_file()]


def _law(rows: Sequence[Row], path: Path) -> None:
    figure, axes = load_plots.picture("Where sampled tokens fall in the target's law", "place", "share of tokens")
    edges = np.linspace(0, 1, law.BINS + 1)
    for row in rows:
        axes.stairs(
            np.array(row["histogram"]) / max(row["tokens"], 1), edges, label=f"{row['drafter']}, {row['policy']}"
        )
    axes.axhline(1 / law.BINS, color="0.4", linewidth=1)
    axes.set_ylim(0, None)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
