"""From a config to everything that the loop runs on: target, records, vocabulary, sizes, models and frozen weights."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from dspark_jax import load_target, sharding
from dspark_jax.config import (
    Config,
    ConfigError,
    DrafterConfig,
    DraftSettings,
    TargetConfig,
    drafter_config,
    plain_drafter,
    require,
)
from dspark_jax.drafters import Drafter
from dspark_jax.drafters.base import Frozen
from dspark_jax.drafters.drafter import Params, frozen_parts, servable
from dspark_jax.target import Target, cast_params
from dspark_jax.verify import inverse_map
from dspark_jax.weights.drafter_files import check_writable, native_format
from dspark_jax.weights.fingerprint import weights_hash
from dspark_jax.weights.locate import read_target
from train import data, hosts
from train.bigrams import bigram_factors
from train.checkpoint import RunFacts
from train.conversations import Conversations, Record, load_conversations
from train.features import CachedFeatures
from train.objective import StepModels, StepWeights, target_shapes
from train.start import recounted, written_weights
from train.step import TrainState, init_state, replicated, state_shardings
from train.tiny import TINY, tiny_target


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """What does not change while a run lasts. `target` and `weights` share arrays, which lie on the mesh."""

    config: Config
    mesh: Mesh
    target: Target
    drafter: DrafterConfig
    conversations: Conversations
    train: list[Record]
    held_out: list[Record]
    shapes: list[data.Sizes]
    groups: list[data.Group]
    draft_vocabulary: np.ndarray | None
    models: StepModels
    weights: StepWeights
    features: CachedFeatures | None
    start_params: Params | None
    target_hash: str

    def servable(self, params: Params) -> tuple[Target, Drafter]:
        """Target and drafter as they are served, in the target's dtype, on devices of this host."""
        served = cast_params(params, self.config.target.dtype)
        if jax.process_count() == 1:
            return self.target, servable(self.drafter, served, self.weights.frozen)
        target = dataclasses.replace(self.target, params=hosts.local_copy(self.target.params))
        frozen = frozen_parts(target.params, self.draft_vocabulary)
        return target, servable(self.drafter, hosts.local_copy(served), frozen)

    def first_state(self, resumed: bool = False) -> TrainState:
        """The state that a new run begins with, on the mesh: fresh, or the weights of `train.start_from`; W1 and W2 as
        `train.markov_init` says. Of a `resumed` run it is the structure that counts."""
        where = state_shardings(self.models, self.mesh)
        with jax.set_mesh(self.mesh):
            state: TrainState = jax.jit(lambda: init_state(self.drafter, self.config), out_shardings=where)()
        if self.start_params is not None:
            return state._replace(params=sharding.place(self.start_params, where.params))
        if self.config.train.markov_init == "random" or resumed:
            return state
        c, seed = self.drafter, self.config.train.seed
        w1, w2 = hosts.of_first(bigram_factors(self.train, c.markov_rank, c.vocab_size, self.draft_vocabulary, seed))
        own = where.params["markov"]
        markov = state.params["markov"] | sharding.place({"w1": w1, "w2": w2}, {"w1": own["w1"], "w2": own["w2"]})
        return state._replace(params=state.params | {"markov": markov})

    def summary(self) -> list[str]:
        """What a user should see before the first step."""
        kept, skipped = self.conversations.records, self.conversations.skipped
        tokens, anchors = data.padding(self.groups)
        shapes = " or ".join(f"{shape.length} tokens and {shape.anchors} anchors" for shape in self.shapes)
        rows = sum(len(group.rows) for group in self.groups)
        thinking = sum(record.thinking for record in kept)
        foreign = sum(not record.regenerated for record in kept)
        lines = [
            f"target {self.target.config.name or self.config.target.path}, drafter of {self.drafter.num_layers} layers,"
            f" {self.drafter.num_drafts} drafts a block",
            f"{len(kept)} conversations: {len(self.train)} to train on, {len(self.held_out)} held out,"
            f" {self.conversations.truncated} cut at {self.config.data.max_length} tokens",
            f"{rows} rows of {shapes}; {tokens:.0%} of the tokens and {anchors:.0%} of the anchors are filler",
        ]
        if self.mesh.size > 1:
            axes = ", ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
            lines.append(f"{self.mesh.size} devices on {jax.process_count()} hosts: {axes}")
        if skipped:
            lines.append("skipped " + ", ".join(f"{count} ({reason})" for reason, count in skipped.items()))
        if self.draft_vocabulary is not None:
            covered = data.coverage(self.train, self.draft_vocabulary)
            lines.append(f"draft vocabulary of {len(self.draft_vocabulary)} ids covers {covered:.2%} of the answers")
        if thinking:
            lines.append(
                f"note: the assistant thinks aloud in {thinking} of {len(kept)} conversations; serve the drafter with"
                " thinking as it was trained"
            )
        if foreign:
            lines.append(
                f"note: {foreign} conversations were not written by train.regenerate with this target and template; a"
                " drafter learns best from its target's own answers"
            )
        return lines


def build(config: Config, resumed: RunFacts | None) -> Run:
    """Loads target and data. A run that is `resumed` has its weights and its draft vocabulary already.

    Raises ConfigError where target, data, mesh and settings do not fit together.
    """
    mesh = sharding.make_mesh(config.mesh)
    sharding.check_batch(mesh, config.train.batch_size, config.train.accumulation_steps)
    hosts.shard(mesh)
    target = _target(config, mesh)
    shape = target.config
    if target.tokenizer is None:
        raise ConfigError(f"target {config.target.path}: has no tokenizer, so conversations cannot be encoded")
    if config.data.max_length > shape.max_length:
        raise ConfigError(
            f"data max_length = {config.data.max_length} exceeds the target's context of {shape.max_length} tokens"
        )
    drafter = _drafter(config, shape)
    check_writable(native_format(drafter), drafter)
    conversations = load_conversations(config.data, target.tokenizer, shape.vocab_size, hosts.tokenising(), shape.name)
    train, held_out = data.split(conversations.records, config.data.validation_fraction)
    start_params, chosen = None, None

    def counted(known: np.ndarray | None = None) -> np.ndarray:
        always = {*shape.eos_token_ids, *target.tokenizer.special_ids}
        return data.draft_vocabulary(train, drafter.draft_vocab_size, shape.vocab_size, always, known)

    if resumed is not None:
        if resumed.draft_vocabulary is not None:
            chosen = np.asarray(resumed.draft_vocabulary, np.int32)
    elif config.train.start_from:
        start_params, old = written_weights(config.train, drafter, target)
        chosen = old
        if config.train.recount_vocabulary and old is not None:
            chosen = counted(old)
            start_params = recounted(start_params, old, chosen)
    elif drafter.draft_vocab_size:
        chosen = counted()
    frozen = _frozen(target.params, chosen, mesh)
    target_to_draft = None
    if chosen is not None:
        inverse = inverse_map(jax.numpy.asarray(chosen), shape.vocab_size)
        target_to_draft = sharding.place(np.asarray(inverse), replicated(mesh))
    features = None
    if config.data.features:
        features = CachedFeatures(Path(config.data.features), target, drafter)
        features.require(conversations.records)
    shapes = data.sizes(conversations.records, config.data)
    # Stacked layers compile faster and run as fast where the devices are wide; a CPU runs them several times slower.
    scan_layers = mesh.devices.flat[0].platform != "cpu"
    return Run(
        config=config,
        mesh=mesh,
        target=target,
        drafter=drafter,
        conversations=conversations,
        train=train,
        held_out=held_out,
        shapes=shapes,
        groups=data.groups(train, config.data, shapes),
        draft_vocabulary=chosen,
        models=StepModels(shape, drafter, config.loss, config.optimizer, config.train, scan_layers),
        weights=StepWeights(target.params, frozen, target_to_draft),
        features=features,
        start_params=start_params,
        target_hash=weights_hash(target.params),
    )


def _drafter(config: Config, target: TargetConfig) -> DrafterConfig:
    """The drafter of a run. A language model that training starts from has a shape of its own, not the target's."""
    drafter, path = drafter_config(config.draft, target), config.train.start_from
    if not drafter.kind.whole_model or not path:
        return drafter
    whole = read_target(path, only=())[0]
    for field in ("num_layers", "d_ff"):
        value, own = getattr(config.draft, field), getattr(whole, field)
        usual = value in (own, getattr(DraftSettings, field))
        require(usual, f"draft {field} = {value}: train start_from = {path} has {own}; leave it out")
    return plain_drafter(whole, config.draft.block_size, config.draft.confidence_head)


def _target(config: Config, mesh: Mesh) -> Target:
    """The target on the mesh. Raises ConfigError for a mesh that does not divide its weights, before they are read."""
    path = config.target.path
    if path == TINY:
        tiny = tiny_target()
        where = sharding.shardings(tiny.params, mesh)
        return dataclasses.replace(tiny, params=sharding.place(tiny.params, where))
    if mesh.size > 1:
        sharding.shardings(target_shapes(read_target(path, only=())[0]), mesh)
    return load_target(path, config.target.dtype, mesh)


def _frozen(params: Params, chosen: np.ndarray | None, mesh: Mesh) -> Frozen:
    """What the drafter borrows, on the mesh; the parts that are taken whole are the target's own arrays."""
    whole = frozen_parts(params, None)
    if chosen is None:
        return whole
    where = sharding.shardings(jax.eval_shape(frozen_parts, params, chosen), mesh)
    head_VD, d2t_V = jax.jit(lambda head_VD: (head_VD[chosen], chosen), out_shardings=(where[1], where[2]))(
        whole.head_VD
    )
    return Frozen(whole.embed_VD, head_VD, d2t_V)
