"""The device side of serving: owns the pages and the slots, compiles every round before the first request.

A program exists for each requests bucket R and packed-token bucket T, one without drafts for each R, and one for each
prefill length. Compiled ahead of time, they cannot be retraced: an unknown shape is an error, not a pause.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dspark_jax import Drafter, Target, kv_cache, scanned_target, sharding, tpu_cache
from dspark_jax.config import ConfigError, SamplingParams, TargetConfig
from dspark_jax.drafters.registry import algorithm, multiplied_out
from dspark_jax.sampling import SamplingRows, sampling_rows
from serve import rounds
from serve.rounds import Knobs, Models, NewRequest, Output, Slots, State, Weights
from serve.sizes import EngineConfig, bucket_sizes, program_keys

COMPILERS = 2  # programs compiled side by side: one leaves cores idle


class Engine:
    """Compiled rounds over a donated state. One object serves one policy at a time; `reset` empties all slots."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        config: EngineConfig,
        temperatures_G: Sequence[float] | np.ndarray | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        """`mesh` splits weights and pages over its `tensor` axis (and weights over `fsdp`); None: that of the target's
        weights, one device where they lie on none.

        Where layers run as a loop, the engine keeps a stacked copy of the target's weights: let go of `target` then.
        """
        mesh = mesh or sharding.mesh_of(target.params)
        self.config, self.target_config = config, target.config
        self.num_drafts = drafter.config.num_drafts if drafter else 0
        with on_mesh(mesh):
            scan = scans(config, target.config, kv_cache.platform())
        draft_config = drafter.config if drafter else None
        self.models = Models(target.config, draft_config, config.verify, config.shortlist, scan)
        if drafter is not None and drafter.config.vocab_size != target.config.vocab_size:
            raise ConfigError(
                f"the drafter was made for a vocabulary of {drafter.config.vocab_size}, this target has"
                f" {target.config.vocab_size}"
            )
        temperatures = np.ones(self.num_drafts) if temperatures_G is None else np.asarray(temperatures_G)
        if temperatures.shape != (self.num_drafts,):
            raise ConfigError(f"{temperatures.size} confidence temperatures for {self.num_drafts} drafts: one each")
        self.temperatures_G = temperatures.astype(np.float32)
        frozen = drafter.frozen if drafter else None
        if drafter and frozen and config.dense_markov:
            frozen = multiplied_out(drafter.config, drafter.params, frozen)
        target_params = scanned_target.stack(target.config, target.params) if scan else target.params
        weights = Weights(target_params, drafter.params if drafter else {}, frozen)
        self.mesh, self._whole = mesh, None if mesh is None else NamedSharding(mesh, PartitionSpec())
        self.weights = weights if mesh is None else sharding.place(weights, sharding.shardings(weights, mesh))
        self.dtype = target.dtype
        self.token_buckets = bucket_sizes(config, self.num_drafts)
        self.request_buckets = tuple(self.token_buckets)
        self._programs: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._on_device: dict[tuple[Any, ...], Any] = {}
        self.reset()

    def reset(self) -> None:
        """Empties all slots and pages."""
        with on_mesh(self.mesh):
            make = functools.partial(empty_state, self.models, self.config, self.dtype)
            self.state = (
                make() if self.mesh is None else jax.jit(make, out_shardings=state_shardings(make, self.mesh))()
            )

    # -- compilation ---------------------------------------------------------------------------------------------

    def program_keys(self, sync: bool = False) -> list[tuple[Any, ...]]:
        """As the function of that name."""
        return program_keys(self.config, self.num_drafts, sync)

    def compile(
        self, keys: Sequence[tuple[Any, ...]] | None = None, on_program: Callable[[tuple[Any, ...]], None] | None = None
    ) -> None:
        """Compiles programs (all by default), two at a time; `on_program` hears of each that is ready."""
        missing = [key for key in keys or self.program_keys() if key not in self._programs]

        def one(key: tuple[Any, ...]) -> None:
            traced = trace(self.models, self.config, key, self.weights, self.state, self.mesh)
            self._programs[key] = traced.lower().compile()
            if on_program:
                on_program(key)

        with ThreadPoolExecutor(COMPILERS) as pool:
            list(pool.map(one, missing))

    def has(self, keys: Iterable[tuple[Any, ...]]) -> bool:
        """Whether all of these programs are compiled."""
        return set(keys) <= self._programs.keys()

    def _program(self, *key: Any) -> Callable[..., Any]:
        if key not in self._programs:
            raise ConfigError(f"program {key} was not compiled: the engine has {sorted(map(str, self._programs))}")
        return self._programs[key]

    # -- calls: each dispatches and returns at once ----------------------------------------------------------------

    def prefill(
        self, slot: int, tokens: Sequence[int], start: int, seed: int, sampling: SamplingParams, pages: Sequence[int]
    ) -> Output:
        """One chunk of a prompt, at positions from `start` on, into a slot that owns `pages`."""
        size = min((s for s in self.config.prefill_lengths if s >= len(tokens)), default=0)
        if not size:
            raise ConfigError(f"a chunk of {len(tokens)} tokens is longer than {max(self.config.prefill_lengths)}")
        tokens_S = np.zeros(size, np.int32)
        tokens_S[: len(tokens)] = tokens
        page_row_P = np.full(self.config.pages_per_request, self.config.pages, np.int32)
        page_row_P[: len(pages)] = pages
        request = self.whole(_new_request(slot, seed, sampling, page_row_P))
        chunk = self.whole((tokens_S, np.int32(start), np.int32(len(tokens))))
        self.state, output = self._program("prefill", size)(self.weights, self.state, *chunk, request)
        return output

    def plain(self, slots: Sequence[int]) -> Output:
        """One token for each slot, no drafts."""
        slot_R = self._slots(slots)
        self.state, output = self._program("plain", slot_R.shape[0])(self.weights, self.state, slot_R)
        return output

    def round(self, slots: Sequence[int], num_tokens: int, knobs: Knobs) -> Output:
        """Draft, choose, verify and commit in `num_tokens` packed places."""
        slot_R = self._slots(slots)
        program = self._program("round", slot_R.shape[0], num_tokens)
        self.state, output = program(self.weights, self.state, slot_R, knobs)
        return output

    def draft(self, slots: Sequence[int], knobs: Knobs, steps_per_second_B: jax.Array) -> tuple[Any, jax.Array]:
        """The first half of a round under `scheduled:sync`: the drafts and Algorithm 1's lengths."""
        slot_R = self._slots(slots)
        return self._program("draft", slot_R.shape[0])(self.weights, self.state, slot_R, knobs, steps_per_second_B)

    def verify(self, slots: Sequence[int], num_tokens: int, drafted: Any, lengths_R: jax.Array) -> Output:
        """The second half, in a bucket that holds all lengths."""
        slot_R = self._slots(slots)
        program = self._program("verify", slot_R.shape[0], num_tokens)
        self.state, output = program(self.weights, self.state, slot_R, drafted, lengths_R)
        return output

    def bucket(self, requests: int) -> int:
        """The requests bucket of a round of so many requests."""
        return min(r for r in self.request_buckets if r >= requests)

    def whole(self, arrays: Any) -> Any:
        """On the device, or whole on every device of the mesh."""
        return jax.device_put(arrays, self._whole)

    def knobs(
        self, by_survival: bool = True, threshold: float = 0.0, longest: int | None = None,
        prior_G: np.ndarray | None = None,
    ) -> Knobs:  # fmt: skip
        """Device scalars for `rounds.Knobs`, uploaded once for each setting."""
        prior = np.full(self.num_drafts, 0.5, np.float32) if prior_G is None else np.asarray(prior_G, np.float32)
        key = ("knobs", by_survival, threshold, longest, prior.tobytes())
        if key not in self._on_device:
            scalars = np.bool_(by_survival), np.float32(threshold), np.int32(longest or self.num_drafts)
            arrays = Knobs(*scalars, self.temperatures_G, prior)  # type: ignore[arg-type]  (on their way to the device)
            self._on_device = {k: v for k, v in self._on_device.items() if k[0] != "knobs"} | {key: self.whole(arrays)}
        return self._on_device[key]

    def _slots(self, slots: Sequence[int]) -> jax.Array:
        """Slot numbers of a round, filled up to a bucket; uploaded only when they change."""
        size = self.bucket(len(slots))
        key = ("slots", *slots, size)
        if key not in self._on_device:
            filled = np.full(size, self.config.max_requests, np.int32)
            filled[: len(slots)] = slots
            self._on_device = {k: v for k, v in self._on_device.items() if k[0] != "slots"} | {key: self.whole(filled)}
        return self._on_device[key]


def scans(config: EngineConfig, target: TargetConfig, platform: str) -> bool:
    """Whether the target's layers run as one loop. Raises ConfigError where that is asked for and cannot be."""
    alike = scanned_target.alike(target)
    if config.scan_layers and not alike:
        raise ConfigError("engine scan_layers = True: the layers of this target differ, so no loop can run them all")
    return platform == "tpu" and alike if config.scan_layers is None else config.scan_layers


def on_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """The context in which a round over `mesh` is traced."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def state_shardings(make: Callable[[], State], mesh: Mesh) -> State:
    """Pages are split over key/value heads, everything else is whole on every device."""
    state = jax.eval_shape(make)
    pages = tuple(NamedSharding(mesh, spec) for spec in tpu_cache.page_specs())
    whole = NamedSharding(mesh, PartitionSpec())
    slots = jax.tree.map(lambda _: whole, state.slots)
    return State([pages] * len(state.target_pages), [pages] * len(state.draft_pages), slots)  # type: ignore[list-item]


def trace(
    models: Models, config: EngineConfig, key: tuple[Any, ...], weights: Weights, state: State, mesh: Mesh | None
) -> Any:
    """One program of the engine, traced for the devices of `mesh`; weights and state may be shapes with shardings."""
    kind, *sizes = key
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())

    def shape(*axes: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(axes, dtype, sharding=whole)

    def program(function: Callable[..., Any], statics: tuple[str, ...], keeps_state: bool = True) -> Any:
        out: Any = whole
        if mesh is not None and keeps_state:
            out = (jax.tree.map(lambda x: x.sharding, state), whole)
        donated = ("state",) if keeps_state else ()
        return jax.jit(function, static_argnames=statics, donate_argnames=donated, out_shardings=out)

    drafts = models.drafter.num_drafts if models.drafter else 0
    floats = functools.partial(shape, dtype=jnp.float32)
    knobs = Knobs(shape(dtype=jnp.bool_), floats(), shape(), floats(drafts), floats(drafts))  # type: ignore[arg-type]
    slot_R = shape(sizes[0])
    with on_mesh(mesh):
        if kind == "prefill":
            sampling = SamplingRows(floats(1), shape(1), floats(1))  # type: ignore[arg-type]
            request = NewRequest(shape(), shape(2, dtype=jnp.uint32), sampling, shape(config.pages_per_request))  # type: ignore[arg-type]
            return program(rounds.prefill, ("models",)).trace(models, weights, state, slot_R, shape(), shape(), request)
        if kind == "plain":
            return program(rounds.plain_round, ("models",)).trace(models, weights, state, slot_R)
        if kind == "round":
            jitted = program(rounds.draft_round, ("models", "num_tokens"))
            return jitted.trace(models, sizes[1], weights, state, slot_R, knobs)
        curve = floats(sizes[0] * (drafts + 1) + 1)
        if kind == "draft":
            jitted = program(_draft_and_choose, ("models",), keeps_state=False)
            return jitted.trace(models, weights, state, slot_R, knobs, curve)
        halves = jax.eval_shape(functools.partial(_draft_and_choose, models), weights, state, slot_R, knobs, curve)
        drafted, lengths_R = jax.tree.map(lambda x: shape(*x.shape, dtype=x.dtype), halves)
        jitted = program(_verify, ("models", "num_tokens"))
        return jitted.trace(models, sizes[1], weights, state, slot_R, drafted, lengths_R)


def empty_state(models: Models, config: EngineConfig, dtype: jnp.dtype) -> State:
    """No request in any slot, pages of zeros for weights of `dtype`."""
    kv_dtype, n = kv_cache.compute_dtype(dtype), config.max_requests

    def pool(heads: int, size: int, layers: int = 1) -> tuple[jax.Array, ...]:
        return tpu_cache.empty_pages(config.pages * layers, heads, config.page_size, size, kv_dtype)

    target, drafter = models.target, models.drafter
    target_layers = [(layer.num_kv_heads, layer.head_dim) for layer in map(target.layer, range(target.num_layers))]
    if models.scan_layers:
        target_pages = [pool(*target_layers[0], target.num_layers)]
    else:
        target_pages = [pool(*layer) for layer in target_layers]
    draft_pages = [pool(*layer) for layer in algorithm(drafter).cache_layers(drafter)] if drafter else []

    slots = Slots(
        jnp.zeros(n, jnp.int32),
        jnp.zeros(n, jnp.int32),
        jnp.zeros(n, jnp.int32),
        jnp.zeros((n, 2), jnp.uint32),
        SamplingRows(jnp.zeros(n, jnp.float32), jnp.zeros(n, jnp.int32), jnp.ones(n, jnp.float32)),
        jnp.full((n, config.pages_per_request), config.pages, jnp.int32),
    )
    return State(target_pages, draft_pages, slots)


def _new_request(slot: int, seed: int, sampling: SamplingParams, page_row_P: np.ndarray) -> NewRequest:
    key_2 = np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)  # jax.random.key keeps the lower half
    return NewRequest(np.int32(slot), key_2, sampling_rows([sampling]), page_row_P)  # type: ignore[arg-type]


def _draft_and_choose(
    models: Models, weights: Weights, state: State, slot_R: jax.Array, knobs: Knobs, steps_per_second_B: jax.Array
) -> tuple[rounds.Drafted, jax.Array]:
    drafted = rounds.draft(models, weights, state, slot_R, knobs)
    return drafted, rounds.choose_now(drafted, slot_R, state.slots.length_N.shape[0], steps_per_second_B)


def _verify(
    models: Models, num_tokens: int, weights: Weights, state: State, slot_R: jax.Array, drafted: rounds.Drafted,
    lengths_R: jax.Array,
) -> tuple[State, Output]:  # fmt: skip
    return rounds.verify(models, weights, state, slot_R, drafted, lengths_R, num_tokens)
