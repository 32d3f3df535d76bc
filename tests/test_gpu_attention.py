"""What cuDNN is given on a GPU means what the walk over pages computes, and the GPU's programs do ask for cuDNN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from tiny import make_drafter, make_target, normal

from dspark_jax import Drafter, Target, gpu_attention, kv_cache
from dspark_jax.attention import DEFAULT, Rule, paged_attention
from dspark_jax.target import cast_params
from serve.engine import Engine, EngineConfig, trace

REQUESTS, ROWS, HEADS, KV_HEADS, HEAD_DIM, PAGE = 3, 4, 4, 2, 16, 8
TABLE_RN = np.array([[3, 1, 7], [0, 7, 7], [7, 7, 7]], np.int32)  # 7: no page
LIMIT_RS = {  # keys below it are seen; the last request has no rows, the others fill some places only
    "packed": np.array([[14, 15, 16, 0], [3, 0, 0, 0], [0, 0, 0, 0]], np.int32),
    "block": np.array([[13] * 4, [5] * 4, [0] * 4], np.int32),
}


@pytest.mark.parametrize("rule", [DEFAULT, Rule(0.3, window=3), Rule(window=2, causal_block=True)], ids=str)
@pytest.mark.parametrize("kind", ["packed", "block"])
def test_mask_and_lengths_mean_what_the_walk_over_pages_does(kind: str, rule: Rule):
    rng = np.random.default_rng(0)
    pages = normal(rng, 7, KV_HEADS, HEAD_DIM, PAGE), normal(rng, 7, KV_HEADS, PAGE, HEAD_DIM)
    limit_RS, own = jnp.asarray(LIMIT_RS[kind]), None
    if kind == "block":
        own = normal(rng, REQUESTS, ROWS, KV_HEADS, HEAD_DIM), normal(rng, REQUESTS, ROWS, KV_HEADS, HEAD_DIM)
    inputs = (normal(rng, REQUESTS, ROWS, HEADS, HEAD_DIM), *pages, jnp.asarray(TABLE_RN), limit_RS, own, rule)
    wanted, given = paged_attention(*inputs), gpu_attention.arguments(*inputs)
    seen_RS = np.asarray(given["mask"].any(axis=(1, 3)))
    assert np.array_equal(seen_RS, np.ones_like(seen_RS) if own is not None else LIMIT_RS[kind] > 0)
    # Nothing that is seen lies behind a length, and a length ends with a key that is.
    last_R = np.max(np.arange(given["mask"].shape[-1]) * np.asarray(given["mask"].any(axis=(1, 2))), axis=-1)
    assert np.array_equal(last_R + 1, given["key_value_seq_lengths"])
    assert given["key_value_seq_lengths"].dtype == jnp.int32
    got = jax.nn.dot_product_attention(**given, scale=rule.scale, implementation="xla")
    np.testing.assert_allclose(np.asarray(got)[seen_RS], np.asarray(wanted)[seen_RS], atol=1e-5)
    assert np.all(np.asarray(wanted)[~seen_RS] == 0)


def test_what_cudnn_cannot_do_stays_in_xla():
    bfloat16, float32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    assert gpu_attention.takes(bfloat16, 128, Rule(0.5, window=8, causal_block=True))
    assert not gpu_attention.takes(float32, 128, DEFAULT)
    assert not gpu_attention.takes(bfloat16, 20, DEFAULT) and not gpu_attention.takes(bfloat16, 256, DEFAULT)
    assert not gpu_attention.takes(bfloat16, 128, Rule(softcap=50.0))


def models(dtype: str) -> tuple[Target, Drafter]:
    target = make_target()
    drafter = make_drafter(target)
    cast = Target(target.config, cast_params(target.params, dtype))
    frozen = drafter.frozen._replace(embed_VD=cast.params["embed"], head_VD=cast.params["head"])
    return cast, Drafter(drafter.config, cast_params(drafter.params, dtype), frozen)


@pytest.mark.parametrize("key", [("plain", 2), ("round", 2, 4), ("prefill", 16)], ids=str)
def test_programs_lowered_for_a_gpu_ask_for_cudnn(monkeypatch: pytest.MonkeyPatch, key: tuple):
    """Lowered, not compiled: no GPU is needed, only to tell jax that there is a cuDNN. The target's layers are alike
    and so lowered once, the drafter's two each for itself."""
    monkeypatch.setattr(kv_cache, "platform", lambda: "gpu")
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    config = EngineConfig(2, (2,), max_context=32, page_size=16, prefill_lengths=(16,))
    for dtype, calls in [("bfloat16", 1 + 2 * (key[0] == "round")), ("float32", 0)][: 1 + (key[0] == "plain")]:
        engine = Engine(*models(dtype), config)
        traced = trace(engine.models, config, key, engine.weights, engine.state, None)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("__cudnn$fmhaScaleBiasSoftmax") == calls, dtype
