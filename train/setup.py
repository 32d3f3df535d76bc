"""From a config to everything that the loop runs on: target, records, vocabulary, sizes, models and frozen weights."""

import dataclasses
from pathlib import Path

import jax
import numpy as np

from dspark_jax import load_target
from dspark_jax.config import Config, ConfigError, DrafterConfig, drafter_config
from dspark_jax.drafters import Drafter
from dspark_jax.drafters.drafter import Params, frozen_parts
from dspark_jax.target import Target, cast_params
from dspark_jax.verify import inverse_map
from dspark_jax.weights.deepspec import read_drafter
from train import data
from train.conversations import Conversations, Record, load_conversations
from train.features import CachedFeatures
from train.step import StepModels, StepWeights
from train.tiny import TINY, tiny_target


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """What does not change while a run lasts."""

    config: Config
    target: Target
    drafter: DrafterConfig
    conversations: Conversations
    train: list[Record]
    held_out: list[Record]
    size: data.Sizes
    draft_vocabulary: np.ndarray | None
    models: StepModels
    weights: StepWeights
    features: CachedFeatures | None
    start_params: Params | None

    def servable(self, params: Params) -> Drafter:
        """The drafter as it is served, in the target's dtype."""
        return Drafter(self.drafter, cast_params(params, self.config.target.dtype), self.weights.frozen)

    def summary(self) -> list[str]:
        """What a user should see before the first step."""
        kept, skipped = self.conversations.records, self.conversations.skipped
        tokens, anchors = data.padding(self.train, self.size)
        foreign = sum(not record.regenerated for record in kept)
        lines = [
            f"target {self.target.config.name or self.config.target.path}, drafter of {self.drafter.num_layers} layers,"
            f" {self.drafter.num_drafts} drafts a block",
            f"{len(kept)} conversations: {len(self.train)} to train on, {len(self.held_out)} held out,"
            f" {self.conversations.truncated} cut at {self.config.data.max_length} tokens",
            f"rows of {self.size.length} tokens ({tokens:.0%} padding) and {self.size.anchors} anchors ({anchors:.0%})",
        ]
        if skipped:
            lines.append("skipped " + ", ".join(f"{count} ({reason})" for reason, count in skipped.items()))
        if self.draft_vocabulary is not None:
            covered = data.coverage(self.train, self.draft_vocabulary)
            lines.append(f"draft vocabulary of {len(self.draft_vocabulary)} ids covers {covered:.2%} of the answers")
        if foreign:
            lines.append(
                f"note: {foreign} conversations were not written by train.regenerate; a drafter learns best from its"
                " target's own answers"
            )
        return lines


def build(config: Config, draft_vocabulary: list[int] | None) -> Run:
    """Loads target and data. `draft_vocabulary` is that of a resumed run; without one it is counted here.

    Raises ConfigError where target, data and settings do not fit together.
    """
    target = tiny_target() if config.target.path == TINY else load_target(config.target.path, config.target.dtype)
    shape = target.config
    if target.tokenizer is None:
        raise ConfigError(f"target {config.target.path}: has no tokenizer, so conversations cannot be encoded")
    if config.data.max_length > shape.max_length:
        raise ConfigError(
            f"data max_length = {config.data.max_length} exceeds the target's context of {shape.max_length} tokens"
        )
    drafter = drafter_config(config.draft, shape)
    if drafter.layout != "anchor_first":
        raise ConfigError(f"draft layout = {drafter.layout!r}: drafters are written in DeepSpec's format, anchor_first")
    conversations = load_conversations(config.data, target.tokenizer, shape.vocab_size)
    train, held_out = data.split(conversations.records, config.data.validation_fraction)
    start_params, chosen = None, None
    if draft_vocabulary is not None:
        chosen = np.asarray(draft_vocabulary, np.int32)
    elif config.train.start_from:
        start_params, chosen = _start(config.train.start_from, drafter, target)
    elif drafter.draft_vocab_size:
        always = {*shape.eos_token_ids, *target.tokenizer.special_ids}
        chosen = data.draft_vocabulary(train, drafter.draft_vocab_size, shape.vocab_size, always)
    frozen = frozen_parts(target.params, chosen)
    target_to_draft = None if chosen is None else inverse_map(jax.numpy.asarray(chosen), shape.vocab_size)
    features = None
    if config.data.features:
        features = CachedFeatures(Path(config.data.features), target, drafter)
        features.require(conversations.records)
    return Run(
        config=config,
        target=target,
        drafter=drafter,
        conversations=conversations,
        train=train,
        held_out=held_out,
        size=data.sizes(conversations.records, config.data),
        draft_vocabulary=chosen,
        models=StepModels(shape, drafter, config.loss, config.optimizer, config.train),
        weights=StepWeights(target.params, frozen, target_to_draft),
        features=features,
        start_params=start_params,
    )


def _start(path: str, drafter: DrafterConfig, target: Target) -> tuple[Params, np.ndarray | None]:
    """Weights and draft vocabulary of a written drafter. Raises ConfigError where its shape is not the run's."""
    config, params, draft_to_target = read_drafter(path, target)
    if config != drafter:
        differing = [f.name for f in dataclasses.fields(config) if getattr(config, f.name) != getattr(drafter, f.name)]
        raise ConfigError(f"train start_from = {path}: its {', '.join(differing)} differ from the run's draft settings")
    return jax.tree.map(jax.numpy.asarray, params), draft_to_target
