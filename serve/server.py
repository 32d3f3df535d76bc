"""The serving loop: round t + 1 is dispatched before round t's tokens are read, so the device never waits.

server = Server(engine, "scheduled", curves)
text = server.submit(Request(prompt, max_new_tokens=64))
server.run()                      # until nothing is left; or step() by step()
text.tokens, text.reason
"""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dspark_jax.config import ConfigError
from serve.curves import Curves
from serve.engine import Engine
from serve.monitor import DriftMonitor
from serve.pace import Pace
from serve.policy import DEFAULT, Policy, parse
from serve.rounds import Output
from serve.scheduler import DEPTH, Request, Row, Scheduler, Text

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Ticket:
    """Work under way on the device: the output to come and whose rows they are."""

    output: Output
    texts: list[Text]
    packed: int  # places of the round's target pass; 0: a chunk of a prompt
    started: float
    drafted: bool = False
    final: bool = True  # False: a chunk that is not its prompt's last

    @property
    def ended(self) -> bool:
        next_R: Any = self.output.next_R
        return next_R.is_ready()


@dataclasses.dataclass
class Totals:
    """What a run did, for statistics. Times in seconds."""

    rounds: int = 0
    draft_rounds: int = 0
    packed: int = 0
    """Places of all target passes of rounds."""
    filled: int = 0
    """Those that held a token of a request."""
    verified: int = 0
    accepted: int = 0
    emitted: int = 0
    waiting: float = 0.0
    """Host time spent waiting for the device: rounds are being computed meanwhile."""
    host: float = 0.0
    """Host time spent on anything else while work was under way."""
    idle: float = 0.0
    """What of it the device may have spent with nothing to do: an upper bound."""


class Server:
    """Requests in, texts out. `on_token(text, tokens)` hears of tokens as they are read. What it raises comes out of
    `step`, once everybody has heard of that round."""

    def __init__(
        self,
        engine: Engine,
        policy: str = DEFAULT,
        curves: Curves | None = None,
        clock: Callable[[], float] = time.perf_counter,
        on_token: Callable[[Text, list[int]], None] | None = None,
    ) -> None:
        spec = parse(policy, engine.num_drafts)
        if spec.kind in ("scheduled", "sync") and curves is None:
            raise ConfigError(f"policy {policy!r} needs the machine's step times: profile the engine first")
        drafter = engine.models.drafter
        if spec.kind in ("threshold", "sync") and drafter is not None and not drafter.confidence_head:
            raise ConfigError(
                f"policy {policy!r} goes by confidences, and this drafter has no confidence head: use scheduled or"
                " fixed:K"
            )
        halves = [key for key in engine.program_keys(sync=True) if key[0] in ("draft", "verify")]
        if spec.kind == "sync" and not engine.has(halves):
            raise ConfigError(
                f"policy {policy!r} has programs of its own, and this engine was compiled without them: compile it with"
                " engine.compile(engine.program_keys(sync=True))"
            )
        config = engine.config
        engine.reset()
        self.engine, self.curves, self.clock, self.on_token = engine, curves, clock, on_token
        self.policy = Policy(spec, engine.num_drafts, engine.token_buckets)
        self.scheduler = Scheduler(
            config.max_requests, config.pages, config.page_size, config.max_context, engine.target_config.vocab_size,
            engine.num_drafts, engine.target_config.max_length,
        )  # fmt: skip
        self.monitor = DriftMonitor(engine.num_drafts)
        self.totals = Totals()
        self._under_way: deque[_Ticket] = deque()
        self._last_read = 0.0
        self._pace = Pace()

    def submit(self, request: Request) -> Text:
        """Queues a request; see `Scheduler.submit` for what is refused."""
        return self.scheduler.submit(request, self.clock())

    def cancel(self, text: Text) -> None:
        """Ends a text now; its slot is free for the next."""
        self.scheduler.cancel(text, self.clock())
        self.policy.forget(text.number)

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and not self._under_way

    def start(self) -> None:
        """Prefills whoever fits, and no more: decoding of an offline batch is timed from here."""
        self.scheduler.admit()
        while self._prefill():
            pass
        while self._under_way:
            self._read(self._under_way.popleft())

    def run(self) -> None:
        """Steps until every text has ended and every round is read."""
        while not self.idle:
            self.step()

    def step(self) -> None:
        """Dispatches chunks of prompts and a round, if there are any, then reads all but the newest.

        How many chunks says `Pace`.
        """
        start = self.clock()
        waited = self.totals.waiting
        newest = self._under_way[-1] if self._under_way else None
        self.scheduler.admit()
        prefilled = sum(self._prefill() for _ in range(self._pace.chunks))
        decoded = self._decode()
        if newest is not None and (prefilled or decoded) and newest.ended:
            # It ended before its successor was there: at some time since the host last heard of the device.
            self.totals.idle += self.clock() - max(newest.started, self._last_read)
        keep = DEPTH - 1 if prefilled or decoded else 0
        while len(self._under_way) > keep:
            self._read(self._under_way.popleft())
        if newest is not None:
            self.totals.host += self.clock() - start - (self.totals.waiting - waited)

    # -- dispatch ------------------------------------------------------------------------------------------------

    def _prefill(self) -> bool:
        """One chunk of the prompt that has waited longest."""
        texts = self.scheduler.prefilling()
        if not texts:
            return False
        text, longest = texts[0], max(self.engine.config.prefill_lengths)
        request = text.request
        chunk = request.prompt[text.prefilled : text.prefilled + longest]
        started = self.clock()
        output = self.engine.prefill(text.slot, chunk, text.prefilled, request.seed, request.sampling, text.pages)
        text.prefilled += len(chunk)
        self._start(_Ticket(output, [text], 0, started, final=not text.prefilling))
        return True

    def _decode(self) -> bool:
        texts = self.scheduler.decoding()
        if not texts:
            return False
        slots = [text.slot for text in texts]
        bucket = self.engine.bucket(len(slots))
        sampled = any(text.request.sampling.temperature > 0 for text in texts)
        if self.policy.spec.kind == "sync":
            self._decode_now(texts, slots, bucket, sampled)
            return True
        choice = self.policy.choose([text.number for text in texts], bucket, self.curves, sampled)
        started = self.clock()
        if choice.tokens:
            knobs = self.engine.knobs(choice.by_survival, choice.threshold, choice.longest, self.policy.prior_G)
            output = self.engine.round(slots, choice.tokens, knobs)
            self._start(_Ticket(output, texts, choice.tokens, started, drafted=True))
        else:
            self._start(_Ticket(self.engine.plain(slots), texts, bucket, started))
        return True

    def _decode_now(self, texts: list[Text], slots: list[int], bucket: int, sampled: bool) -> None:
        """`scheduled:sync`: the host reads the lengths that Algorithm 1 found, then picks the bucket."""
        assert self.curves is not None
        curve = self.curves.steps_per_second(bucket, self.engine.num_drafts, sampled, active=len(slots))
        knobs, started = self.engine.knobs(prior_G=self.policy.prior_G), self.clock()
        drafted, lengths_R = self.engine.draft(slots, knobs, self.engine.whole(curve))
        total = int(np.sum(jax.device_get(lengths_R))) + len(slots)
        tokens = min(t for t in self.engine.token_buckets[bucket] if t >= total)
        output = self.engine.verify(slots, tokens, drafted, lengths_R)
        self._start(_Ticket(output, texts, tokens, started, drafted=True))

    def _start(self, ticket: _Ticket) -> None:
        for leaf in ticket.output:
            leaf.copy_to_host_async()
        self._under_way.append(ticket)

    # -- reading -------------------------------------------------------------------------------------------------

    def _read(self, ticket: _Ticket) -> None:
        start = self.clock()
        output: Any = jax.device_get(ticket.output)
        now = self.clock()
        self.totals.waiting += now - start
        seconds, self._last_read = now - max(ticket.started, self._last_read), now
        if not ticket.packed:
            self._pace.saw_chunk(seconds)
        if not ticket.final:
            if output.bad_R[0]:
                self.scheduler.take(ticket.texts[0], Row([], 0, 0, bad=True), now)
            return
        if ticket.packed:
            self._pace.saw_round(seconds, 1 + float(output.accepted_R[: len(ticket.texts)].mean()))
            self._count(ticket, output)
            self._observe_seconds(ticket, seconds)
        heard = []
        for row, text in enumerate(ticket.texts):
            if text.reason is not None:
                continue  # ended while this round was under way: its tokens are nobody's
            length, accepted = int(output.lengths_R[row]), int(output.accepted_R[row])
            if ticket.drafted and not output.bad_R[row]:
                self.policy.observe(text.number, output.survival_RG[row], length, accepted)
                self.monitor.observe(output.survival_RG[row], length, accepted)
            draft = output.tokens_RG[row, :length].tolist()
            part = Row(draft, accepted, int(output.next_R[row]), bool(output.bad_R[row]))
            added = self.scheduler.take(text, part, now)
            self.totals.emitted += len(added)
            heard.append((text, added))
            if text.reason is not None:
                self.policy.forget(text.number)
        if ticket.drafted:
            self._check_calibration()
        self._tell(heard)

    def _tell(self, heard: Sequence[tuple[Text, list[int]]]) -> None:
        """Last of all, since a listener may raise: by then no text lacks its tokens, and all others are told theirs."""
        failed: list[Exception] = []
        for text, added in heard:
            if added and self.on_token:
                try:
                    self.on_token(text, added)
                except Exception as error:
                    failed.append(error)
        if failed:
            raise failed[0]

    def _check_calibration(self) -> None:
        """Warns, once, when the confidences of a head no longer say what the target accepts."""
        drafter = self.engine.models.drafter
        if drafter is not None and drafter.confidence_head and self.monitor.alarm():
            known = (error for error in self.monitor.error_by_position() if error is not None)
            logger.warning(
                "the drafter's confidences are off by %.2f (by position: %s): fit them to what is served with"
                " python -m serve.calibrate", self.monitor.error, " ".join(f"{error:.2f}" for error in known),
            )  # fmt: skip

    def _observe_seconds(self, ticket: _Ticket, seconds: float) -> None:
        """Tells the policy what a round took: the device works on one after the other, and never waits."""
        if self.curves is None:
            return
        sampled = any(text.request.sampling.temperature > 0 for text in ticket.texts)
        tokens = ticket.packed if ticket.drafted else 0
        self.policy.observe_seconds(self.engine.bucket(len(ticket.texts)), tokens, sampled, self.curves, seconds)

    def _count(self, ticket: _Ticket, output: Any) -> None:
        totals, rows = self.totals, len(ticket.texts)
        verified = int(output.lengths_R[:rows].sum())
        totals.rounds += 1
        totals.draft_rounds += ticket.drafted
        totals.packed += ticket.packed
        totals.filled += rows + verified
        totals.verified += verified
        totals.accepted += int(output.accepted_R[:rows].sum())
