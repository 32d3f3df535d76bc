"""The self-test at load: silent about a sound drafter, and it names each way of serving one wrongly.

The drafter is trained here, in seconds, on the text of a tiny target whose next tokens take some context to guess.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import make_drafter, make_target, random_tokens

from dspark_jax import ConfigError, Drafter, layers, load_drafter, load_target
from dspark_jax.drafters import dspark
from dspark_jax.target import Target
from dspark_jax.weights import selftest
from dspark_jax.weights.drafter_files import write_drafter
from dspark_jax.weights.selftest import DrafterWarning, self_test

SMALL = {"vocab_size": 24, "d_model": 24, "d_ff": 24, "num_heads": 2, "num_kv_heads": 1}
TARGET = make_target(seed=2, mixing=0.5, num_layers=4, rope_theta=1e6, **SMALL)
PLAIN: dict[str, Any] = {"markov_rank": 0, "confidence_head": False, "confidence_with_markov": False, "num_layers": 1}
LENGTH, IDS, STEPS, BATCH = 28, (0, 1), 200, 12
PROMPTS = random_tokens(99, 8, 4, vocab_size=24)


@functools.cache
def texts() -> jax.Array:
    """Greedy texts of the target [B, S]."""
    return selftest._rollout(
        TARGET.config, TARGET.params, jnp.asarray(random_tokens(1, 64, 4, vocab_size=24)), (0,), LENGTH - 4
    )[0]


@functools.cache
def trained(normed: bool = False) -> Drafter:
    """A drafter after a few hundred steps of cross-entropy; `normed`: its last tap came after the final norm."""
    drafter = make_drafter(TARGET, seed=3, target_layer_ids=IDS, **PLAIN)
    tokens = texts()
    taps = TARGET.forward(tokens, IDS).taps_BSMD
    if normed:
        end = layers.rms_norm(taps[:, :, -1], TARGET.params["final_norm"], TARGET.config.norm_eps)
        taps = taps.at[:, :, -1].set(end)
    anchors = jnp.arange(3, LENGTH - 5)
    labels = tokens[:, anchors[:, None] + 1 + jnp.arange(4)[None, :]]
    optimizer = optax.adam(optax.cosine_decay_schedule(1e-2, STEPS))

    def loss(params: Any, rows: jax.Array) -> jax.Array:
        at = jnp.broadcast_to(anchors[None, :], (len(rows), len(anchors)))
        out = dspark.teacher_forced(drafter.config, params, drafter.frozen, tokens[rows], taps[rows], at)
        return optax.softmax_cross_entropy_with_integer_labels(out.logits_BAGV, labels[rows]).mean()

    @jax.jit
    def train(params: Any) -> Any:
        def step(carry: Any, key: jax.Array) -> Any:
            params, state = carry
            gradient = jax.grad(loss)(params, jax.random.randint(key, (BATCH,), 0, len(tokens)))
            with jax.numpy_dtype_promotion("standard"):
                updates, state = optimizer.update(gradient, state)
            return (optax.apply_updates(params, updates), state), None

        with jax.numpy_dtype_promotion("standard"):
            start = (params, optimizer.init(params))
        return jax.lax.scan(step, start, jax.random.split(jax.random.key(0), STEPS))[0][0]

    return dataclasses.replace(drafter, params=train(drafter.params))


def changed(drafter: Drafter, **changes: Any) -> Drafter:
    return dataclasses.replace(drafter, config=dataclasses.replace(drafter.config, **changes))


FAULTS: dict[str, tuple[Callable[[], Drafter], str]] = {
    "wrong layout": (lambda: changed(trained(), layout="fill_in"), "layout 'anchor_first' in place of 'fill_in'"),
    "layer ids + 1": (lambda: changed(trained(), target_layer_ids=(1, 2)), "layer ids [0, 1] in place of [1, 2]"),
    "rope theta 10000": (lambda: changed(trained(), rope_theta=1e4), "rope theta"),
    "tap after the norm": (lambda: trained(normed=True), "the target's final norm over its last tap (layer 1)"),
}


def test_a_sound_drafter_is_left_alone():
    report = self_test(TARGET, trained(), PROMPTS.tolist())
    assert report.cause is None
    assert report.accepted > 1
    assert max(report.changed.values()) < report.accepted + 0.2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        selftest.warn_unless_sound(report)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(fault):
    drafter, cause = FAULTS[fault]
    report = self_test(TARGET, drafter(), PROMPTS.tolist())
    assert (report.cause or "").startswith(cause)
    with pytest.warns(DrafterWarning, match="probably not served as it was trained"):
        selftest.warn_unless_sound(report)
    assert cause in report.message


def test_a_drafter_that_is_merely_bad_is_left_alone():
    report = self_test(TARGET, make_drafter(TARGET, seed=5, target_layer_ids=IDS, **PLAIN), PROMPTS.tolist())
    assert report.cause is None


def test_prompts_are_needed():
    with pytest.raises(ConfigError, match="needs prompts"):
        self_test(TARGET, trained(), [])
    with pytest.raises(ConfigError, match="needs prompts"):
        self_test(TARGET, trained(), [[1, 2], []])


class Chat:
    """As much of a tokenizer as the self-test asks for."""

    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        assert add_generation_prompt
        return [(len(messages[0]["content"]) * factor) % 24 for factor in (1, 3, 5, 7)]


def test_loading_runs_it_when_asked(tmp_path: Path):
    sound = trained()
    write_drafter(tmp_path / "good", "deepspec", sound.config, sound.params, None, {}, "float32")
    shifted = dataclasses.replace(sound.config, target_layer_ids=(1, 2))
    write_drafter(tmp_path / "bad", "deepspec", shifted, sound.params, None, {}, "float32")
    chatty = Target(TARGET.config, TARGET.params, Chat())
    load_drafter(tmp_path / "good", chatty, self_test=True)
    load_drafter(tmp_path / "bad", chatty)
    with pytest.warns(DrafterWarning, match=r"layer ids \[0, 1\] in place of \[1, 2\]"):
        load_drafter(tmp_path / "bad", chatty, self_test=True)
    with pytest.raises(ConfigError, match="self_test needs a tokenizer"):
        load_drafter(tmp_path / "good", TARGET, self_test=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_markov", "qwen3_dflash"])
def test_the_golden_drafters_are_sound_and_their_faults_found(shared: Path, name: str):
    folder = shared / "golden" / name
    target = load_target(folder / "target")
    drafter = load_drafter(folder / "draft", target)
    arrays = np.load(folder / "decoding.npz")
    prompts = [arrays[f"p{i}_prompt"].tolist() for i in range(3)]
    assert self_test(target, drafter, prompts).cause is None
    for changes, cause in (
        ({"layout": "fill_in"}, "layout 'anchor_first'"),
        ({"rope_theta": 1e4}, "rope theta 1e+06"),
    ):
        assert (self_test(target, changed(drafter, **changes), prompts).cause or "").startswith(cause)


@pytest.mark.slow
def test_the_shipped_drafter_is_sound(smollm2_path: Path):
    target = load_target(smollm2_path)
    shipped = Path(__file__).resolve().parents[1] / "assets/smollm2-135m-dspark"
    load_drafter(shipped, target, self_test=True)
