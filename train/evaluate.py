"""What a drafter is worth: the loss on held-out conversations, and the accepted length of real decoding."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from dspark_jax import SamplingParams, generate
from dspark_jax.drafters import Drafter
from dspark_jax.target import Target
from train.conversations import Record
from train.data import Element
from train.objective import Batch

Metrics = dict[str, np.ndarray]


def to_batch(element: Element) -> Batch:
    """A batch of train.data as the step takes it; `features` is there when the data brings cached ones."""
    return Batch(
        tokens_BS=element["tokens"],  # type: ignore[arg-type]
        supervised_BS=element["supervised"],  # type: ignore[arg-type]
        start_BS=element["start"],  # type: ignore[arg-type]
        anchors_BA=element["anchors"],  # type: ignore[arg-type]
        keep_BA=element["keep"],  # type: ignore[arg-type]
        features=element.get("features"),  # type: ignore[arg-type]
    )


def held_out_metrics(step: Callable[[Batch], Any], elements: Iterable[Element]) -> Metrics:
    """Means of the step's metrics over held-out batches, weighted by the blocks in each; the acceptance of a slot, by
    how often the slot counts."""
    parts = [jax.device_get(step(to_batch(element))) for element in elements]

    def mean(name: str) -> np.ndarray:
        count = "slots" if name == "acceptance_by_slot" else "blocks"
        values, weights = (np.asarray([part[key] for part in parts], np.float64) for key in (name, count))
        return np.sum(values * weights, axis=0) / np.maximum(np.sum(weights, axis=0), 1.0)

    return {name: mean(name) for name in parts[0] if name not in ("blocks", "slots")}


def prompts(records: Sequence[Record], count: int, longest: int) -> list[list[int]]:
    """Up to `count` different prompts of the records, none over `longest` tokens; more records change few of them."""
    chosen: dict[tuple[int, ...], None] = {}
    for record in sorted(records, key=lambda record: record.split_key):
        if len(chosen) < count and len(record.prompt) <= longest:
            chosen.setdefault(tuple(record.prompt))
    return [list(prompt) for prompt in chosen]


def accepted_length(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], new_tokens: int, temperature: float, seed: int
) -> float:
    """Tokens a round, the target's own included, averaged over all rounds of decoding the prompts."""
    generations = generate(
        target, drafter, prompts, new_tokens, SamplingParams(temperature), seed, target.config.eos_token_ids
    )
    lengths = [decode_round.accepted + 1 for generation in generations for decode_round in generation.rounds]
    return float(np.mean(lengths)) if lengths else 1.0  # every text ended with its first token: nothing was drafted
