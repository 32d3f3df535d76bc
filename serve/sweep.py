"""The static confidence threshold, swept over records of decoding in place of decoding once for each threshold.

A threshold shortens rounds, and a shorter round moves every later one, so a run that verifies all drafts has not seen
the blocks that a threshold would draft. At temperature 0 the text is the same whatever is verified, and a block depends
on the text alone: one draft pass at every position of the text (`blocks_everywhere`) holds all that any threshold can
ask for, and `replay` walks through it exactly as decoding would.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import Drafter, Round, SamplingParams, Target
from dspark_jax import target as target_lib
from dspark_jax.config import DrafterConfig, TargetConfig
from dspark_jax.drafters import registry
from dspark_jax.drafters.base import Committed, Frozen, Params
from dspark_jax.generate import bucket
from dspark_jax.sampling import sampling_rows

BATCH = 8


def threshold_length(confidence: Sequence[float], temperatures_G: np.ndarray, threshold: float) -> int:
    """Drafts before the first whose calibrated confidence is below the threshold; `confidence` are logits."""
    chance_G = 1 / (1 + np.exp(-np.asarray(confidence, np.float64) / temperatures_G))
    return int(np.cumprod(chance_G >= threshold).sum())


def shorten(block: Round, temperatures_G: np.ndarray, threshold: float) -> Round:
    """A round in which only the drafts before the threshold were verified; `block` verified all of them."""
    assert block.confidence is not None, "a threshold needs a confidence head"
    length = threshold_length(block.confidence, temperatures_G, threshold)
    return Round(block.draft[:length], min(block.accepted, length), block.confidence)


def last_place(text: Sequence[int], limit: int) -> int:
    """The place in the text behind which no round begins: its own end, or that of a text of `limit` tokens."""
    return min(len(text), limit) - 1


def replay(
    text: Sequence[int], blocks: Sequence[Round], limit: int, temperatures_G: np.ndarray, threshold: float
) -> list[Round]:
    """The rounds of decoding `limit` tokens greedily under a threshold. `blocks[i]` was drafted after `text[i]`."""
    rounds, place = [], 0  # of the newest token
    while place < last_place(text, limit):
        rounds.append(shorten(blocks[place], temperatures_G, threshold))
        place += rounds[-1].accepted + 1
    return rounds


def blocks_everywhere(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], limit: int
) -> list[list[Round]]:
    """For each greedy text, the block that would be drafted after each of its tokens where `replay` may stand.

    `accepted` counts the drafts that the text itself goes on with, so a text that was cut short must be at least a
    block longer than `limit`. Block i reads what decoding would have in its caches after token i, by the protocol's
    promise that a draft sees nothing from its anchor on.
    """
    config = drafter.config
    blocks: list[list[Round]] = []
    for start in range(0, len(prompts), BATCH):
        some = list(zip(prompts[start : start + BATCH], texts[start : start + BATCH], strict=True))
        length = bucket(max(len(prompt) + len(text) for prompt, text in some), 64)
        tokens_RS, first_R = np.zeros((BATCH, length), np.int32), np.zeros(BATCH, np.int32)
        for row, (prompt, text) in enumerate(some):
            tokens_RS[row, : len(prompt) + len(text)] = [*prompt, *text]
            first_R[row] = len(prompt)
        drafted = _blocks(
            _Models(target.config, config, limit - 1), target.params, drafter.params, drafter.frozen, tokens_RS, first_R
        )
        drafts_IRG, confidence_IRG = jax.device_get(drafted)
        for row, (_, text) in enumerate(some):
            mine = []
            for i in range(last_place(text, limit)):
                draft = drafts_IRG[i, row].tolist()
                agree = [a == b for a, b in zip(draft, text[i + 1 :], strict=False)]
                confidence = None if confidence_IRG is None else confidence_IRG[i, row].tolist()
                mine.append(Round(draft, int(np.cumprod(agree).sum()), confidence))
            blocks.append(mine)
    return blocks


class _Models(NamedTuple):
    """Static: what is compiled. `places` positions of each row are drafted from."""

    target: TargetConfig
    drafter: DrafterConfig
    places: int


@functools.partial(jax.jit, static_argnames=("models",))
def _blocks(
    models: _Models, target_params: Params, params: Params, frozen: Frozen, tokens_RS: jax.Array, first_R: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Greedy drafts [I, R, G] after each of the tokens from position `first` on, and their confidence logits."""
    config, run = models.drafter, registry.algorithm(models.drafter)
    batch, length = tokens_RS.shape
    position_RS = jnp.broadcast_to(jnp.arange(length)[None, :], tokens_RS.shape)
    features = target_lib.features(
        models.target, target_params, tokens_RS, position_RS, tap_layers=config.target_layer_ids
    )
    committed = Committed(tokens_RS, features.taps_BSMD, features.hidden_BSD)
    caches = registry.init_caches(config, batch, length, target_params["embed"].dtype)
    caches = run.commit(config, params, frozen, caches, committed, position_RS)
    keys_RG = jax.random.split(jax.random.key(0), (batch, config.num_drafts))  # greedy drafts read none
    rows = sampling_rows([SamplingParams(0.0)] * batch)

    def after(place: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        anchor_R = jnp.minimum(first_R + place, length - 1)
        token_R = jnp.take_along_axis(tokens_RS, anchor_R[:, None], axis=1)[:, 0]
        proposal = run.propose(config, params, frozen, caches, token_R, anchor_R, keys_RG, rows, greedy=True)
        return proposal.sample.tokens_RG, proposal.confidence_RG

    return jax.lax.map(after, jnp.arange(models.places))
