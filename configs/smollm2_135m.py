"""A small drafter for SmolLM2-135M-Instruct that two CPU cores can train: 2 layers over the 8192 commonest ids."""

from dspark_jax.config import (
    Config,
    DataSettings,
    DraftSettings,
    LossConfig,
    OptimizerSettings,
    TargetSettings,
    TrainSettings,
)


def get_config() -> Config:
    return Config(
        target=TargetSettings(path="smollm2-135m"),
        # Id 16 is <empty_output>, a control token for notebooks that the chat format never uses.
        draft=DraftSettings(
            mask_token_id=16, num_layers=2, block_size=5, num_taps=5, markov_rank=64, draft_vocab_size=8192
        ),
        # Made by: python -m train.regenerate --prompts PROMPTS.jsonl --out data/answers.jsonl
        data=DataSettings(paths=("data/answers.jsonl",), max_length=320, num_anchors=64),
        optimizer=OptimizerSettings(learning_rate=2e-3),
        loss=LossConfig(soft_until=0.6),
        train=TrainSettings(
            max_steps=6000, batch_size=4, dtype="float32", log_every=20, checkpoint_every=500, eval_every=500
        ),
    )
