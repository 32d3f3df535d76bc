"""Is a loaded drafter served as it was trained? A short greedy rollout of the target tells, before any user does.

A wrong layout, causality or window, layer ids off by one, another rope or a tap on the wrong side of a norm change no
text and raise no error: drafts are merely rejected. Here the drafts of every block of the rollout are compared with the
text that the target wrote, as configured and with one thing changed at a time. Where a change helps far beyond chance,
it is named.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import layers
from dspark_jax import target as target_lib
from dspark_jax.config import ConfigError, DrafterConfig, TargetConfig
from dspark_jax.drafters import registry
from dspark_jax.drafters.base import Committed, Frozen
from dspark_jax.target import Target
from dspark_jax.weights.fingerprint import weights_hash

Params = dict[str, Any]
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea.",
    "Explain in two sentences how a bicycle stays upright.",
    "Count from one to twenty.",
)
_THETAS = (1e4, 1e6)  # the usual confusion; each costs a compilation
_LONGEST_PROMPT = 64
# A change is named when it wins this many drafts a block, this factor, and this many standard errors.
_MORE, _FACTOR, _ERRORS = 0.2, 1.3, 3.0


class DrafterWarning(UserWarning):
    """A drafter is probably not served as it was trained, or not on its target."""


@dataclasses.dataclass(frozen=True)
class Report:
    """Mean accepted drafts a block over `blocks` blocks, as configured and under each change. `cause` names the
    change that points at a fault, None where none does."""

    accepted: float
    changed: dict[str, float]
    cause: str | None
    blocks: int

    @property
    def message(self) -> str:
        if self.cause is None:
            return f"{self.accepted:.2f} drafts accepted a block of a short rollout ({self.blocks} blocks)"
        return (
            f"the drafter is probably not served as it was trained: {self.accepted:.2f} drafts accepted a block of a"
            f" short rollout, but {self.changed[self.cause]:.2f} with {self.cause} ({self.blocks} blocks); check its"
            " config.json"
        )


def warn_unless_sound(report: Report) -> None:
    """Issues a DrafterWarning where the report names a cause."""
    if report.cause is not None:
        warnings.warn(report.message, DrafterWarning, stacklevel=3)


def warn_of_another_target(where: object, notes: Mapping[str, Any], target: Target) -> None:
    """Issues a DrafterWarning where a drafter's own record says that it learnt from other weights or another chat
    template than it is served with. Texts stay the target's; drafts are likely to be rejected."""
    if notes.get("target_weights") not in (None, weights_hash(target.params)):
        name = notes.get("config", {}).get("target", {}).get("path") or "another target"
        warnings.warn(
            f"{where}: was trained on other weights than this target's ({name!r}, here {target.config.name!r}): few"
            " drafts may be accepted; train one for this target (train.main --train.start-from goes on from it)",
            DrafterWarning,
            stacklevel=3,
        )
    own = None if target.tokenizer is None else target.tokenizer.template_hash
    if own is not None and notes.get("chat_template") not in (None, own):
        warnings.warn(
            f"{where}: was trained with chat template {notes['chat_template']}, this target has {own}: fewer drafts may"
            " be accepted; serve it with the template of its training",
            DrafterWarning,
            stacklevel=3,
        )


def questions(target: Target) -> list[list[int]]:
    """A few prompts in the target's chat template; none where it has no tokenizer or template."""
    if target.tokenizer is None:
        return []
    try:
        return [target.tokenizer.chat([{"role": "user", "content": text}], True) for text in QUESTIONS]
    except ConfigError:
        return []


def self_test(target: Target, drafter: Any, prompts: Sequence[Sequence[int]], new_tokens: int = 64) -> Report:
    """Compares a drafter's greedy drafts with `new_tokens` of the target's own greedy text after each prompt.

    Prompts (token ids) are cut to their last tokens, as many as the shortest has. Raises ConfigError without prompts.
    """
    length = min((len(prompt) for prompt in prompts), default=0)
    if length == 0:
        raise ConfigError("self-test: needs prompts of at least one token")
    length = min(length, _LONGEST_PROMPT)
    prompt_RP = jnp.asarray(np.stack([np.asarray(prompt[-length:], np.int32) for prompt in prompts]))
    c: DrafterConfig = drafter.config
    new_tokens = max(new_tokens, 2 * c.block_size)
    last = target.config.num_layers - 1
    tapped = tuple(sorted({i + d for i in c.target_layer_ids for d in (-1, 0, 1) if -1 <= i + d <= last}))
    text_RS, taps_RSMD, hidden_RSD = _rollout(target.config, target.params, prompt_RP, tapped, new_tokens)
    anchors_A = jnp.arange(length, text_RS.shape[1] - c.block_size)
    place = {layer: i for i, layer in enumerate(tapped)}

    def accepted(config: DrafterConfig, ids: Sequence[int], normed: bool) -> np.ndarray:
        own_RSMD = taps_RSMD[:, :, np.asarray([place[i] for i in ids], np.int32)]
        if normed:
            norm_D = target.params["final_norm"]
            end_RSD = layers.rms_norm(own_RSMD[:, :, -1], norm_D, target.config.norm_eps)
            own_RSMD = own_RSMD.at[:, :, -1].set(end_RSD)
        seen = Committed(text_RS, own_RSMD, hidden_RSD)
        counts = _accepted(config, drafter.params, drafter.frozen, seen, anchors_A)
        return np.minimum(np.asarray(counts), c.block_size - 1 or 1).ravel()

    ids = c.target_layer_ids
    configured = accepted(c, ids, False)
    changed: dict[str, float] = {}
    cause, best = None, 0.0
    for name, config, other_ids, normed in _changes(c, target.config, tapped, text_RS.shape[1]):
        counts = accepted(config, other_ids, normed)
        changed[name] = float(counts.mean())
        if _far_above(counts, configured) and changed[name] > best:
            cause, best = name, changed[name]
    return Report(float(configured.mean()), changed, cause, len(configured))


def _changes(
    c: DrafterConfig, target: TargetConfig, tapped: tuple[int, ...], length: int
) -> Iterator[tuple[str, DrafterConfig, tuple[int, ...], bool]]:
    """Names of the suspected faults with the config, layer ids and norm of the last tap that would undo each, for texts
    of `length`. A plain draft model reads nothing of the target that could be amiss."""
    if c.language_model:
        return
    ids = c.target_layer_ids
    for name, fields in _settings(c, length):
        try:
            config = dataclasses.replace(c, **fields)
        except ConfigError:  # a drafter that cannot be: a head may need more drafts than another layout leaves
            continue
        yield name, config, ids, False
    for step in (-1, 1) if ids else ():
        moved = tuple(i + step for i in ids)
        if set(moved) <= set(tapped):
            yield f"layer ids {list(moved)} in place of {list(ids)}", c, moved, False
    for theta in dict.fromkeys((target.rope_theta, *_THETAS)):
        if theta != c.rope_theta:
            name = f"rope theta {theta:g} in place of {c.rope_theta:g}"
            yield name, dataclasses.replace(c, rope_theta=theta), ids, False
    if ids:
        yield f"the target's final norm over its last tap (layer {ids[-1]})", c, ids, True


def _settings(c: DrafterConfig, length: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """What a file may say wrongly of how a block attends. A window that is longer than the text makes no difference."""
    if c.block_size == 1 or c.chain:
        return
    other = "fill_in" if c.layout == "anchor_first" else "anchor_first"
    yield f"layout {other!r} in place of {c.layout!r}", {"layout": other}
    causal = c.layer_causal or (False,) * c.num_layers
    for every in (False, True):
        if causal != (every,) * c.num_layers:
            changed = {"layer_causal": (every,) * c.num_layers}
            yield f"{'every' if every else 'no'} layer causal inside the block", changed
    if any(0 < window < length for window in c.layer_windows):
        yield f"no sliding window in place of {list(c.layer_windows)}", {"layer_windows": ()}


def _far_above(counts: np.ndarray, configured: np.ndarray) -> bool:
    difference = counts - configured
    error = difference.std() / math.sqrt(len(difference))
    more = difference.mean()
    return bool(more > _MORE and counts.mean() > _FACTOR * configured.mean() and more > _ERRORS * error)


@functools.partial(jax.jit, static_argnames=("config", "tapped", "new_tokens"))
def _rollout(
    config: TargetConfig, params: Params, prompt_RP: jax.Array, tapped: tuple[int, ...], new_tokens: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Greedy text [R, P + new_tokens] after prompts of one length, its features and last hidden states; the last token,
    which has not been through the target, has zeros."""
    rows, length = prompt_RP.shape
    caches = target_lib.init_caches(config, rows, length + new_tokens, params["embed"].dtype)
    position_RP = jnp.broadcast_to(jnp.arange(length)[None, :], prompt_RP.shape)
    start = target_lib.features(config, params, prompt_RP, position_RP, caches, tapped)

    def choose(hidden_RSD: jax.Array) -> jax.Array:
        return jnp.argmax(target_lib.logits(params, hidden_RSD[:, -1]), axis=-1).astype(jnp.int32)

    def step(carry: Any, position: jax.Array) -> Any:
        caches, token_R = carry
        position_R1 = jnp.broadcast_to(position, (rows, 1))
        out = target_lib.features(config, params, token_R[:, None], position_R1, caches, tapped)
        return (out.caches, choose(out.hidden_BSD)), (token_R, out.taps_BSMD[:, 0], out.hidden_BSD[:, 0])

    positions = length + jnp.arange(new_tokens - 1)
    first = (start.caches, choose(start.hidden_BSD))
    (_, last_R), (token_TR, taps_TRMD, hidden_TRD) = jax.lax.scan(step, first, positions)
    text_RS = jnp.concatenate([prompt_RP, token_TR.T, last_R[:, None]], axis=1)
    taps_RSMD = jnp.concatenate([start.taps_BSMD, taps_TRMD.swapaxes(0, 1)], axis=1)
    hidden_RSD = jnp.concatenate([start.hidden_BSD, hidden_TRD.swapaxes(0, 1)], axis=1)
    end = ((0, 0), (0, 1))
    return text_RS, jnp.pad(taps_RSMD, (*end, (0, 0), (0, 0))), jnp.pad(hidden_RSD, (*end, (0, 0)))


@functools.partial(jax.jit, static_argnames=("config",))
def _accepted(
    config: DrafterConfig,
    params: Params,
    frozen: Frozen,
    seen: Committed,
    anchors_A: jax.Array,
) -> jax.Array:
    """Leading drafts [R, A] that are the text itself."""
    text_RS = seen.tokens_BS
    anchors_RA = jnp.broadcast_to(anchors_A[None, :], (text_RS.shape[0], anchors_A.shape[0]))
    logits_RAGV = registry.teacher_forced(config, params, frozen, seen, anchors_RA).logits_BAGV
    draft_RAG = jnp.argmax(logits_RAGV, axis=-1)
    if frozen.draft_to_target_V is not None:
        draft_RAG = frozen.draft_to_target_V[draft_RAG]
    label_RAG = text_RS[:, anchors_A[:, None] + 1 + jnp.arange(config.num_drafts)[None, :]]
    return jnp.sum(jnp.cumprod((draft_RAG == label_RAG).astype(jnp.int32), axis=-1), axis=-1)
