"""The host side of serving: who waits, who has a slot and pages, and what of a round's tokens belongs to whom. No jax.

A request gets a slot and all the pages it can ever need (prompt, new tokens and room for blocks past its end) or
waits, first come first served. Nobody is preempted, and nobody who runs waits for pages, so the system cannot deadlock.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from dspark_jax.config import ConfigError, SamplingParams

GREEDY = SamplingParams(temperature=0.0)

Reason = Literal["stop", "length", "cancelled", "error"]
DEPTH = 2  # rounds dispatched and not yet read


def positions(prompt: int, new_tokens: int, num_drafts: int) -> int:
    """Cache positions that a text of so many tokens touches in rounds of `num_drafts` drafts.

    The round in which it ends starts at its last token at most and verifies a block like any other. The host sees the
    end DEPTH - 1 rounds late: each of these starts up to a block and a token further on.
    """
    return prompt + new_tokens - 1 + num_drafts + (DEPTH - 1) * (num_drafts + 1)


@dataclasses.dataclass(frozen=True)
class Request:
    """What a user asks for. A text ends with the first of `stop_ids` (kept) or after `max_new_tokens`."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = GREEDY
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    domain: str = ""
    """A label for statistics."""


class Verified(NamedTuple):
    """One round of a text: the drafts that were verified, and how many of them stood."""

    draft: list[int]
    accepted: int


@dataclasses.dataclass
class Text:
    """A request on its way. Times are in seconds of the server's clock."""

    number: int
    request: Request
    submitted: float
    slot: int = -1
    pages: tuple[int, ...] = ()
    prefilled: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    reason: Reason | None = None
    first_token: float | None = None
    finished: float | None = None
    rounds: list[Verified] = dataclasses.field(default_factory=list)

    @property
    def verified(self) -> int:
        """Drafts verified so far."""
        return sum(len(round_.draft) for round_ in self.rounds)

    @property
    def accepted(self) -> int:
        """Drafts accepted so far."""
        return sum(round_.accepted for round_ in self.rounds)

    @property
    def prefilling(self) -> bool:
        return self.slot >= 0 and self.prefilled < len(self.request.prompt)


@dataclasses.dataclass(frozen=True)
class Row:
    """A request's part of one round, as read from the device: verified drafts, how many stood, the target's token."""

    draft: Sequence[int]
    accepted: int
    next: int
    bad: bool = False


class Scheduler:
    """Slots, pages and texts. Every method is cheap and synchronous."""

    def __init__(self, max_requests: int, num_pages: int, page_size: int, max_context: int, vocab_size: int,
                 num_drafts: int, longest_text: int) -> None:  # fmt: skip
        """`longest_text` is the target's own context; `max_context` is what a request may hold of the pages."""
        self.page_size, self.max_context, self.vocab_size = page_size, max_context, vocab_size
        self.num_pages, self.num_drafts, self.longest_text = num_pages, num_drafts, longest_text
        self._free_slots = list(range(max_requests))[::-1]
        self._free_pages = list(range(num_pages))[::-1]
        self.waiting: deque[Text] = deque()
        self.running: dict[int, Text] = {}  # by slot
        self._numbers = 0

    def pages_of(self, request: Request) -> int:
        """Pages that a request reserves."""
        return -(-positions(len(request.prompt), request.max_new_tokens, self.num_drafts) // self.page_size)

    def submit(self, request: Request, now: float) -> Text:
        """Queues a request. Raises ConfigError for one that could never run."""
        if not request.prompt:
            raise ConfigError("the prompt is empty: decoding needs at least one token to start from")
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.vocab_size:
            raise ConfigError(f"the prompt has ids outside the vocabulary of {self.vocab_size}")
        if request.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens = {request.max_new_tokens}: expected at least 1")
        if not 0 <= request.seed < 2**64:
            raise ConfigError(f"seed = {request.seed}: expected 0 to 2**64 - 1")
        prompt, new = len(request.prompt), request.max_new_tokens
        if prompt + new > self.longest_text:
            raise ConfigError(
                f"a prompt of {prompt} tokens with {new} new ones exceeds the target's context of {self.longest_text}"
            )
        if positions(prompt, new, self.num_drafts) > self.max_context:
            raise ConfigError(
                f"a prompt of {prompt} tokens with {new} new ones and room for drafts of {self.num_drafts} exceeds"
                f" max_context = {self.max_context}"
            )
        if self.pages_of(request) > self.num_pages:
            raise ConfigError(f"the request needs {self.pages_of(request)} pages, the engine has {self.num_pages}")
        text = Text(self._numbers, request, now)
        self._numbers += 1
        self.waiting.append(text)
        return text

    def admit(self) -> list[Text]:
        """Gives slots and pages to those who wait, in order, while both last."""
        admitted = []
        while self.waiting and self._free_slots:
            need = self.pages_of(self.waiting[0].request)
            if need > len(self._free_pages):
                break
            text = self.waiting.popleft()
            text.slot = self._free_slots.pop()
            text.pages = tuple(self._free_pages.pop() for _ in range(need))
            self.running[text.slot] = text
            admitted.append(text)
        return admitted

    def decoding(self) -> list[Text]:
        """Those whose prompt is in the caches, by slot."""
        return [self.running[slot] for slot in sorted(self.running) if not self.running[slot].prefilling]

    def prefilling(self) -> list[Text]:
        """Those whose prompt is not, in order of arrival."""
        return sorted((t for t in self.running.values() if t.prefilling), key=lambda text: text.number)

    def cancel(self, text: Text, now: float) -> None:
        """Ends a text at once; tokens of rounds under way are dropped. A finished one stays as it is."""
        if text.reason is None:
            self._finish(text, "cancelled", now)

    def take(self, text: Text, row: Row, now: float) -> list[int]:
        """Adds a round's tokens to a text, cut at its end; returns what was added. Finished texts take nothing."""
        if text.reason is not None:
            return []
        if row.bad:
            self._finish(text, "error", now)
            return []
        if text.tokens:  # the first one comes with the prompt
            text.rounds.append(Verified(list(row.draft), row.accepted))
        stop = set(text.request.stop_ids)
        added: list[int] = []
        for token in (*row.draft[: row.accepted], row.next):
            added.append(token)
            if token in stop or len(text.tokens) + len(added) == text.request.max_new_tokens:
                break
        if text.first_token is None:
            text.first_token = now
        text.tokens += added
        if added[-1] in stop:
            self._finish(text, "stop", now)
        elif len(text.tokens) >= text.request.max_new_tokens:
            self._finish(text, "length", now)
        return added

    def _finish(self, text: Text, reason: Reason, now: float) -> None:
        text.reason, text.finished = reason, now
        if text.slot < 0:
            self.waiting.remove(text)
            return
        del self.running[text.slot]
        self._free_slots.append(text.slot)
        self._free_pages.extend(text.pages)
        text.slot, text.pages = -1, ()

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def check(self) -> None:
        """Raises AssertionError if a slot or a page is lost, or owned twice (tests call this)."""
        pages = self._free_pages + [page for text in self.running.values() for page in text.pages]
        assert sorted(pages) == list(range(self.num_pages)), "a page leaked or has two owners"
        assert not set(self._free_slots) & set(self.running), "a slot is free and taken"
