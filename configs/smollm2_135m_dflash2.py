"""DFlash 2 for SmolLM2-135M-Instruct, of the size of configs/smollm2_135m.py: five drafts, 2 layers, 8192 ids."""

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
        # As z-lab releases them the anchor's row is no draft. Id 16 is <empty_output>, which no text contains.
        draft=DraftSettings(
            mask_token_id=16, algorithm="dflash2", layout="fill_in", num_layers=2, block_size=6, num_taps=5,
            selector_rank=64, draft_vocab_size=8192,
        ),
        # Made by: python -m train.regenerate --prompts PROMPTS.jsonl --out data/answers.jsonl
        data=DataSettings(paths=("data/answers.jsonl",), max_length=320, num_anchors=64),
        optimizer=OptimizerSettings(learning_rate=2e-3),
        loss=LossConfig(ce=1.0, tv=0.0, base_ce=1.0, soft_until=0.6),
        train=TrainSettings(
            max_steps=6000, batch_size=4, dtype="float32", log_every=20, checkpoint_every=500, eval_every=500
        ),
    )  # fmt: skip
