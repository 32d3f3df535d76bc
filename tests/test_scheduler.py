"""Host side of serving: a state machine over arrivals, cancellations and rounds, in which nothing may leak."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dspark_jax import ConfigError
from serve.scheduler import Request, Row, Scheduler, Text

SLOTS, PAGES, PAGE, CONTEXT, VOCAB, DRAFTS, LONGEST = 3, 7, 8, 48, 50, 2, 60


def make() -> Scheduler:
    return Scheduler(SLOTS, PAGES, PAGE, CONTEXT, VOCAB, DRAFTS, LONGEST)


class Life(RuleBasedStateMachine):
    """Requests live on a fake device that says which tokens a round brought."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler, self.texts, self.clock = make(), [], 0.0

    def now(self) -> float:
        self.clock += 1.0
        return self.clock

    @rule(length=st.integers(1, 25), new=st.integers(1, 18), stop=st.sampled_from([(), (3,), (3, 4)]))
    def submit(self, length: int, new: int, stop: tuple[int, ...]) -> None:
        self.texts.append(self.scheduler.submit(Request((1,) * length, new, stop_ids=stop), self.now()))

    @rule()
    def admit(self) -> None:
        waiting = list(self.scheduler.waiting)
        admitted = self.scheduler.admit()
        assert admitted == waiting[: len(admitted)], "someone overtook"

    @precondition(lambda self: self.scheduler.prefilling())
    @rule(chunk=st.integers(1, 16))
    def prefill(self, chunk: int) -> None:
        text = self.scheduler.prefilling()[0]
        text.prefilled = min(text.prefilled + chunk, len(text.request.prompt))

    @precondition(lambda self: self.scheduler.decoding())
    @rule(tokens=st.lists(st.integers(0, 9), min_size=1, max_size=DRAFTS + 1), bad=st.integers(0, 20))
    def round(self, tokens: list[int], bad: int) -> None:
        for text in self.scheduler.decoding():
            before = list(text.tokens)
            added = self.scheduler.take(text, Row(tokens[:-1], len(tokens) - 1, tokens[-1], bad == 0), self.now())
            assert text.tokens == before + added and added == tokens[: len(added)]
            assert len(text.tokens) <= text.request.max_new_tokens
            assert not set(text.tokens[:-1]) & set(text.request.stop_ids)
            assert (text.reason is None) == (text.slot >= 0)

    @precondition(lambda self: self.texts)
    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        text = self.texts[which % len(self.texts)]
        reason = text.reason
        self.scheduler.cancel(text, self.now())
        assert text.reason == (reason or "cancelled")

    @precondition(lambda self: self.texts)
    @rule(which=st.integers(0, 100))
    def late_tokens(self, which: int) -> None:
        """A round that was under way when its text ended brings nothing."""
        text = self.texts[which % len(self.texts)]
        if text.reason is not None:
            before = list(text.tokens)
            assert self.scheduler.take(text, Row([1], 1, 2), self.now()) == [] and text.tokens == before

    @invariant()
    def nothing_leaks(self) -> None:
        self.scheduler.check()

    def teardown(self) -> None:
        """Whatever happened, what is left can be served to its end."""
        for _ in range(2000):
            if self.scheduler.idle:
                break
            self.scheduler.admit()
            for text in self.scheduler.prefilling():
                text.prefilled = len(text.request.prompt)
            for text in self.scheduler.decoding():
                self.scheduler.take(text, Row([], 0, 7), self.now())
        assert self.scheduler.idle
        assert sorted(self.scheduler._free_pages) == list(range(PAGES))
        assert sorted(self.scheduler._free_slots) == list(range(SLOTS))


Life.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLife = Life.TestCase


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request((), 4), "prompt is empty"),
        (Request((1, VOCAB), 4), "outside the vocabulary"),
        (Request((1,), 0), "max_new_tokens = 0"),
        (Request((1,) * 40, 9), "exceeds max_context"),
        (Request((1,) * 50, 11), "exceeds the target's context of 60"),
        (Request((1,), 4, seed=-1), "seed"),
    ],
)
def test_what_could_never_run_is_refused_and_leaves_nothing(request_: Request, message: str):
    scheduler = make()
    with pytest.raises(ConfigError, match=message):
        scheduler.submit(request_, 0.0)
    assert scheduler.idle


def test_a_large_request_waits_for_pages_and_is_not_overtaken():
    scheduler = make()
    large = [scheduler.submit(Request((1,) * 25, 18), 0.0) for _ in range(2)]
    small = scheduler.submit(Request((1,), 1), 0.0)
    assert scheduler.admit() == large[:1] and small.slot < 0
    large[0].prefilled = 25
    scheduler.take(large[0], Row([1] * 17, 17, 1), 1.0)
    assert scheduler.admit() == [large[1], small]


def test_statistics_count_rounds_after_the_prompts_own_token():
    scheduler = make()
    text: Text = scheduler.submit(Request((1, 2), 10), 0.0)
    scheduler.admit()
    text.prefilled = 2
    scheduler.take(text, Row([], 0, 5), 1.0)
    scheduler.take(text, Row([6, 7, 9, 9], 2, 8), 2.0)
    assert text.tokens == [5, 6, 7, 8]
    assert (len(text.rounds), text.verified, text.accepted, text.first_token) == (1, 4, 2, 1.0)
