"""Which module drafts for a config, and what is the same for all of them."""

import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax.config import DrafterConfig
from dspark_jax.drafters import chain, dflash2, dspark, lm
from dspark_jax.drafters.base import Algorithm, BlockFeatures, Committed, DraftOutput, Fold, Frozen, LabelScores, Params
from dspark_jax.kv_cache import LayerCache

_ALGORITHMS: dict[str, Algorithm] = {"dspark": dspark, "dflash2": dflash2, "eagle3": chain, "mtp": chain, "lm": lm}
# What only some of them have; see each type for what stands in for it elsewhere.
_LABEL_SCORES: dict[str, LabelScores] = {"dflash2": dflash2.label_scores}
_FOLD: dict[str, Fold] = {"dspark": dspark.untied, "dflash2": dflash2.fold}


def algorithm(config: DrafterConfig) -> Algorithm:
    """The functions that train and run the drafter of a config."""
    return _ALGORITHMS[config.algorithm]


def label_scores(
    config: DrafterConfig, params: Params, frozen: Frozen, blocks: BlockFeatures, labels_BAG: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Logits [B, A, G, V] of teacher-forced blocks and, where it is not simply theirs, the cross-entropy [B, A, G] of
    the labels (see `LabelScores`)."""
    score, features = _LABEL_SCORES.get(config.algorithm), (blocks.hidden_BAGD, blocks.latent_BAGR)
    if score is not None:
        return score(config, params, frozen, *features, labels_BAG)
    return algorithm(config).draft_logits(config, params, frozen, *features), None


def fold(config: DrafterConfig, params: Params, frozen: Frozen) -> tuple[DrafterConfig, Params]:
    """The drafter in the form in which it is served (see `Fold`)."""
    folded = _FOLD.get(config.algorithm)
    return (config, params) if folded is None else folded(config, params, frozen)


def multiplied_out(config: DrafterConfig, params: Params, frozen: Frozen) -> Frozen:
    """With a vanilla Markov head as a table of transitions. Raises ConfigError for a drafter that has none."""
    return frozen._replace(transition_VW=dspark.transition_table(config, params))


def init_caches(config: DrafterConfig, batch: int, length: int, dtype: jnp.dtype) -> list[LayerCache]:
    """Empty dense context caches for weights of `dtype`."""
    dtype = kv_cache.compute_dtype(dtype)
    return [kv_cache.empty(batch, heads, length, size, dtype) for heads, size in algorithm(config).cache_layers(config)]


def teacher_forced(
    config: DrafterConfig, params: Params, frozen: Frozen, committed: Committed, anchors_BA: jax.Array
) -> DraftOutput:
    """Drafts of the blocks at `anchors` in rows of one document each, every slot fed the true token before it."""
    run, tokens_BS = algorithm(config), committed.tokens_BS
    rows = run.context_rows(config, params, frozen, committed, jnp.zeros_like(tokens_BS))
    blocks = run.teacher_forced_blocks(config, params, frozen, tokens_BS, rows, anchors_BA)
    logits = run.draft_logits(config, params, frozen, blocks.hidden_BAGD, blocks.latent_BAGR)
    return DraftOutput(logits, blocks.confidence_BAG)
