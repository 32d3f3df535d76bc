"""From paths to a compiled engine: what the commands of `serve` share."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it advises about torch, which nothing here uses

import jax
from jax.sharding import Mesh

from dspark_jax import ConfigError, Drafter, Target, load_drafter, load_target
from dspark_jax.config import MeshSettings
from dspark_jax.sharding import make_mesh
from dspark_jax.weights import hub, selftest
from dspark_jax.weights.cli import drafter_folder
from dspark_jax.weights.language_model import is_language_model
from dspark_jax.weights.locate import EMBEDDED
from serve.calibration import read_temperatures
from serve.dtype import Dtype, fast_dtype
from serve.engine import Engine, EngineConfig

SHIPPED_DRAFTER = Path(__file__).resolve().parents[1] / "assets" / "smollm2-135m-dspark"


def find_drafter(target: str, drafter: Path | None) -> Path:
    """Where the drafter lies: its folder, that of a training run, what a Hub id was fetched to, or a language model in
    any form that is read as a target. Raises ConfigError where there is none for this target."""
    if drafter is None and target != EMBEDDED:
        raise ConfigError(f"--target {target}: give its --drafter too, the shipped one is for {EMBEDDED}")
    path = drafter or SHIPPED_DRAFTER
    if hub.is_hub_id(path):
        return hub.fetch(path)
    path = Path(drafter_folder(str(path)))
    if not path.is_dir() and not is_language_model(path):
        raise ConfigError(f"drafter {path}: no such directory; train one (README) or give another with --drafter")
    return path


def load_models(
    target: str, drafter: Path | None, dtype: Dtype = "fast", tensor: int = 1
) -> tuple[Target, Drafter, Path]:
    """Target and drafter, and where the drafter lies."""
    loaded, ((draft, path),) = load_several(target, [drafter], dtype, tensor)
    return loaded, draft, path


def load_several(
    target: str, drafters: Sequence[Path | None], dtype: Dtype = "fast", tensor: int = 1
) -> tuple[Target, list[tuple[Drafter, Path]]]:
    """A target with several drafters, each with its folder; None is the shipped one. They compute in `dtype`, "fast"
    being the one that is faster on this machine; the target lies split over `tensor` devices, where engines follow it.

    A drafter that the user brings is first tried on a few lines of the target's own text: one that is served otherwise
    than it was trained drafts badly without any error, and gets a loud DrafterWarning here.
    """
    paths = [find_drafter(target, drafter) for drafter in drafters]
    loaded = load_target(target, fast_dtype() if dtype == "fast" else dtype, serving_mesh(tensor))
    asked = bool(selftest.questions(loaded))
    tested = [asked and drafter is not None for drafter in drafters]
    served = str(loaded.dtype)
    made = [load_drafter(path, loaded, served, self_test=test) for path, test in zip(paths, tested, strict=True)]
    return loaded, list(zip(made, paths, strict=True))


def serving_mesh(tensor: int) -> Mesh | None:
    """The first so many devices; None for one. Raises ConfigError where there are fewer."""
    devices = jax.devices()
    if not 1 <= tensor <= len(devices):
        raise ConfigError(f"--tensor {tensor}: expected 1 to {len(devices)}, the devices that are here")
    return None if tensor == 1 else make_mesh(MeshSettings(data=1, fsdp=1, tensor=tensor), devices[:tensor])


def load_engine(target: str, drafter: Path | None, dtype: Dtype = "fast", tensor: int = 1, **sizes: Any) -> Engine:
    """An engine over both, not yet compiled, with the confidence temperatures stored beside the drafter."""
    loaded, draft, path = load_models(target, drafter, dtype, tensor)
    temperatures = read_temperatures(path, draft.config.num_drafts)
    return Engine(loaded, draft, EngineConfig(**sizes), temperatures)


def cache_programs() -> None:
    """Keeps compiled programs on disk between runs, unless the user already chose a place."""
    if not jax.config.values["jax_compilation_cache_dir"]:
        root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dspark-jax" / "programs"
        jax.config.update("jax_compilation_cache_dir", str(root))
