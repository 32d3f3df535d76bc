"""Policies, curves and the drift monitor: host code, by hand-made numbers."""

from pathlib import Path

import numpy as np
import pytest

from dspark_jax import ConfigError
from serve import curves as curves_lib
from serve.calibration import read_temperatures, write_temperatures
from serve.curves import Curves, make_curves
from serve.monitor import LEAST, DriftMonitor
from serve.policy import FIRST_PROBE, LONGEST_WAIT, PROBE_EVERY, Policy, parse

G = 4
BUCKETS = {1: (2, 4, 5), 4: (8, 16, 20)}


def linear(per_token: float, fixed: float = 1.0) -> Curves:
    points = {(r, t): fixed + per_token * (t or r) for r in BUCKETS for t in (0, *BUCKETS[r])}
    return Curves({(r, t, s): seconds for (r, t), seconds in points.items() for s in (False, True)})


def policy(text: str) -> Policy:
    return Policy(parse(text, G), G, BUCKETS)


@pytest.mark.parametrize("text", ["", "on", "fixed", "fixed:0", "fixed:5", "fixed:x", "threshold:0", "threshold:2",
                                  "threshold:x", "scheduled:later"])  # fmt: skip
def test_unknown_policies_are_refused(text: str):
    with pytest.raises(ConfigError, match="policy"):
        parse(text, G)


@pytest.mark.parametrize("text", ["scheduled", "scheduled:sync", "threshold:0.5", "fixed:1"])
def test_without_a_drafter_nothing_drafts(text: str):
    assert parse("off", 0).kind == "off"
    with pytest.raises(ConfigError, match=f"'{text}': there is no drafter"):
        parse(text, 0)


def test_fixed_takes_the_bucket_that_holds_it():
    choice = policy("fixed:2").choose([7, 8, 9, 10], 4, None, False)
    assert (choice.tokens, choice.longest, choice.by_survival) == (16, 2, False)


def test_threshold_follows_the_lengths_it_has_seen():
    p = policy("threshold:0.6")
    assert p.choose([1, 2, 3, 4], 4, None, False).tokens == 20
    for _ in range(200):
        p.observe(1, np.full(G, 0.1), 0, 0)
    assert p.choose([1, 2, 3, 4], 4, None, False).tokens == 8


def play_threshold(p: Policy, texts: list[int], bucket: int, certain: int, rounds: int) -> int:
    """Rounds in which so many drafts of each block are certain, cut by position to the room there is; the last T."""
    survival_G = np.cumprod([0.9] * certain + [0.1] * (G - certain))
    tokens = 0
    for _ in range(rounds):
        tokens = p.choose(texts, bucket, None, False).tokens
        length = min(certain, tokens // len(texts) - 1)
        for text in texts:
            p.observe(text, survival_G, length, length)
    return tokens


@pytest.mark.parametrize(("texts", "bucket"), [([0], 1), ([0, 1, 2, 3], 4)])
def test_threshold_shrinks_its_rounds_and_grows_them_again(texts: list[int], bucket: int):
    """At a fixed number of requests: what a small round had no room for must count, or rounds could only shrink."""
    p = policy("threshold:0.5")
    assert play_threshold(p, texts, bucket, certain=0, rounds=200) == BUCKETS[bucket][0]
    assert play_threshold(p, texts, bucket, certain=G, rounds=200) == BUCKETS[bucket][-1]
    assert play_threshold(p, texts, bucket, certain=0, rounds=200) == BUCKETS[bucket][0]


def test_a_confidence_at_the_threshold_passes_and_nothing_behind_a_low_one_counts():
    p = policy("threshold:0.9")
    survival_G = np.cumprod(np.full(G, 0.9, np.float32))
    for _ in range(200):
        p.observe(0, survival_G, 0, 0)
    assert p.choose([0], 1, None, False).tokens == 5
    for _ in range(200):
        p.observe(0, np.cumprod([0.5, 1.0, 1.0, 1.0]), 0, 0)
    assert p.choose([0], 1, None, False).tokens == 2
    for survival_G in (np.zeros(G), np.full(G, np.nan)):
        p.observe(0, survival_G, 0, 0)
    assert p.choose([0], 1, None, False).tokens == 2


def test_scheduled_spends_more_where_drafts_survive():
    sizes = []
    for survival in (0.95, 0.5, 0.05):
        p = policy("scheduled")
        for text in range(4):
            survival_G = survival ** np.arange(1, G + 1)
            p.observe(text, survival_G, G, round(survival_G.sum()))
        sizes.append(p.choose([0, 1, 2, 3], 4, linear(0.12), False).tokens)
    assert sizes[0] > sizes[1] >= sizes[2] == 0


def test_a_new_request_counts_as_the_running_mean():
    p = policy("scheduled")
    for _ in range(300):
        p.observe(0, np.full(G, 0.01), 0, 0)
    assert p.choose([99], 1, linear(0.5), False).tokens == 0
    p.forget(0)
    assert p.choose([99], 1, linear(0.0), False).tokens == 5


def test_length_zero_is_probed_less_and_less_often():
    p = policy("scheduled")
    p.observe(0, np.zeros(G), G, 0)
    tokens = [p.choose([0], 1, linear(1.0), False).tokens for _ in range(40 * PROBE_EVERY)]
    waits = np.diff([-1] + [i for i, t in enumerate(tokens) if t])
    expected = [PROBE_EVERY]
    while sum(expected) + min(2 * expected[-1], LONGEST_WAIT) <= len(tokens):
        expected.append(min(2 * expected[-1], LONGEST_WAIT))
    assert waits.tolist() == expected and expected[-1] == LONGEST_WAIT


def test_a_change_of_mind_makes_probes_frequent_again():
    p = policy("scheduled")
    p.observe(0, np.zeros(G), G, 0)
    for _ in range(20 * PROBE_EVERY):
        p.choose([0], 1, linear(1.0), False)
    assert p.choose([0], 1, linear(0.0), False).tokens
    tokens = [p.choose([0], 1, linear(1.0), False).tokens for _ in range(PROBE_EVERY)]
    assert [i for i, t in enumerate(tokens) if t] == [PROBE_EVERY - 1]


def test_a_probe_has_the_length_that_would_pay_most():
    p = policy("scheduled")
    free_drafts = Curves(
        {(r, t, s): 1.0 if t else 0.1 for r in BUCKETS for t in (0, *BUCKETS[r]) for s in (False, True)}
    )
    tokens = {p.choose([0], 1, free_drafts, False).tokens for _ in range(PROBE_EVERY)}
    assert tokens == {0, BUCKETS[1][-1]}


def test_plain_rounds_are_timed_less_and_less_often_where_drafts_pay():
    p = policy("scheduled")
    tokens = [p.choose([0], 1, linear(0.0), False).tokens for _ in range(10 * LONGEST_WAIT)]
    waits = np.diff([-1] + [i for i, t in enumerate(tokens) if not t]).tolist()
    assert waits == [min(FIRST_PROBE << i, LONGEST_WAIT) for i in range(len(waits))] and waits[-1] == LONGEST_WAIT
    assert tokens[-LONGEST_WAIT:].count(0) <= 1


def test_a_change_of_mind_makes_plain_probes_frequent_again():
    p = policy("scheduled")
    for _ in range(10 * LONGEST_WAIT):
        p.choose([0], 1, linear(0.0), False)
    p.observe(0, np.zeros(G), G, 0)
    assert not p.choose([0], 1, linear(1.0), False).tokens
    tokens = [p.choose([0], 1, linear(0.0), False).tokens for _ in range(PROBE_EVERY)]
    assert [i for i, t in enumerate(tokens) if not t] == [PROBE_EVERY - 1]


def test_one_unsure_round_does_not_end_drafting():
    p = policy("scheduled")
    for _ in range(20):
        p.observe(0, np.full(G, 0.9), G, G)
    p.observe(0, np.full(G, 0.05), G, 0)
    assert p.choose([0], 1, linear(0.3), False).tokens > 0


def test_rounds_that_take_other_than_profiled_seconds_are_believed():
    """Drafts that the profile calls dear, and that are not, get verified; the other way round they do not."""
    for profiled, plain, drafting in ((linear(1.0), 2.0, 1.0), (linear(0.0), 1.0, 3.0)):
        p = policy("scheduled")
        before = p.choose([0], 1, profiled, False).tokens > 0
        for _ in range(60):
            p.observe_seconds(1, 0, False, profiled, plain)
            p.observe_seconds(1, 2, False, profiled, drafting)
        assert before != (plain > drafting) == (p.choose([0], 1, profiled, False).tokens > 0)


def test_a_slower_machine_makes_no_kind_of_round_look_cheap():
    """Plain rounds that take three times their profile say nothing for drafting, in their bucket or in another."""
    p = policy("scheduled")
    profiled = linear(3.0)
    assert not p.choose([0], 1, profiled, False).tokens
    for _ in range(PROBE_EVERY // 2):
        p.observe_seconds(1, 0, False, profiled, 3 * profiled.plain(1, False))
        assert not p.choose([0], 1, profiled, False).tokens
    slow, unseen = p.slip(1, drafted=False), [p.slip(1, drafted=True), p.slip(4, drafted=False)]
    assert slow > 2 and all(0.7 * slow < other < slow for other in unseen)


def test_a_round_that_was_held_up_is_not_believed():
    p = policy("scheduled")
    for seconds in (1e-6, 1e3):
        p.observe_seconds(1, 2, False, linear(0.1), seconds)
    assert p.slip(1, drafted=True) == 1.0


def test_a_head_that_promises_too_much_is_trusted_less():
    """The same survivals, kept and broken: what is broken is not drafted for any longer."""
    sizes = []
    for accepted in (G, 0):
        p = policy("scheduled")
        for _ in range(100):
            p.observe(0, np.full(G, 0.9), G, accepted)
        sizes.append(p.choose([0], 1, linear(0.3), False).tokens)
    assert sizes[0] == 5 and sizes[1] == 0


def test_curves_are_made_monotone_and_a_flat_profile_is_refused():
    seconds = {(1, 0, False): 1.0, (1, 2, False): 3.0, (1, 4, False): 2.0, (1, 5, False): 4.0}
    made = make_curves(seconds)
    assert [made.draft(1, t, False) for t in (2, 4, 5)] == [3.0, 3.0, 4.0] and made.plain(1, False) == 1.0
    with pytest.raises(ConfigError, match="flat"):
        make_curves({(1, 2, False): 3.0, (1, 5, False): 3.0})


def test_a_rise_from_one_number_of_requests_to_another_is_none():
    """Eight requests take longer than one; that says nothing about what a draft costs."""
    flat = {(r, t, False): float(r) for r, sizes in ((1, (0, 4, 6)), (8, (0, 16, 32, 48))) for t in sizes}
    with pytest.raises(ConfigError, match="with 8 requests 16 packed tokens"):
        make_curves(flat)
    assert make_curves(flat | {(8, 48, False): 9.0})  # one request may well be bound by memory alone


def test_steps_per_second_is_a_staircase_over_compiled_sizes():
    rate = linear(0.5, 0.0).steps_per_second(1, G, False, active=1)
    np.testing.assert_allclose(rate, [2.0, 2.0, 1.0, 0.5, 0.5, 0.4])


def test_in_a_bucket_with_room_a_draft_costs_a_drafting_round():
    rate = linear(0.5, 0.0).steps_per_second(4, G, False, active=2)
    np.testing.assert_allclose(rate[:10], [0.5] * 3 + [1 / 4] * 6 + [1 / 8])


def test_curves_round_trip_and_belong_to_one_machine(tmp_path: Path):
    path = tmp_path / "deep" / "curves.json"
    curves_lib.save(linear(0.1), path, {"machine": "a"})
    loaded = curves_lib.load(path, {"machine": "a"})
    assert loaded == linear(0.1)
    assert curves_lib.load(path, {"machine": "b"}) is None
    path.write_text("{")
    assert curves_lib.load(path, {"machine": "a"}) is None


def test_monitor_sees_a_head_that_drifts():
    rng = np.random.default_rng(0)
    honest, boastful = DriftMonitor(1), DriftMonitor(1)
    assert honest.error is None
    for _ in range(3000):
        chance = rng.random()
        stands = int(rng.random() < chance)
        honest.observe(np.array([chance]), 1, stands)
        boastful.observe(np.array([min(1.0, chance + 0.3)]), 1, stands)
    assert honest.error is not None and boastful.error is not None
    assert honest.error < 0.06 < 0.2 < boastful.error
    assert honest.error_by_position() == [pytest.approx(honest.error)]


def test_monitor_raises_an_alarm_once_for_each_drift():
    rng, monitor = np.random.default_rng(0), DriftMonitor(2)

    def alarms(boast: float) -> int:
        total = 0
        for _ in range(6000):
            chance_G = np.cumprod(rng.random(2))
            stands = int((rng.random() < chance_G).sum())
            monitor.observe(np.minimum(chance_G + boast, 1.0), 2, stands)
            total += monitor.alarm()
        return total

    assert [alarms(boast) for boast in (0.0, 0.3, 0.3, 0.0, 0.3)] == [0, 1, 0, 0, 1]


def test_few_drafts_raise_no_alarm_however_they_end():
    monitor = DriftMonitor(1)
    for _ in range(LEAST // 2):
        monitor.observe(np.ones(1), 1, 0)
        assert not monitor.alarm()


def test_monitor_knows_nothing_of_unverified_positions():
    monitor = DriftMonitor(2)
    monitor.observe(np.array([1.0, 0.5]), 1, 1)
    assert monitor.error_by_position() == [0.0, None]


def test_temperatures_round_trip_beside_the_drafter(tmp_path: Path):
    np.testing.assert_array_equal(read_temperatures(tmp_path, 3), np.ones(3))
    write_temperatures(tmp_path, np.array([0.5, 1.0, 2.0]), {"blocks": 10})
    np.testing.assert_array_equal(read_temperatures(tmp_path, 3), [0.5, 1.0, 2.0])
    with pytest.raises(ConfigError, match="not 2 positive"):
        read_temperatures(tmp_path, 2)
    (tmp_path / "calibration.json").write_text("no")
    with pytest.raises(ConfigError, match="not a calibration"):
        read_temperatures(tmp_path, 3)
