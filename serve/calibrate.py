"""Calibrates a drafter's confidence head on real rollouts (DSpark paper, sequential temperature scaling).

    python -m serve.calibrate [--target PATH --drafter FOLDER] --prompts FILE.jsonl [--temperature 0]

Every position is verified, so each has a label. The prompts of each domain are split in three: half fit the
temperatures, a quarter chooses between them and none at all, and the last quarter, seen by neither, gives the numbers
that are reported. The temperatures go to calibration.json beside the drafter, where the engine finds them.

They fit decoding with one temperature, top-k and top-p, drafts from the engine's usual shortlist, verified token by
token. The engine has one set of them for all its requests.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dspark_jax import ConfigError, Drafter, Generation, SamplingParams, Target, calibrate, generate
from serve import report
from serve.calibration import FILE, write_temperatures
from serve.dtype import Dtype
from serve.prompts import choose_prompts, encode
from serve.setup import cache_programs, load_models
from serve.sizes import EngineConfig

LEAST_BLOCKS = 50  # of each split: fewer say nothing about 20 bins
LEAST_IN_BIN = 5  # of a reliability diagram


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Blocks of real decoding: confidence logits [N, G], accepted drafts [N], positions that count [N, G]."""

    logits_NG: np.ndarray
    accepted_N: np.ndarray
    mask_NG: np.ndarray


def collect(generations: Sequence[Generation], eos_token_ids: Sequence[int], num_drafts: int) -> Rollouts:
    """The rounds of texts. Positions after an accepted end of sequence are masked: nobody would verify them."""
    rows = [round_ for generation in generations for round_ in generation.rounds]
    logits_NG = np.array([round_.confidence for round_ in rows], np.float64).reshape(-1, num_drafts)
    accepted_N = np.array([round_.accepted for round_ in rows], np.int64)
    mask_NG = np.ones(logits_NG.shape, bool)
    for row, round_ in enumerate(rows):
        ends = [i for i, token in enumerate(round_.draft[: round_.accepted]) if token in eos_token_ids]
        if ends:
            mask_NG[row, ends[0] + 1 :] = False
    return Rollouts(logits_NG, accepted_N, mask_NG)


def quality(rollouts: Rollouts, temperatures_G: np.ndarray) -> dict[str, list[float]]:
    """ECE, AUROC and Brier score of the predicted survival of each prefix length."""
    survival_NG = np.asarray(calibrate.survival(rollouts.logits_NG.astype(np.float32), temperatures_G))
    measures: dict[str, list[float]] = {"ece": [], "auroc": [], "brier": []}
    for k in range(survival_NG.shape[1]):
        kept = rollouts.mask_NG[:, k]
        prediction, label = survival_NG[kept, k], rollouts.accepted_N[kept] > k
        measures["ece"].append(calibrate.expected_calibration_error(prediction, label))
        measures["auroc"].append(calibrate.auroc(prediction, label))
        measures["brier"].append(calibrate.brier(prediction, label))
    return measures


def run(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[Sequence[int]]],
    new_tokens: int,
    sampling: SamplingParams,
    on_prompts: Callable[[int], None] = lambda _: None,
    batch_size: int = 8,
) -> tuple[np.ndarray, dict[str, Any], Rollouts]:
    """Temperatures, what they changed on held-out prompts, and those prompts' rollouts. `prompts` are by domain.

    Raises ConfigError for a drafter without a confidence head and for too few blocks.
    """
    config = drafter.config
    check_head(drafter)
    eos = target.config.eos_token_ids
    rows = [prompt for domain in prompts for prompt in domain]
    longest = max(map(len, rows))
    generations: list[Generation] = []
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        done = generate(target, drafter, part, new_tokens, sampling, start, eos, longest_prompt=longest,
                        batch_size=batch_size, shortlist=EngineConfig.shortlist)  # fmt: skip
        generations += done
        on_prompts(len(part))
    turn = iter(generations)
    temperatures, result, held = fit([[next(turn) for _ in domain] for domain in prompts], eos, config.num_drafts)
    return temperatures, {"sampling": dataclasses.asdict(sampling), "new_tokens": new_tokens} | result, held


def check_head(drafter: Drafter) -> None:
    """Raises ConfigError for a drafter that has nothing to calibrate."""
    if not drafter.config.confidence_head:
        raise ConfigError("this drafter has no confidence head: there is nothing to calibrate")


def split(domains: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Every other text of each domain, every fourth, and the other fourths: a domain has its share of all three."""
    turns = ((0, 2), (1,), (3,))
    return [[text for domain in domains for i, text in enumerate(domain) if i % 4 in which] for which in turns]


def fit(
    domains: Sequence[Sequence[Generation]], eos_token_ids: Sequence[int], num_drafts: int
) -> tuple[np.ndarray, dict[str, Any], Rollouts]:
    """`run` on the texts of each domain, their every draft verified. Raises ConfigError for too few blocks."""
    fitting, choose, held = (collect(part, eos_token_ids, num_drafts) for part in split(domains))
    smallest = min(len(part.accepted_N) for part in (fitting, choose, held))
    if smallest < LEAST_BLOCKS:
        raise ConfigError(
            f"a split has only {smallest} drafted blocks, {LEAST_BLOCKS} are needed: give more prompts or more tokens"
        )
    ones = np.ones(num_drafts, np.float32)
    fitted = calibrate.fit_temperatures(fitting.logits_NG, fitting.accepted_N, fitting.mask_NG)
    helps = sum(quality(choose, fitted)["ece"]) < sum(quality(choose, ones)["ece"])
    temperatures = fitted if helps else ones
    blocks = {"fit": len(fitting.accepted_N), "choose": len(choose.accepted_N), "held_out": len(held.accepted_N)}
    result = {
        "blocks": blocks,
        "kept": bool(helps),
        "before": quality(held, ones),
        "after": quality(held, temperatures),
    }
    return temperatures, result, held


def show(result: dict[str, Any], temperatures: np.ndarray, console: Console) -> None:
    """The table of held-out measures by position, before and after."""
    table = Table(title=f"held-out calibration, {result['blocks']['held_out']} blocks")
    for column in ("position", "temperature", "ECE before", "after", "AUROC before", "after", "Brier before", "after"):
        table.add_column(column, justify="right")
    before, after = result["before"], result["after"]
    for k, temperature in enumerate(temperatures):
        numbers = [f"{side[name][k]:.3f}" for name in ("ece", "auroc", "brier") for side in (before, after)]
        table.add_row(str(k + 1), f"{temperature:.2f}", *numbers)
    console.print(table)
    if not result["kept"]:
        console.print("The fitted temperatures did not help on prompts they had not seen: kept at 1.")


def diagrams(held: Rollouts, temperatures: np.ndarray) -> list[dict[str, list[list[float]]]]:
    """For each prefix length the filled bins [predicted, share accepted, count] of the survival, before and after."""
    result: list[dict[str, list[list[float]]]] = []
    for k in range(held.logits_NG.shape[1]):
        kept, lines = held.mask_NG[:, k], {}
        for name, scale in (("before", np.ones_like(temperatures)), ("after", temperatures)):
            survival_NG = np.asarray(calibrate.survival(held.logits_NG.astype(np.float32), scale))
            bins = calibrate.reliability(survival_NG[kept, k], held.accepted_N[kept] > k, bins=10)
            points = zip(bins.mean_prediction, bins.mean_label, bins.count, strict=True)
            lines[name] = [[float(x), float(y), int(n)] for x, y, n in points if n >= LEAST_IN_BIN]
        result.append(lines)
    return result


def plot(lines_G: Sequence[Mapping[str, Sequence[Sequence[float]]]], path: Path) -> None:
    """Reliability diagrams by position, before and after scaling."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.6 * len(lines_G), 2.9), layout="constrained")
    axes = figure.subplots(1, len(lines_G), sharey=True, squeeze=False)[0]
    for k, (axis, lines) in enumerate(zip(axes, lines_G, strict=True)):
        axis.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        for name, points in lines.items():
            axis.plot([p[0] for p in points], [p[1] for p in points], marker="o", markersize=4, label=name)
        axis.set_title(f"first {k + 1} stand" if k else "first stands", fontsize=10)
        axis.set_xlabel("predicted")
        axis.set_xlim(0, 1)
        axis.set_ylim(0, 1)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share accepted")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


@dataclasses.dataclass(frozen=True)
class Args:
    """Calibrate a drafter's confidences."""

    target: str = "smollm2-135m"
    """safetensors directory, .gguf file, or smollm2-135m."""
    drafter: Path | None = None
    """Folder of the drafter, which gets calibration.json; without it the one shipped for smollm2-135m."""
    dtype: Dtype = "fast"
    """Compute dtype of target and drafter; fast: the one that is faster on this machine."""
    tensor: int = 1
    """Devices that weights and caches are split over."""
    prompts: Path | None = None
    """JSONL, {"turns": ["text"]} a line; without it the built-in prompts."""
    limit: int = 24
    """Prompts a domain."""
    tokens: int = 64
    """New tokens a prompt."""
    max_prompt_tokens: int = 256
    """Longer prompts are left out: one of them would size the caches of all."""
    temperature: float = 0.0
    """Of decoding, like the next two: calibrate for what is served."""
    top_k: int = 0
    """Tokens that may be drawn; 0: all."""
    top_p: float = 1.0
    """Probability that the tokens which may be drawn have together; 1: all."""
    plot: Path | None = None
    """Where to draw the reliability diagrams."""

    def check(self) -> None:
        """Raises ConfigError for settings that measure nothing."""
        if min(self.limit, self.tokens - 1) < 1:
            raise ConfigError(f"--limit {self.limit} --tokens {self.tokens}: expected at least 1 and 2")


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        args = tyro.cli(Args, args=arguments, prog="serve.calibrate", description=__doc__)
        args.check()
        sampling = SamplingParams(args.temperature, args.top_k, args.top_p)
        chosen = choose_prompts(args.prompts, args.limit)
        if args.plot:
            report.check_writable(args.plot, "--plot")
        cache_programs()
        target, drafter, path = load_models(args.target, args.drafter, args.dtype, args.tensor)
        check_head(drafter)
        report.check_writable(path / FILE, "--drafter")
        domains = [
            [ids for ids in domain if len(ids) <= args.max_prompt_tokens]
            for domain in encode(target, chosen, args.tokens).values()
        ]
        if not any(domains):
            raise ConfigError(f"no prompt has at most {args.max_prompt_tokens} tokens: raise --max-prompt-tokens")
        columns = (TextColumn("rollouts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns) as progress:
            task = progress.add_task("", total=sum(map(len, domains)))
            temperatures, result, held = run(
                target, drafter, domains, args.tokens, sampling, lambda n: progress.update(task, advance=n)
            )
        console = Console()
        show(result, temperatures, console)
        console.print(f"wrote {write_temperatures(path, temperatures, result)}")
        if args.plot:
            plot(diagrams(held, temperatures), args.plot)
            console.print(f"wrote {args.plot}")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
