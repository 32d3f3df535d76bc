"""Which folder the commands of `serve` take for --drafter."""

from pathlib import Path

import pytest

from dspark_jax import ConfigError
from dspark_jax.weights.locate import EMBEDDED
from serve.setup import SHIPPED_DRAFTER, find_drafter


def test_a_drafter_is_found_by_its_folder_or_by_its_run(tmp_path: Path) -> None:
    """The best of a training run before its newest; the one shipped where none is named."""
    for name in ("drafter", "drafter_best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        assert find_drafter("target", tmp_path) == tmp_path / name
        assert find_drafter("target", tmp_path / name) == tmp_path / name
    assert find_drafter(EMBEDDED, None) == SHIPPED_DRAFTER


def test_no_drafter_is_an_error_that_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give its --drafter too"):
        find_drafter("target", None)
    with pytest.raises(ConfigError, match="no such directory"):
        find_drafter("target", tmp_path / "nowhere")
