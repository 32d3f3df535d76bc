"""The pictures of benchmarks/drafters.py."""

import itertools
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.drafters_report import Result, conditional, counts, headings, length, names, runs, temperatures

# A share of fewer blocks than this says nothing.
_FEWEST = 10


def draw(result: Result, folder: Path) -> list[Path]:
    """conditional-acceptance.png and length-against-time.png."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "conditional-acceptance.png", folder / "length-against-time.png"
    _conditional(result, paths[0])
    _against_time(result, paths[1])
    return list(paths)


def _style(name: str, number: int) -> dict[str, Any]:
    """Colours that stay apart for a dozen lines; what has no sequential head is dashed."""
    colours = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
    line = "-" if name.startswith("dspark") else "--" if name.startswith("dflash") else ":"
    return {"color": colours[(2 * number) % 20 + (number >= 10)], "linestyle": line}


def _grid(axis: Axes, title: str) -> None:
    axis.set_title(title, fontsize=10)
    axis.grid(alpha=0.3)


def _conditional(result: Result, path: Path) -> None:
    """A row of panels a temperature, a panel a set of prompts, a line a drafter, as far as enough blocks got."""
    heat, panels = temperatures(result), [s["name"] for s in result["sets"]]
    figure = Figure(figsize=(3.4 * len(panels) + 2.0, 3.2 * len(heat)), layout="constrained")
    axes = figure.subplots(len(heat), len(panels), sharex=True, sharey=True, squeeze=False)
    for (row, t), (column, prompts) in itertools.product(enumerate(heat), enumerate(panels)):
        axis = axes[row][column]
        _grid(axis, f"{headings(result)[column]}, temperature {t:g}")
        for number, name in enumerate(names(result)):
            y = np.array([np.nan if share is None else share for share in conditional(result, name, prompts, t)])
            blocks = np.sum(counts(result, name, t)[column].rounds_N) * np.cumprod([1.0, *y[:-1]])
            y = np.where(blocks >= _FEWEST, y, np.nan)
            axis.set_xticks(range(1, len(y) + 1))
            axis.plot(np.arange(1, len(y) + 1), y, marker="o", markersize=3, label=name, **_style(name, number))
        if row == len(heat) - 1:
            axis.set_xlabel("position")
        if column == 0:
            axis.set_ylabel("accepted, given all before")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=120)


def _against_time(result: Result, path: Path) -> None:
    """A panel a temperature: mean accepted length of the sets against milliseconds of a draft, one request."""
    heat = temperatures(result)
    figure = Figure(figsize=(5.2 * len(heat), 4.2), layout="constrained")
    axes = figure.subplots(1, len(heat), sharex=True, sharey=True, squeeze=False)[0]
    for axis, t in zip(axes, heat, strict=True):
        _grid(axis, f"temperature {t:g}")
        for number, name in enumerate(names(result)):
            x = 1000 * float(np.mean([run["draft_seconds"]["1"] for run in runs(result, name)]))
            y = length(counts(result, name, t))
            if y is not None:
                axis.plot([x], [y], marker="o", **_style(name, number))
                axis.annotate(name, (x, y), xytext=(4, 4), textcoords="offset points", fontsize=7)
        axis.set_xlabel("ms to draft a block, one request")
    axes[0].set_ylabel("tokens a round, mean of sets")
    figure.savefig(path, dpi=120)
