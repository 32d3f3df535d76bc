"""The self-test at load: silent about a sound drafter, and it names each way of serving one wrongly.

The sound drafters are the golden ones (../shared/golden), trained on their targets' own text, and the shipped one.
"""

import dataclasses
import functools
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import make_drafter, make_target, random_tokens

from dspark_jax import ConfigError, Drafter, load_drafter, load_target
from dspark_jax.target import Target
from dspark_jax.weights import export, selftest
from dspark_jax.weights.fingerprint import weights_hash
from dspark_jax.weights.selftest import DrafterWarning, Report, self_test
from train.tiny import tiny_target

MARKOV, DFLASH = "qwen3_markov", "qwen3_dflash"
TARGET = make_target()


@functools.cache
def golden(folder: Path) -> tuple[Target, Drafter, list[list[int]]]:
    target = load_target(folder / "target")
    arrays = np.load(folder / "decoding.npz")
    return target, load_drafter(folder / "draft", target), [arrays[f"p{i}_prompt"].tolist() for i in range(3)]


def changed(drafter: Drafter, **changes: Any) -> Drafter:
    return dataclasses.replace(drafter, config=dataclasses.replace(drafter.config, **changes))


def for_normed_tap(target: Target, drafter: Drafter) -> Drafter:
    """The same drafter, had it been trained with the target's final norm over its last tap: its weights for that tap
    take off what the norm puts on, up to a token's own length."""
    ids = drafter.config.target_layer_ids
    taps = np.asarray(target.forward(random_tokens(0, 4, 32, vocab_size=300), ids).taps_BSMD)[:, :, -1]
    length = np.sqrt((taps**2).mean(-1)).mean()
    fc = np.array(drafter.params["backbone"]["fc"])
    fc[:, -1] *= length / np.asarray(target.params["final_norm"])[None, :]
    backbone = drafter.params["backbone"] | {"fc": jnp.asarray(fc)}
    return dataclasses.replace(drafter, params=drafter.params | {"backbone": backbone})


def report_of(folder: Path, fault: str) -> Report:
    target, drafter, prompts = golden(folder)
    ids = drafter.config.target_layer_ids
    broken = {
        "none": lambda: drafter,
        "layout": lambda: changed(drafter, layout="fill_in"),
        "layer ids + 1": lambda: changed(drafter, target_layer_ids=tuple(i + 1 for i in ids)),
        "rope": lambda: changed(drafter, rope_theta=1e4),
        "window": lambda: changed(drafter, layer_windows=(2,) * drafter.config.num_layers),
        "tap after the norm": lambda: for_normed_tap(target, drafter),
    }[fault]()
    return self_test(target, broken, prompts)


def test_a_sound_drafter_is_left_alone(shared: Path) -> None:
    report = report_of(shared / "golden" / MARKOV, "none")
    assert report.cause is None
    assert report.accepted > 1
    assert max(report.changed.values()) < report.accepted
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        selftest.warn_unless_sound(report)


def test_a_wrong_layout_is_named(shared: Path) -> None:
    report = report_of(shared / "golden" / MARKOV, "layout")
    assert report.cause == "layout 'anchor_first' in place of 'fill_in'"
    with pytest.warns(DrafterWarning, match="probably not served as it was trained: .* with layout 'anchor_first'"):
        selftest.warn_unless_sound(report)


CAUSES = {
    "layout": "layout 'anchor_first' in place of 'fill_in'",
    "layer ids + 1": "layer ids [1, 3] in place of [2, 4]",
    "rope": "rope theta 1e+06 in place of 10000",
    "window": "no sliding window in place of [2, 2]",
    "tap after the norm": "the target's final norm over its last tap",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (DFLASH, "none"),
        (DFLASH, "layout"),
        (DFLASH, "layer ids + 1"),  # of the other drafter's ids, one would be the last layer: refused when read
        (DFLASH, "rope"),
        (MARKOV, "rope"),
        (DFLASH, "window"),
        (DFLASH, "tap after the norm"),
        (MARKOV, "tap after the norm"),
    ],
)
def test_each_fault_is_named(shared: Path, name: str, fault: str) -> None:
    report = report_of(shared / "golden" / name, fault)
    if fault == "none":
        assert report.cause is None
    else:
        assert (report.cause or "").startswith(CAUSES[fault]), report


@pytest.mark.slow
def test_a_drafter_that_is_merely_bad_is_left_alone() -> None:
    target = make_target()
    drafter = make_drafter(target, markov_rank=0, confidence_head=False, confidence_with_markov=False, num_layers=1)
    assert self_test(target, drafter, random_tokens(0, 2, 4).tolist(), 16).cause is None


def test_what_is_tried_is_what_could_be_amiss() -> None:
    """Both ways of causality and the window where there is one, and no drafter that could not be."""

    def tried(length: int, **changes: Any) -> list[str]:
        config = make_drafter(TARGET, **changes).config
        return [name for name, *_ in selftest._changes(config, TARGET.config, (-1, 0, 1), length)]

    causal = {name: f"{name} layer causal inside the block" for name in ("no", "every")}
    window = "no sliding window in place of [7, 0]"
    layout = "layout 'fill_in' in place of 'anchor_first'"
    names = tried(64)
    assert {layout, causal["every"]} <= set(names) and not {causal["no"], window} & set(names)
    assert causal.keys() <= {name.split()[0] for name in tried(64, layer_causal=(True, False))}
    assert causal["every"] not in tried(64, layer_causal=(True, True))
    assert window in tried(64, layer_windows=(7, 0)) and window not in tried(7, layer_windows=(7, 0))
    heads = {"markov_head_type": "ngram", "ngram_tokens": 3, "block_size": 3}
    assert layout not in tried(64, **heads) and causal["every"] in tried(64, **heads)


def test_prompts_are_needed() -> None:
    target = make_target()
    for prompts in ([], [[1, 2], []]):
        with pytest.raises(ConfigError, match="needs prompts"):
            self_test(target, make_drafter(target), prompts)
    assert selftest.questions(target) == []


class Chat:
    """As much of a tokenizer as the self-test asks for: the golden prompts, one after the other."""

    template_hash = "asked before"

    def __init__(self, prompts: list[list[int]]) -> None:
        self.prompts = prompts

    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        assert add_generation_prompt
        return self.prompts[selftest.QUESTIONS.index(messages[0]["content"]) % len(self.prompts)]


def test_a_drafter_of_other_weights_or_another_template_is_named() -> None:
    target, other = tiny_target(), tiny_target(1)
    notes = {"target_weights": weights_hash(target.params), "config": {"target": {"path": "tiny"}}}
    assert target.tokenizer is not None and weights_hash(other.params) != notes["target_weights"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for known in ({}, notes, notes | {"chat_template": target.tokenizer.template_hash}):
            selftest.warn_of_another_target("here", known, target)
    with pytest.warns(DrafterWarning, match="on other weights than this target's \\('tiny', here 'tiny-"):
        selftest.warn_of_another_target("here", notes, other)
    with pytest.warns(DrafterWarning, match="was trained with chat template abc, this target has"):
        selftest.warn_of_another_target("here", notes | {"chat_template": "abc"}, target)


@pytest.mark.slow
def test_loading_runs_it_when_asked(shared: Path, tmp_path: Path) -> None:
    folder = shared / "golden" / MARKOV
    target, _, prompts = golden(folder)
    chatty = Target(target.config, target.params, Chat(prompts))
    load_drafter(folder / "draft", chatty, self_test=True)
    # The same weights in the speculators format, whose layout can be told wrongly.
    export.export(str(folder / "draft"), str(tmp_path / "bad"), "speculators")
    path = tmp_path / "bad" / "config.json"
    raw = json.loads(path.read_text()) | {"sample_from_anchor": False}
    raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = 6
    path.write_text(json.dumps(raw))
    load_drafter(tmp_path / "bad", chatty)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder / "draft", elsewhere)
    config = json.loads((elsewhere / "config.json").read_text()) | {"dspark_jax": {"target_weights": "others"}}
    (elsewhere / "config.json").write_text(json.dumps(config))
    with pytest.warns(DrafterWarning, match="elsewhere: was trained on other weights"):
        load_drafter(elsewhere, chatty, self_test=True)
    with pytest.warns(DrafterWarning, match="layout 'anchor_first' in place of 'fill_in'"):
        load_drafter(tmp_path / "bad", chatty, self_test=True)
    with pytest.raises(ConfigError, match="self_test needs a tokenizer"):
        load_drafter(folder / "draft", target, self_test=True)


@pytest.mark.slow
def test_the_shipped_drafter_is_sound(smollm2_path: Path) -> None:
    """Says nothing: its warning would be an error under pytest."""
    shipped = Path(__file__).resolve().parents[1] / "assets/smollm2-135m-dspark"
    load_drafter(shipped, load_target(smollm2_path), self_test=True)
