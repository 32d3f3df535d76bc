"""Profiles: kept for the engine and the machine that they were measured on, over contexts of the promised length."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import good_drafter, make_target

from dspark_jax import SamplingParams
from serve import profile, report
from serve.curves import Curves
from serve.engine import Engine, EngineConfig

TARGET = make_target(mixing=0.15)
DRAFTER = good_drafter(TARGET)
CONFIG = EngineConfig(max_requests=2, request_sizes=(2,), max_context=64, page_size=16, prefill_lengths=(8, 12))


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Engine]:
    """Which engines were measured, in place of measuring them; curves are kept in a folder of the test's own."""
    engines: list[Engine] = []

    def measure(engine: Engine, on_point: Any) -> Curves:
        engines.append(engine)
        return Curves({(2, 0, False): 0.1 * len(engines), (2, 4, False): 1 / 3})

    monkeypatch.setattr(profile, "measure", measure)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return engines


def test_curves_are_kept_for_the_next_start(measured: list[Engine]):
    first = profile.curves_for(Engine(TARGET, DRAFTER, CONFIG))
    assert profile.curves_for(Engine(TARGET, DRAFTER, CONFIG)) == first and len(measured) == 1
    forced = profile.curves_for(Engine(TARGET, DRAFTER, CONFIG), force=True)
    assert forced != first and len(measured) == 2
    assert profile.curves_for(Engine(TARGET, DRAFTER, CONFIG)) == forced


def test_curves_are_of_one_machine_version_mesh_and_engine(measured: list[Engine], monkeypatch: pytest.MonkeyPatch):
    profile.curves_for(Engine(TARGET, DRAFTER, CONFIG))
    others = [
        Engine(TARGET, None, CONFIG),
        Engine(TARGET, DRAFTER, dataclasses.replace(CONFIG, max_context=32)),
        Engine(dataclasses.replace(TARGET, config=dataclasses.replace(TARGET.config, rope_theta=1e5)), DRAFTER, CONFIG),
    ]
    split = Engine(TARGET, DRAFTER, CONFIG)
    split.mesh = SimpleNamespace(shape={"fsdp": 1, "tensor": 2})  # type: ignore[assignment]  (all that is asked of it)
    for number, engine in enumerate([*others, split], start=2):
        profile.curves_for(engine)
        assert len(measured) == number
    machine = report.machine()
    for change in (
        lambda: monkeypatch.setattr(report, "version", lambda package: "next"),
        lambda: monkeypatch.setattr(report, "machine", lambda: machine | {"cpu": "another"}),
    ):
        change()
        before = len(measured)
        profile.curves_for(Engine(TARGET, DRAFTER, CONFIG))
        assert len(measured) == before + 1


@pytest.mark.parametrize("num_pages", [0, 5])
def test_rounds_are_timed_on_contexts_of_half_the_longest(num_pages: int):
    """Over several chunks of a prompt, and with fewer pages than all requests could need."""
    engine = Engine(TARGET, DRAFTER, dataclasses.replace(CONFIG, num_pages=num_pages))
    engine.compile([("prefill", 8), ("prefill", 12)])
    profile.fill(engine, SamplingParams(0.0))
    assert engine.state.slots.length_N.tolist() == [32, 32]
    for row in engine.state.slots.page_table_NP.tolist():
        assert len(set(row)) == len(row) and max(row) < engine.config.pages
