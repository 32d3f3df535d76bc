"""A loaded drafter: its shape, its trained weights and the parts it borrows from its target."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax import target as target_lib
from dspark_jax.config import ConfigError, DrafterConfig
from dspark_jax.drafters import registry
from dspark_jax.drafters.base import Committed, DraftOutput, Frozen
from dspark_jax.target import Target

Params = dict[str, Any]
_teacher_forced = jax.jit(registry.teacher_forced, static_argnames=("config",))


@dataclasses.dataclass(frozen=True, eq=False)
class Drafter:
    config: DrafterConfig
    params: Params
    frozen: Frozen

    def teacher_forced(
        self, tokens_BS: jax.Array, taps_BSMD: jax.Array, anchors_BA: jax.Array, keep_BA: jax.Array | None = None,
        hidden_BSD: jax.Array | None = None,
    ) -> DraftOutput:  # fmt: skip
        """Drafts of blocks that start at `anchors`, each slot fed the true token before it (DSpark, teacher forcing).

        tokens [B, S] ids; taps [B, S, M, D] raw target features of `config.target_layer_ids`; anchors [B, A]
        positions. Where `keep` is False a block is a filler: it is computed at position 0 and means nothing. `hidden`
        [B, S, D], the target's hidden states after its final norm, is read by MTP only. A plain draft model has taps of
        no layer, [B, S, 0, D], and looks at neither.
        """
        anchors_BA = jnp.asarray(anchors_BA, jnp.int32)
        if keep_BA is not None:
            anchors_BA = jnp.where(jnp.asarray(keep_BA, bool), anchors_BA, 0)
        plain = self.config.kind.whole_model  # whose width is its own
        wanted = (len(self.config.target_layer_ids), taps_BSMD.shape[-1] if plain else self.config.d_model)
        if taps_BSMD.ndim != 4 or taps_BSMD.shape[2:] != wanted:
            raise ConfigError(f"target features have shape {taps_BSMD.shape}: expected [batch, sequence, {wanted}]")
        if hidden_BSD is None and self.config.kind.reads_hidden:
            raise ConfigError(f"{self.config.algorithm} drafts from the target's hidden states: give hidden_BSD")
        taps_BSMD, shape = jnp.asarray(taps_BSMD), (*taps_BSMD.shape[:2], self.config.d_model)
        hidden_BSD = jnp.zeros(shape, jnp.float32) if hidden_BSD is None else jnp.asarray(hidden_BSD)
        committed = Committed(jnp.asarray(tokens_BS, jnp.int32), taps_BSMD, hidden_BSD)
        return _teacher_forced(self.config, self.params, self.frozen, committed, anchors_BA)


def frozen_parts(target_params: Params, draft_to_target: np.ndarray | None) -> Frozen:
    """The target's embedding, and the rows of its head that the draft vocabulary needs."""
    head_VD = target_lib.head_table(target_params)
    if draft_to_target is None:
        return Frozen(target_params["embed"], head_VD)
    d2t_V = jnp.asarray(draft_to_target, jnp.int32)
    return Frozen(target_params["embed"], head_VD[d2t_V], d2t_V)


def servable(config: DrafterConfig, params: Params, frozen: Frozen) -> Drafter:
    """The drafter as it is served: what can be multiplied out beforehand is."""
    return Drafter(*registry.fold(config, params, frozen), frozen)


def load_drafter(
    path: str | Path, target: Target, dtype: str = "float32", self_test: bool = False, block_size: int = 0
) -> Drafter:
    """Loads a drafter checkpoint for `target`: a folder in one of the public formats (DeepSpec, z-lab, SpecForge,
    speculators) or in ours for MTP, or a Hugging Face Hub id, `org/name` or `org/name@revision`. `dtype` is the compute
    dtype of its matrices. What the checkpoint was taken for is said in one line on stderr.

    A language model with the target's tokens, wherever `load_target` finds one, is taken for a plain draft model. It
    drafts `block_size` tokens a block; 0: as many as it was trained for here, else 4. Other drafters bring their own.

    The embedding and the head are the target's: copies in the checkpoint are compared with them, then dropped. A tied
    Markov table is multiplied out (`dspark.untied`).
    `self_test` lets the target write a few lines, to see whether the drafter is served as it was trained, and issues
    a DrafterWarning that names the likely cause where it is not, or where its own record names other weights or another
    chat template than this target's; it needs the target's tokenizer, and costs the
    compilation of a few small programs, which is why a server asks for it and a test does not.
    Raises ConfigError naming the key or tensor that is missing, unused, misshapen or made for another target, and
    where a draft model's tokens are not the target's.
    """
    from dspark_jax.weights import selftest
    from dspark_jax.weights.drafter_files import check_fits, open_drafter

    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype = {dtype!r}: expected 'float32' or 'bfloat16'")
    checkpoint = open_drafter(path, target.config, block_size, dtype)
    print(f"drafter {path}: {checkpoint.summary}", file=sys.stderr)
    check_fits(checkpoint, target)
    frozen = frozen_parts(target.params, checkpoint.draft_to_target)
    params = target_lib.cast_params(checkpoint.params, dtype)
    drafter = servable(checkpoint.config, params, frozen)
    if self_test:
        prompts = selftest.questions(target)
        if not prompts:
            raise ConfigError("self_test needs a tokenizer with a chat template; call weights.selftest with prompts")
        selftest.warn_of_another_target(path, checkpoint.notes, target)
        selftest.warn_unless_sound(selftest.self_test(target, drafter, prompts))
    return drafter
