"""As tiny.py, with an EAGLE-3 drafter. MTP: `--draft.algorithm mtp --draft.num-taps 0`."""

from pathlib import Path

from dspark_jax.config import Config, DataSettings, DraftSettings, OptimizerSettings, TargetSettings, TrainSettings


def get_config() -> Config:
    return Config(
        target=TargetSettings(path="tiny-random"),
        draft=DraftSettings(algorithm="eagle3", block_size=3, num_taps=1, draft_vocab_size=300),
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
