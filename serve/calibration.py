"""The confidence temperatures stored beside a drafter. No model, no clock."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax import ConfigError

FILE = "calibration.json"


def read_temperatures(drafter: Path, num_drafts: int) -> np.ndarray:
    """One temperature a position; ones where the drafter was never calibrated. Raises ConfigError on a bad file."""
    path = drafter / FILE
    if not path.exists():
        return np.ones(num_drafts, np.float32)
    try:
        temperatures = np.asarray(json.loads(path.read_text())["temperatures"], np.float32)
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a calibration ({error}); delete it or run serve.calibrate again") from None
    if temperatures.shape != (num_drafts,) or not np.all(temperatures > 0):
        raise ConfigError(
            f"{path}: {temperatures.tolist()} are not {num_drafts} positive temperatures; run serve.calibrate again"
        )
    return temperatures


def write_temperatures(drafter: Path, temperatures: np.ndarray, report: dict[str, Any]) -> Path:
    """Writes the file that `read_temperatures` reads, atomically, with what was measured."""
    path = drafter / FILE
    part = path.with_name(f".{FILE}.{os.getpid()}.tmp")  # two calibrations at a time share nothing
    part.write_text(json.dumps({"temperatures": [float(t) for t in temperatures]} | report, indent=1) + "\n")
    part.replace(path)
    return path
