"""The paper's drafter for Qwen3-14B: block of 7, 5 layers, rank 256, 512 anchors in 4096 tokens, 512 rows a step."""

from dspark_jax.config import (
    Config,
    DataSettings,
    DraftSettings,
    MeshSettings,
    TargetConfig,
    TargetSettings,
    TrainSettings,
)


def get_target() -> TargetConfig:
    return TargetConfig(
        family="qwen3", vocab_size=151936, d_model=5120, d_ff=17408, num_layers=40, num_heads=40, num_kv_heads=8,
        head_dim=128, rope_theta=1e6, norm_eps=1e-6, max_length=40960, tied_head=False, eos_token_ids=(151645, 151643),
        name="Qwen3-14B",
    )  # fmt: skip


def get_config() -> Config:
    return Config(
        target=TargetSettings(path="Qwen/Qwen3-14B", dtype="bfloat16"),
        draft=DraftSettings(mask_token_id=151669),
        # Made by: python -m train.regenerate --target Qwen/Qwen3-14B --prompts PROMPTS.jsonl --out data/answers.jsonl
        data=DataSettings(paths=("data/answers.jsonl",), packing=True, workers=8),
        train=TrainSettings(max_steps=20000, batch_size=512, accumulation_steps=16, blocks_per_chunk=256),
        mesh=MeshSettings(data=1, fsdp=16),
    )
