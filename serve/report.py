"""What a benchmark shows: one table of results, one of where the time goes, and a JSON file with every number."""

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from dspark_jax.config import ConfigError

Row = Mapping[str, Any]


def requests_text(requests: int) -> str:
    return "one request" if requests == 1 else f"{requests} requests"


def console() -> Console:
    """A terminal as wide as it is; files and pipes get room for a table row."""
    return Console(width=None if sys.stdout.isatty() else 120)


def progress() -> Progress:
    """A bar that vanishes when the tables come."""
    columns = (SpinnerColumn(), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("{task.description}"), console=console(), transient=True)


# What a CPU multiplies matrices with, best first, as Linux calls it: one model name may stand for several of them.
_VECTORS = ("amx_tile", "avx512_bf16", "avx512f", "avx2", "sve", "asimd")


def machine() -> dict[str, Any]:
    """What a speed needs to be compared with another."""
    names, flags = [], set()
    if Path("/proc/cpuinfo").is_file():
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n"):
            name, _, value = (part.strip() for part in line.partition(":"))
            names += [value] if name == "model name" else []
            flags |= set(value.split()) if name in ("flags", "Features") else set()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = jax.devices()
    return {
        "cpu": names[0] if names else platform.processor(),
        "vectors": next((vector for vector in _VECTORS if vector in flags), None),
        "cores": cores,
        "system": platform.platform(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "platform": devices[0].platform,
        "devices": [device.device_kind for device in devices],
    }


def version(package: str) -> str | None:
    """Of an installed package; None for one that is not, such as this one run from its source alone."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Means over domains for each number of requests, temperature and drafting policy; exact_match is over prompts."""
    groups: dict[tuple[int, float, str], list[Row]] = {}
    for row in rows:
        if row["policy"] != "off":
            groups.setdefault((row["requests"], row["temperature"], row["policy"]), []).append(row)
    return [
        {
            "requests": requests,
            "temperature": temperature,
            "policy": policy,
            "prompts": sum(row["prompts"] for row in group),
            "speedup": _mean([row["speedup"] for row in group]),
            "accepted_length": _mean([row["accepted_length"] for row in group]),
            "exact_match": None
            if group[0]["exact_match"] is None
            else sum(row["exact_match"] * row["prompts"] for row in group) / sum(row["prompts"] for row in group),
        }
        for (requests, temperature, policy), group in groups.items()
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def show(result: Mapping[str, Any], num_drafts: int) -> None:
    """Prints the tables and what they do not hold."""
    out = console()
    out.print(_main_table(result["rows"], result["summary"]))
    out.print(_time_table(result["curves"], num_drafts))
    greedy = sum(row["prompts"] for row in result["rows"] if row["policy"] != "off" and row["temperature"] == 0)
    text = f"All {greedy} greedy texts are those of plain decoding."
    if margins := [difference["margin"] for difference in result["differences"]]:
        text = f"{len(margins)} of {greedy} greedy texts differ from plain ones: logit margin up to {max(margins):.2g}."
    seconds = (
        f"{result['total_seconds']:.0f} s in {result['dtype']}, of which {result['compile_seconds']:.0f} s compiling."
    )
    out.print(f"{text} {seconds}", highlight=False)


def _main_table(rows: Sequence[Row], summary: Sequence[Row]) -> Table:
    table = Table(title="Drafted against plain decoding (tokens a second after prefill)")
    for name in ("requests", "T", "domain", "policy"):
        table.add_column(name)
    for name in ("plain", "drafted", "gain", "accepted length", "accepted by position, %", "exact"):
        table.add_column(name, justify="right")
    for mean in summary:
        place = mean["requests"], mean["temperature"]
        mine = [row for row in rows if (row["requests"], row["temperature"]) == place]
        plain = {row["domain"]: row for row in mine if row["policy"] == "off"}
        for row in (row for row in mine if row["policy"] == mean["policy"]):
            table.add_row(
                str(row["requests"]),
                f"{row['temperature']:g}",
                row["domain"],
                row["policy"],
                number_text(plain[row["domain"]]["tokens_per_second"], ".1f"),
                number_text(row["tokens_per_second"], ".1f"),
                number_text(row["speedup"], ".2f", "x"),
                number_text(row["accepted_length"], ".2f") + interval_text(row["accepted_length_interval"]),
                " ".join(number_text(share, ".0%").rstrip("%") for share in row["acceptance_by_position"]),
                number_text(row["exact_match"], ".0%"),
            )
        table.add_row(
            "", "", "mean", mean["policy"], "", "",
            number_text(mean["speedup"], ".2f", "x"),
            number_text(mean["accepted_length"], ".2f"), "",
            number_text(mean["exact_match"], ".0%"),
            style="bold", end_section=True,
        )  # fmt: skip
    return table


def _time_table(curves: Sequence[Row], num_drafts: int) -> Table:
    table = Table(title=f"A round in milliseconds by verified tokens (greedy; block of {num_drafts} drafts)")
    greedy = [point for point in curves if not point["sampled"]]
    table.add_column("requests", justify="right")
    table.add_column("plain", justify="right")
    table.add_column("drafting, packed tokens: milliseconds")
    for requests in sorted({point["requests"] for point in greedy}):
        mine = [point for point in greedy if point["requests"] == requests]
        plain = next(point["seconds"] for point in mine if not point["drafts"])
        drafting = [f"{p['tokens']}: {1000 * p['seconds']:.0f}" for p in mine if p["drafts"]]
        table.add_row(str(requests), f"{1000 * plain:.0f}", "   ".join(drafting))
    return table


def number_text(value: float | None, form: str, unit: str = "") -> str:
    """A number as tables show it; a dash for none."""
    return "-" if value is None else f"{value:{form}}{unit}"


def interval_text(interval: Sequence[float] | None) -> str:
    """An interval to stand behind its number."""
    return "" if interval is None else f" ({interval[0]:.2f}-{interval[1]:.2f})"


def check_writable(path: Path, option: str = "--json") -> None:
    """Refuses a file that could not be written when the run is over."""
    if path.is_dir() or not path.resolve().parent.is_dir():
        raise ConfigError(f"{option} {path}: expected a file in a directory that exists")
    if not os.access(path.resolve().parent, os.W_OK):
        raise ConfigError(f"{option} {path}: its directory cannot be written to")


def make_folder(path: Path, option: str) -> None:
    """Makes a folder for what a run writes at its end. Raises ConfigError where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be made ({error.strerror})") from None
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written to")


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Writes the whole file or nothing. Raises ConfigError where the disk refuses."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error
    finally:
        scratch.unlink(missing_ok=True)
