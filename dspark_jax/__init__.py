"""DSpark speculative decoding in JAX: train, calibrate, profile and serve a block-parallel drafter, losslessly."""

from dspark_jax.config import ConfigError, DrafterConfig, LossConfig, SamplingParams, TargetConfig
from dspark_jax.drafters import Drafter, load_drafter
from dspark_jax.generate import Generation, Round, generate
from dspark_jax.target import Target, TargetOutput, load_target

__all__ = [
    "ConfigError",
    "Drafter",
    "DrafterConfig",
    "Generation",
    "LossConfig",
    "Round",
    "SamplingParams",
    "Target",
    "TargetConfig",
    "TargetOutput",
    "generate",
    "load_drafter",
    "load_target",
]
