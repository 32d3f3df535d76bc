"""What an evaluation is asked to do: the two suites' sizes, and the options of the command."""

import dataclasses
from pathlib import Path
from typing import Literal

from dspark_jax import ConfigError
from dspark_jax.weights.locate import EMBEDDED
from serve.dtype import Dtype
from serve.suite_sets import PUBLIC

QUESTIONS = (1, 2, 3, 4, 5, 6, 7)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How much is measured. Variants are drafters made to draft fewer tokens, or without their sequential head."""

    sets: tuple[str, ...]
    prompts: int
    tokens: int
    max_prompt_tokens: int
    temperatures: tuple[float, ...]
    variant_prompts: int
    variant_temperatures: tuple[float, ...]
    lossless_prompts: int
    """Of each set, as many at a time as there are users at most."""
    single_prompts: int
    """Of each set, one at a time."""
    concurrency: tuple[int, ...]
    policies: tuple[str, ...]
    """Beside off, verifying all drafts and scheduled."""
    requests: int
    """Of each user."""
    repeats: int
    blocks: tuple[int, ...] = (4, 8, 12, 16)


SIZES = {
    "quick": Sizes(
        sets=("gsm8k", "humaneval", "mt-bench"), prompts=8, tokens=32, max_prompt_tokens=256,
        temperatures=(0.0, 1.0), variant_prompts=8, variant_temperatures=(0.0,), lossless_prompts=4, single_prompts=1,
        concurrency=(1, 4, 8), policies=(), requests=1, repeats=1,
    ),
    "paper": Sizes(
        sets=tuple(PUBLIC), prompts=40, tokens=64, max_prompt_tokens=512,
        temperatures=(0.0, 1.0), variant_prompts=16, variant_temperatures=(1.0,), lossless_prompts=16, single_prompts=2,
        concurrency=(1, 2, 4, 8), policies=("fixed:2", "threshold:0.5"), requests=2, repeats=3,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Args:
    """Evaluate drafters."""

    suite: Literal["quick", "paper"]
    """How much is measured."""
    target: str = EMBEDDED
    """safetensors directory, .gguf file, or smollm2-135m."""
    drafter: tuple[Path, ...] = ()
    """Folders of drafters; without any the one shipped for smollm2-135m. The first is what others are compared with."""
    dtype: Dtype = "fast"
    """Compute dtype of target and drafter; fast: the one that is faster on this machine."""
    tensor: int = 1
    """Devices that weights and caches are split over."""
    data: Path | None = None
    """Folder of prompt sets, gsm8k.jsonl and so on, {"turns": ["text"]} a line; without it built-in prompts."""
    sets: tuple[str, ...] = ()
    """Names of sets, if not those of the suite."""
    out: Path | None = None
    """Folder for report.html, results.json, pictures and finished cells; without it suite-quick or suite-paper."""
    limit: int | None = None
    """Prompts a set."""
    tokens: int | None = None
    """New tokens a prompt."""
    max_prompt_tokens: int | None = None
    """Longer prompts are passed over."""
    temperatures: tuple[float, ...] | None = None
    """Of accepted length, acceptance, threshold and calibration."""
    questions: tuple[int, ...] = QUESTIONS
    """Which of the seven to answer."""
    against: Path | None = None
    """results.json of an earlier run, to compare with."""
    seed: int = 0

    def sizes(self) -> Sizes:
        """The suite's sizes with what was asked for. Raises ConfigError for settings that measure nothing."""
        for field, least in (("limit", 1), ("tokens", 2), ("max_prompt_tokens", 1)):
            if (value := getattr(self, field)) is not None and value < least:
                raise ConfigError(f"--{field.replace('_', '-')} {value}: expected at least {least}")
        if not self.questions or not set(self.questions) <= set(QUESTIONS):
            raise ConfigError(f"--questions {' '.join(map(str, self.questions))}: expected some of 1 to 7")
        if self.temperatures is not None and (not self.temperatures or min(self.temperatures) < 0):
            raise ConfigError(f"--temperatures {self.temperatures}: expected one or more, none below 0")
        base = SIZES[self.suite]
        temperatures = base.temperatures if self.temperatures is None else tuple(dict.fromkeys(self.temperatures))
        prompts = self.limit or base.prompts
        return dataclasses.replace(
            base,
            prompts=prompts,
            tokens=self.tokens or base.tokens,
            max_prompt_tokens=self.max_prompt_tokens or base.max_prompt_tokens,
            temperatures=temperatures,
            variant_temperatures=tuple(t for t in base.variant_temperatures if t in temperatures) or temperatures[:1],
            **{f: min(getattr(base, f), prompts) for f in ("variant_prompts", "lossless_prompts", "single_prompts")},
        )  # fmt: skip
