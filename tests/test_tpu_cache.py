"""The TPU's page layout and bookkeeping against the twin in XLA, with the kernel's own reference in its place."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged_reference
from jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel import ref_ragged_paged_attention
from tiny import normal

from dspark_jax import ConfigError, kv_cache, tpu_cache
from dspark_jax.attention import DEFAULT, Rule
from dspark_jax.kv_cache import Packing, PagedLayer
from dspark_jax.tpu_cache import RaggedLayer, check_kernel

HEADS, KV_HEADS, PAGE, PAGES, TOKENS = 4, 2, 8, 9, 11
TABLE = np.array([[3, 1, 9], [0, 8, 4], [7, 2, 5]], np.int32)  # 9: no page
ROUNDS = ((5, 2, 1), (4, 3, 3), (1, 2, 7), (2, 8, 0))  # packed rows of each request


def shipped(q_TNH: jax.Array, *arguments: jax.Array, **settings: Any) -> jax.Array:
    """The reference that JAX ships beside the kernel, with NaN in the rows that it leaves out."""
    settings = {k: v for k, v in settings.items() if not k.endswith("_per_block")}
    out_TNH = ref_ragged_paged_attention(q_TNH, *arguments, **settings)
    rest = ((0, q_TNH.shape[0] - out_TNH.shape[0]), (0, 0), (0, 0))
    return jnp.pad(out_TNH, rest, constant_values=jnp.nan)


def packing(counts: tuple[int, ...]) -> Packing:
    row_T, place_T = np.full(TOKENS, len(counts), np.int32), np.zeros(TOKENS, np.int32)
    index_RS, token = np.full((len(counts), max(counts)), TOKENS, np.int32), 0
    for row, count in enumerate(counts):
        for place in range(count):
            row_T[token], place_T[token], index_RS[row, place] = row, place, token
            token += 1
    return Packing(*map(jnp.asarray, (row_T, place_T, index_RS, TABLE)))


def both_caches(head_dim: int, counts: tuple[int, ...]) -> tuple[PagedLayer, RaggedLayer]:
    width = -(-head_dim // 128) * 128
    pages = kv_cache.empty_pages(PAGES, KV_HEADS, PAGE, head_dim, jnp.dtype(jnp.float32))
    combined = jnp.zeros((PAGES, PAGE, 2 * KV_HEADS, width))
    return PagedLayer(*pages, packing(counts)), RaggedLayer(combined, packing(counts))


@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(shipped, id="shipped", marks=pytest.mark.slow),
        pytest.param(ragged_reference.attention, id="traceable"),
    ],
)
@pytest.mark.parametrize(
    ("head_dim", "rule"),
    [
        pytest.param(128, DEFAULT, id="128", marks=pytest.mark.slow),
        pytest.param(16, Rule(scale=0.3, softcap=2.0, window=5), id="16-window"),
    ],
)
def test_both_paged_caches_attend_alike(monkeypatch: pytest.MonkeyPatch, kernel: Any, head_dim: int, rule: Rule):
    """Ragged rows, fillers, a request without rows, contexts over several pages, rows rolled back by length."""
    monkeypatch.setattr(tpu_cache, "ragged_paged_attention", kernel)
    rng, length = np.random.default_rng(0), [0, 6, 0]
    paged, ragged = both_caches(head_dim, ROUNDS[0])
    for counts in ROUNDS:
        pack = packing(counts)
        paged, ragged = paged._replace(packing=pack), ragged._replace(packing=pack)
        known = np.asarray(pack.row_T) < 3
        position = np.where(known, np.array([*length, 0])[np.asarray(pack.row_T)] + np.asarray(pack.place_T), 0)
        position_1T = jnp.asarray(position, jnp.int32)[None]
        k_1TKH, v_1TKH = normal(rng, 1, TOKENS, KV_HEADS, head_dim), normal(rng, 1, TOKENS, KV_HEADS, head_dim)
        paged, ragged = paged.append(k_1TKH, v_1TKH, position_1T), ragged.append(k_1TKH, v_1TKH, position_1T)
        q_1TNH = normal(rng, 1, TOKENS, HEADS, head_dim)
        wanted, got = (np.asarray(cache.attend(q_1TNH, position_1T, rule)) for cache in (paged, ragged))
        np.testing.assert_allclose(got[:, known], wanted[:, known], atol=1e-5)
        assert np.all(got[:, ~known] == 0)
        length = [old + max(count - 1, 0) for old, count in zip(length, counts, strict=True)]
    q_RGNH, k_RGKH, v_RGKH = (normal(rng, 3, 1, 4, n, head_dim) for n in (HEADS, KV_HEADS, KV_HEADS))
    limit_R1 = jnp.asarray(length, jnp.int32)[:, None]
    wanted, got = (cache.attend_block(q_RGNH, k_RGKH, v_RGKH, limit_R1, rule) for cache in (paged, ragged))
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_pieces_hold_every_packed_row_once_whatever_the_lengths_are():
    """And they are never more rows than the rectangle of requests by rows."""
    rng = np.random.default_rng(2)
    for requests, rows, tokens in ((1, 6, 4), (3, 6, 11), (8, 6, 16), (8, 16, 32), (4, 1, 4), (1, 64, 64), (5, 6, 30)):
        table = rng.integers(0, 99, (requests, 2))
        for _ in range(20):
            counts, most = np.zeros(requests, np.int64), min(tokens, requests * rows)
            for _ in range(rng.integers(0, most + 1)):
                counts[rng.choice(np.flatnonzero(counts < rows))] += 1
            start, place = np.cumsum(counts) - counts, np.arange(rows)
            index_RS = np.where(place < counts[:, None], start[:, None] + place, tokens)
            row_T = np.repeat(np.arange(requests + 1), [*counts, tokens - counts.sum()])
            place_T = np.concatenate([*map(np.arange, counts), np.zeros(tokens - counts.sum(), np.int64)])
            given = (jnp.asarray(x, jnp.int32) for x in (row_T, place_T, index_RS, table))
            pieces = Packing(*given).pieces(tokens)
            index_CW, known = np.asarray(pieces.index_CW), np.arange(counts.sum())
            assert sorted(index_CW[index_CW < tokens]) == known.tolist()
            np.testing.assert_array_equal(index_CW[pieces.piece_T, pieces.column_T][known], known)
            np.testing.assert_array_equal(pieces.page_table_CN[pieces.piece_T[known]], table[row_T[known]])
            assert index_CW.size <= requests * rows
            if requests * rows > 2 * tokens:  # where most of the rectangle would be empty
                assert index_CW.size < 2 * tokens


def test_both_paged_caches_give_back_what_was_written():
    """Each packed token's own row, that of the position before it, and one row a request."""
    rng, counts = np.random.default_rng(1), (5, 2, 1)
    pack, caches = packing(counts), both_caches(16, counts)
    known = np.asarray(pack.row_T) < 3
    position_1T = jnp.where(known, pack.place_T + 6, 0)[None]  # over a page's edge
    k_1TKH, v_1TKH = normal(rng, 1, TOKENS, KV_HEADS, 16), normal(rng, 1, TOKENS, KV_HEADS, 16)
    behind = np.flatnonzero(np.asarray(pack.place_T) > 0)
    for cache in caches:
        cache = cache.append(k_1TKH, v_1TKH, position_1T)
        for wanted, own, before in zip(
            (k_1TKH, v_1TKH), cache.read(position_1T), cache.read(jnp.maximum(position_1T - 1, 0)), strict=True
        ):
            np.testing.assert_array_equal(own[0, known, :, :16], wanted[0, known])
            np.testing.assert_array_equal(before[0, behind, :, :16], wanted[0, behind - 1])
        for wanted, found in zip((k_1TKH, v_1TKH), cache.read_block(jnp.array([[9], [7], [6]])), strict=True):
            np.testing.assert_array_equal(found[:, 0, :, :16], wanted[0, np.array([3, 6, 7])])


def test_what_is_not_finite_never_reaches_a_page():
    _, ragged = both_caches(128, (2, 1, 1))
    k_1TKH = jnp.full((1, TOKENS, KV_HEADS, 128), jnp.nan)
    ragged = ragged.append(k_1TKH, k_1TKH / 0, jnp.zeros((1, TOKENS), jnp.int32))
    assert jnp.all(ragged.kv_PpCH == 0)


def test_the_cache_follows_the_platform(monkeypatch: pytest.MonkeyPatch):
    bfloat16 = jnp.dtype(jnp.bfloat16)
    assert tpu_cache.paged_cache() is PagedLayer and kv_cache.compute_dtype(bfloat16) == jnp.float32
    monkeypatch.setattr(kv_cache, "platform", lambda: "tpu")
    assert tpu_cache.paged_cache() is RaggedLayer and kv_cache.compute_dtype(bfloat16) == jnp.bfloat16
    (pages,) = tpu_cache.empty_pages(3, 2, 16, 64, bfloat16)
    assert pages.shape == (3, 16, 4, 128)


def test_what_the_kernel_cannot_read_is_refused():
    for kv_heads, dtype, tensor in ((8, "bfloat16", 8), (8, "bfloat16", 1), (2, "float32", 1), (16, "bfloat16", 1)):
        check_kernel(kv_heads, jnp.dtype(dtype), tensor)
    with pytest.raises(ConfigError, match="3 key/value heads on a device: the TPU kernel reads"):
        check_kernel(3, jnp.dtype("bfloat16"), 1)
    with pytest.raises(ConfigError, match="does not divide the 8 key/value heads"):
        check_kernel(8, jnp.dtype("bfloat16"), 16)


@pytest.mark.slow
@pytest.mark.multidevice
def test_meshes_and_page_layouts_change_no_token():
    """Plain rounds, drafting rounds and prefills of one device, of four (fsdp 2, tensor 2), with the TPU's pages, its
    kernel replaced by the traceable reference, and of all that as a loop over layers: the same drafts and verdicts.
    So with the Markov head multiplied out."""
    here = Path(__file__).resolve().parent
    known = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "PYTHONPATH": str(here.parent),
    }
    done = subprocess.run(
        [sys.executable, str(here / "serve_mesh_worker.py")], env=known, stdout=subprocess.PIPE, text=True, check=True,
        timeout=300,
    )  # fmt: skip
    told = json.loads(done.stdout.splitlines()[-1])
    assert sum(map(sum, told["one"])) > 0
    for name in ("mesh", "multiplied out", "ragged", "ragged scanned mesh"):
        assert told[name] == told["one"], name
    assert all(told["split"])
    exact = [share for share in told["bench"] if share is not None]
    assert exact and set(exact) == {1.0}, "serve.bench --tensor 2"
    # On a GPU: each device with its own 2 of 4 heads; both layers are alike and so lowered once.
    assert told["cudnn"] == ["2x1x2x16xbf16"]
