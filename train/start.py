"""What a run takes over from a written drafter: its weights, fitted to the run's vocabulary and depth."""

import dataclasses

import jax
import numpy as np

from dspark_jax.config import ConfigError, DrafterConfig, TrainSettings, require
from dspark_jax.drafters.drafter import Params
from dspark_jax.target import Target
from dspark_jax.weights.drafter_files import read_drafter
from train import hosts


def written_weights(
    settings: TrainSettings, drafter: DrafterConfig, target: Target
) -> tuple[Params, np.ndarray | None]:
    """Weights and draft vocabulary of the drafter that `train.start_from` names.

    The run's drafter may have more layers, and blocks of another size, on which no weight depends. The size of the
    vocabulary may differ where it is counted again. Raises ConfigError where anything else of its shape is not the
    run's.
    """
    path = settings.start_from
    # What a drafter has copies of is compared with the target's own, which must be whole on this host for that.
    shared = {name: target.params[name] for name in ("embed", "head") if name in target.params}
    config, params, draft_to_target = read_drafter(path, dataclasses.replace(target, params=hosts.to_host(shared)))
    if settings.recount_vocabulary:
        for size in (config.draft_vocab_size, drafter.draft_vocab_size):
            require(size > 0, f"train recount_vocabulary: {path} and the run both need a reduced draft vocabulary")
        config = dataclasses.replace(config, draft_vocab_size=drafter.draft_vocab_size)
    if config.algorithm == drafter.algorithm and config.layout == drafter.layout:
        config = dataclasses.replace(config, block_size=drafter.block_size)
    params = jax.tree.map(jax.numpy.asarray, params)
    if _can_grow(config, drafter):
        params = _deepened(params, config.num_layers, drafter.num_layers)
        config = dataclasses.replace(config, num_layers=drafter.num_layers)
    if config != drafter:
        differing = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(drafter, f.name)]
        raise ConfigError(f"train start_from = {path}: its {', '.join(differing)} differ from the run's draft settings")
    return params, draft_to_target


def _can_grow(written: DrafterConfig, drafter: DrafterConfig) -> bool:
    """Whether further layers can begin as nothing. Gemma's normalise what a layer adds, so zeros there learn nothing;
    layers with rules of their own would need new ones."""
    plain = written.kind.can_grow and written.family == "qwen3"
    return plain and written.num_layers < drafter.num_layers and not (written.layer_windows or written.layer_causal)


def _deepened(params: Params, old: int, new: int) -> Params:
    """More layers on top, each a copy of the last that adds nothing yet: its two output projections are zero, and these
    learn from the first step (LLaMA Pro, arXiv 2401.02415, section 3.2)."""
    backbone = params["backbone"]
    last = backbone[f"layers_{old - 1}"]
    silent = last | {name: jax.numpy.zeros_like(last[name]) for name in ("o", "down")}
    added = {f"layers_{number}": jax.tree.map(jax.numpy.copy, silent) for number in range(old, new)}
    return params | {"backbone": backbone | added}


def recounted(params: Params, old_V: np.ndarray, new_V: np.ndarray) -> Params:
    """The weights for another draft vocabulary: its rows of W2, zero for ids that the old one lacks."""
    if "markov" not in params:
        return params
    place_V = np.minimum(np.searchsorted(old_V, new_V), len(old_V) - 1)
    known_V1 = (old_V[place_V] == new_V)[:, None]
    return params | {
        "markov": params["markov"] | {"w2": jax.numpy.where(known_V1, params["markov"]["w2"][place_V], 0.0)}
    }
