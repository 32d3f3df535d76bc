"""Drafters of other depths and with other blocks, for question 3 of the evaluation; docs/results.md has the commands.

What is compared is the depths among each other, and the blocks: the two groups start and learn differently.
"""

import dataclasses
from pathlib import Path

from dspark_jax.config import (
    Config,
    DataSettings,
    DraftSettings,
    LossConfig,
    OptimizerSettings,
    TargetSettings,
    TrainSettings,
)

LAYERS = (1, 2, 5)
BLOCKS = (4, 8, 12, 16)
SHIPPED = Path(__file__).resolve().parents[1] / "assets" / "smollm2-135m-dspark"


def get_config() -> Config:
    """What drafters of all depths share: new weights, the Markov head from the answers' bigrams."""
    return Config(
        target=TargetSettings(path="smollm2-135m"),
        draft=DraftSettings(
            mask_token_id=16, num_layers=2, block_size=5, num_taps=5, markov_rank=64, draft_vocab_size=8192
        ),
        data=DataSettings(paths=("data/answers.jsonl",), max_length=320, num_anchors=64),
        optimizer=OptimizerSettings(learning_rate=2e-3),
        loss=LossConfig(soft_until=0.3),
        train=TrainSettings(
            max_steps=400, batch_size=4, dtype="float32", blocks_per_chunk=256, log_every=20, checkpoint_every=100,
            keep_checkpoints=1, eval_every=0, markov_init="corpus",
        ),
    )  # fmt: skip


def get_drafters() -> dict[str, Config]:
    """`layers-N` begin from nothing; `block-N` are the shipped drafter, trained on with blocks of another size."""
    common = get_config()
    made = {f"layers-{n}": dataclasses.replace(common, draft=_changed(common, num_layers=n)) for n in LAYERS}
    shipped = dataclasses.replace(
        common,
        optimizer=OptimizerSettings(learning_rate=4e-4),
        loss=LossConfig(ce=0.3),
        train=dataclasses.replace(common.train, markov_init="random", start_from=str(SHIPPED)),
    )
    shape = {"num_layers": 3, "draft_vocab_size": 14336}
    return made | {
        f"block-{n}": dataclasses.replace(shipped, draft=_changed(shipped, block_size=n, **shape)) for n in BLOCKS
    }


def _changed(config: Config, **changes: int) -> DraftSettings:
    return dataclasses.replace(config.draft, **changes)  # type: ignore[arg-type]
