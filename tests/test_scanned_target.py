"""The target as a loop over stacked layers: the very tokens of the unrolled engine, its pages, and no copy of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import good_drafter, make_target, random_tokens

from dspark_jax import ConfigError, SamplingParams, kv_cache, scanned_target
from dspark_jax.kv_cache import Packing
from serve.engine import Engine, EngineConfig, scans, trace
from serve.scheduler import Request, positions
from serve.server import Server

TARGET = make_target(mixing=0.15, num_layers=3)
DRAFTER = good_drafter(TARGET)
SIZES = EngineConfig(
    max_requests=3, request_sizes=(3,), max_context=48, page_size=8, num_pages=14, prefill_lengths=(16,), shortlist=16,
    bucket_growth=16,
)  # fmt: skip


@functools.cache
def engine(scan_layers: bool, verify: str) -> Engine:
    made = Engine(TARGET, DRAFTER, dataclasses.replace(SIZES, scan_layers=scan_layers, verify=verify))
    made.compile([("prefill", 16), ("round", 3, 15)])  # all that fixed:3 calls
    return made


def play(scan_layers: bool, verify: str) -> list[tuple[list[int], int]]:
    """Greedy and sampled requests, more than there are slots and pages for, up to the longest context."""
    server = Server(engine(scan_layers, verify), "fixed:3")
    params = [SamplingParams(0.0), SamplingParams(0.9), SamplingParams(1.1, top_k=7), SamplingParams(0.7, top_p=0.8)]
    prompts = [random_tokens(i, 5 + 7 * i).tolist() for i in range(4)]
    longest = SIZES.max_context - positions(len(prompts[0]), 0, DRAFTER.config.num_drafts)
    requests = [Request(tuple(prompts[i % 4]), (11, longest)[i == 0], params[i % 4], seed=i) for i in range(7)]
    texts = [server.submit(request) for request in requests]
    server.run()
    return [(text.tokens, text.accepted) for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["token", "block"])
def test_a_loop_over_layers_says_what_unrolled_layers_say(verify: str):
    unrolled, scanned = play(False, verify), play(True, verify)
    assert scanned == unrolled
    assert sum(accepted for _, accepted in unrolled) > 10
    states = engine(False, verify).state, engine(True, verify).state
    (pools,), layers = states[1].target_pages, states[0].target_pages
    for pool, *each in zip(pools, *layers, strict=True):
        np.testing.assert_allclose(pool.reshape(3, -1, *pool.shape[1:]), jnp.stack(each), atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, states[0].slots, states[1].slots)


def test_layers_share_a_pool_without_touching_each_other():
    """What has no page in its own layer has none in the next one either."""
    table_RN = jnp.asarray([[2, 4], [0, 4]])  # 4 pages a layer: 4 is none
    found = [Packing(*[jnp.zeros(0, jnp.int32)] * 3, table_RN).of_layer(jnp.int32(i), 3, 12) for i in range(3)]
    tables = [packing.page_table_RN.tolist() for packing in found]
    assert tables == [[[2, 12], [0, 12]], [[6, 12], [4, 12]], [[10, 12], [8, 12]]]


@pytest.mark.slow
def test_a_loop_over_layers_copies_no_page():
    """Temporaries do not grow with the pool: it is carried and written in place."""
    temporaries = []
    for num_pages in (14, 14 * 64):
        sizes = dataclasses.replace(SIZES, scan_layers=True, num_pages=num_pages)
        made = Engine(TARGET, None, sizes)
        compiled = trace(made.models, sizes, ("plain", 3), made.weights, made.state, None).lower().compile()
        stats = compiled.memory_analysis()
        assert stats.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(made.state.target_pages))
        temporaries.append(stats.temp_size_in_bytes)
    assert temporaries[0] == temporaries[1]


def test_who_runs_as_a_loop():
    automatic, asked = SIZES, dataclasses.replace(SIZES, scan_layers=True)
    differing = dataclasses.replace(TARGET.config, layer_windows=(0, 8, 0))
    assert [scans(automatic, TARGET.config, where) for where in ("tpu", "cpu", "gpu")] == [True, False, False]
    assert not scans(automatic, differing, "tpu") and scans(asked, TARGET.config, "cpu")
    assert not scanned_target.alike(dataclasses.replace(TARGET.config, family="gemma3"))
    with pytest.raises(ConfigError, match="layers of this target differ"):
        scans(asked, differing, "tpu")


def test_every_tap_is_the_raw_output_of_its_layer():
    tokens = jnp.asarray(random_tokens(0, 1, 9))
    taps = (1, -1, 0)
    wanted = TARGET.forward(tokens, taps)
    rows = kv_cache.empty_rows(jnp.zeros_like(tokens), jnp.dtype(jnp.float32))
    stacked = scanned_target.stack(TARGET.config, TARGET.params)
    got = scanned_target.features(TARGET.config, stacked, tokens, jnp.arange(9)[None], rows, taps)
    np.testing.assert_allclose(got.taps_BSMD, wanted.taps_BSMD, atol=1e-5)
    np.testing.assert_allclose(got.hidden_BSD, wanted.hidden_BSD, atol=1e-5)
