"""Twelve drafters for SmolLM2-135M-Instruct that learn from the same batches: what benchmarks/drafters.py compares."""

import dataclasses

from dspark_jax.config import (
    Config,
    DataSettings,
    DraftSettings,
    LossConfig,
    OptimizerSettings,
    TargetSettings,
    TrainSettings,
)

LAYERS = 2


def get_config() -> Config:
    """What all of them share, with the drafter that has most in common with the others: DSpark, vanilla head."""
    return Config(
        target=TargetSettings(path="smollm2-135m", dtype="bfloat16"),
        # Id 16 is <empty_output>, a control token for notebooks that the chat format never uses.
        draft=DraftSettings(
            mask_token_id=16, num_layers=LAYERS, block_size=5, num_taps=5, markov_rank=64, draft_vocab_size=8192
        ),
        # Made by: python -m train.regenerate --prompts PROMPTS.jsonl --out data/answers.jsonl
        data=DataSettings(paths=("data/answers.jsonl",), max_length=320, num_anchors=64),
        optimizer=OptimizerSettings(learning_rate=2e-3),
        loss=LossConfig(soft_until=0.3),
        train=TrainSettings(
            max_steps=1200, batch_size=8, dtype="bfloat16", blocks_per_chunk=256, log_every=20, checkpoint_every=200,
            keep_checkpoints=1, eval_every=0,
        ),
    )  # fmt: skip


def get_drafters() -> dict[str, Config]:
    """The run of each drafter, by name. All draft five tokens a block; DFlash is DSpark without the sequential head."""
    common = get_config()

    def drafter(**changes: object) -> Config:
        return dataclasses.replace(common, draft=dataclasses.replace(common.draft, **changes))  # type: ignore[arg-type]

    made = {
        "dflash-5": drafter(num_layers=5, markov_rank=0),
        "dflash-2": drafter(markov_rank=0),
        "dspark-2-vanilla": drafter(),
        "dspark-5-vanilla": drafter(num_layers=5),
    }
    made |= {f"dspark-2-{kind}": drafter(markov_head_type=kind) for kind in ("gated", "rnn", "kda", "ngram")}
    made["dspark-2-corpus"] = dataclasses.replace(common, train=dataclasses.replace(common.train, markov_init="corpus"))
    # DFlash 2 is trained as by its public trainers: the backbone's own logits rank the candidates, so they learn too,
    # and a law over 16 candidates has no total variation to learn from. One row of its block is the anchor's: no draft.
    dflash_2 = drafter(algorithm="dflash2", layout="fill_in", block_size=6, markov_rank=0, selector_rank=64)
    made["dflash-v2"] = dataclasses.replace(dflash_2, loss=LossConfig(ce=1.0, tv=0.0, base_ce=1.0, soft_until=0.3))
    chain = DraftSettings(block_size=5, num_taps=5, draft_vocab_size=8192)
    made["eagle-3"] = dataclasses.replace(common, draft=dataclasses.replace(chain, algorithm="eagle3"))
    made["mtp-1"] = dataclasses.replace(common, draft=dataclasses.replace(chain, algorithm="mtp"))
    return made
