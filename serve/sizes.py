"""The sizes of an engine: requests, pages and tokens, and the short list of shapes that are compiled. No jax."""

import dataclasses
from typing import Any, Literal

from dspark_jax.config import ConfigError

_FEWEST = 4


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes of the engine. `max_context` bounds what a request may touch (`scheduler.positions`); pages hold
    `page_size` positions each, `num_pages` of them (0: enough for `max_requests` of full length). `request_sizes` are
    the numbers of requests a round is compiled for (empty: 1, `bucket_growth`, its square, ... and the maximum)."""

    max_requests: int = 8
    request_sizes: tuple[int, ...] = ()
    max_context: int = 512
    page_size: int = 128
    num_pages: int = 0
    prefill_lengths: tuple[int, ...] = (64, 256)
    verify: Literal["token", "block"] = "token"
    shortlist: int = 32
    dense_markov: bool = False
    """Multiply a vanilla Markov head out into a table once: for small vocabularies."""
    bucket_growth: int = 2
    """How many times larger each bucket is than the one before: larger, and fewer programs compile, more places are
    padding and the scheduler has fewer lengths to choose from."""
    scan_layers: bool | None = None
    """Run the target as one loop over stacked layers, which compiles one layer in place of all; None: on TPUs, where
    its layers are alike. A CPU runs such a loop several times slower, and on a GPU it was never tried."""

    def __post_init__(self) -> None:
        for field in ("max_requests", "max_context", "page_size"):
            if getattr(self, field) < 1:
                raise ConfigError(f"engine {field} = {getattr(self, field)}: expected a positive number")
        if self.request_sizes and max(self.request_sizes) != self.max_requests:
            raise ConfigError(
                f"engine request_sizes = {self.request_sizes}: the largest must be max_requests = {self.max_requests}"
            )
        if not self.prefill_lengths or min(self.prefill_lengths) < 1:
            raise ConfigError(f"engine prefill_lengths = {self.prefill_lengths}: give at least one positive length")
        if self.verify not in ("token", "block"):
            raise ConfigError(f"engine verify = {self.verify!r}: expected 'token' or 'block'")
        if self.bucket_growth < 2:
            raise ConfigError(f"engine bucket_growth = {self.bucket_growth}: expected 2 or more")
        if self.shortlist < 0:
            raise ConfigError(f"engine shortlist = {self.shortlist}: expected 0 (whole vocabulary) or more")
        if self.num_pages and self.num_pages < self.pages_per_request:
            raise ConfigError(
                f"engine num_pages = {self.num_pages} cannot hold one request of {self.max_context} positions: give"
                f" {self.pages_per_request} or more"
            )

    @property
    def pages_per_request(self) -> int:
        return -(-self.max_context // self.page_size)

    @property
    def pages(self) -> int:
        return self.num_pages or self.max_requests * self.pages_per_request


def request_buckets(max_requests: int, growth: int = 2) -> tuple[int, ...]:
    """1, growth, growth squared, ... and the maximum itself."""
    return (*_powers(growth, 0, max_requests), max_requests)


def token_buckets(requests: int, num_drafts: int, growth: int = 2) -> tuple[int, ...]:
    """Packed sizes of a drafting round of up to R requests: powers of `growth` above R up to R * (G + 1).

    CPU and TPU dots alike cost a step at these sizes, so the edges are where capacity naturally lies. Fewer than four
    places cost what four do.
    """
    most = requests * (num_drafts + 1)
    return (*_powers(growth, max(requests, _FEWEST - 1), most), most)


def _powers(growth: int, above: int, below: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < below:
        sizes.append(sizes[-1] * growth)
    return [size for size in sizes if above < size < below]


def bucket_sizes(config: EngineConfig, num_drafts: int) -> dict[int, tuple[int, ...]]:
    """The requests buckets R, and of each the sizes T of its drafting rounds; none without drafts."""
    sizes = tuple(sorted(config.request_sizes)) or request_buckets(config.max_requests, config.bucket_growth)
    return {r: token_buckets(r, num_drafts, config.bucket_growth) if num_drafts else () for r in sizes}


def program_keys(config: EngineConfig, num_drafts: int, sync: bool = False) -> list[tuple[Any, ...]]:
    """Every program that serving may call. `sync` adds the two halves of a round that `scheduled:sync` needs."""
    keys: list[tuple[Any, ...]] = [("prefill", s) for s in config.prefill_lengths]
    for r, tokens in bucket_sizes(config, num_drafts).items():
        keys.append(("plain", r))
        keys += [("round", r, t) for t in tokens]
        if sync and num_drafts:
            keys.append(("draft", r))
            keys += [("verify", r, t) for t in tokens]
    return keys
