"""Finished cells of an evaluation on disk: a killed run goes on where it was, a changed setting is another cell."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve import report

FORMAT = 1  # raised when what a cell holds changes, so that old files are not read


@dataclasses.dataclass(frozen=True, eq=False)
class Cell:
    """One measurement. `settings` is everything that its numbers depend on, ready for JSON, and makes its key;
    `drafter` and `set` are names for people. `needs` are cells that must be finished before."""

    kind: str
    drafter: str
    set: str
    settings: Mapping[str, Any]
    needs: tuple["Cell", ...] = ()

    @property
    def key(self) -> str:
        text = json.dumps([FORMAT, self.kind, self.settings], sort_keys=True)
        return f"{self.kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


class Store:
    """The folder of finished cells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, cell: Cell) -> Path:
        return self.folder / f"{cell.key}.json"

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """What the cell measured; None if it never finished."""
        try:
            return json.loads(self.path(cell).read_text(encoding="utf-8"))["result"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, cell: Cell, result: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the cell whole or not at all, and returns what `get` will. Raises ConfigError on a full disk."""
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"kind": cell.kind, "drafter": cell.drafter, "set": cell.set, "settings": dict(cell.settings)}
        clean = finite(result)
        report.write_json(self.path(cell), content | {"result": clean})
        return json.loads(json.dumps(clean))


def finite(value: Any) -> Any:
    """Numbers that JSON has no word for (NaN, infinity) as None, in nested dicts and lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
