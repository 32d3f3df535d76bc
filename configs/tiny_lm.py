"""As tiny.py, with a plain draft model: a decoder of one layer of its own."""

from pathlib import Path

from dspark_jax.config import Config, DataSettings, DraftSettings, OptimizerSettings, TargetSettings, TrainSettings


def get_config() -> Config:
    return Config(
        target=TargetSettings(path="tiny-random"),
        draft=DraftSettings(algorithm="lm", num_layers=1, block_size=3),
        data=DataSettings(
            paths=(str(Path(__file__).with_name("tiny.jsonl")),),
            max_length=192,
            num_anchors=16,
            validation_fraction=0.2,
        ),
        optimizer=OptimizerSettings(learning_rate=5e-3),
        train=TrainSettings(
            max_steps=60,
            batch_size=4,
            dtype="float32",
            checkpoint_every=20,
            eval_every=30,
            eval_prompts=4,
            eval_tokens=16,
        ),
    )
