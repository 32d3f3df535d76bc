"""Started by test_tpu_cache with four fake CPU devices: rounds on meshes, with the TPU's pages, as a loop over layers;
tokens as JSON."""

import contextlib
import dataclasses
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import ragged_reference
import test_gpu_attention
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import Mesh
from test_serve_commands import Words
from tiny import good_drafter, make_target, random_tokens

from dspark_jax import Drafter, SamplingParams, Target, kv_cache, sharding, tpu_cache
from dspark_jax.config import MeshSettings
from dspark_jax.weights.drafter_files import write_drafter
from serve import bench, rounds, setup
from serve import curves as curves_lib
from serve.curves import Curves
from serve.engine import Engine, EngineConfig, trace
from serve.rounds import Output

SIZES = EngineConfig(max_requests=2, request_sizes=(2,), max_context=48, page_size=16, prefill_lengths=(16,))
KEYS = [("prefill", 16), ("plain", 2), ("round", 2, 8)]


def play(engine: Engine) -> list[list[int]]:
    """Two prompts in chunks, then rounds with and without drafts: every number that reaches the host."""
    engine.compile(KEYS)
    told: list[list[int]] = []

    def tell(output: Output) -> None:
        seen = (output.tokens_RG, output.lengths_R, output.accepted_R, output.next_R)
        told.extend(np.asarray(x).ravel().tolist() for x in seen)

    for slot, sampling in enumerate((SamplingParams(0.0), SamplingParams(0.8, top_k=9))):
        prompt, pages = random_tokens(slot, 21).tolist(), [slot * 3 + i for i in range(3)]
        for start in (0, 16):
            tell(engine.prefill(slot, prompt[start : start + 16], start, slot, sampling, pages))
    for _ in range(3):
        tell(engine.round([0, 1], 8, engine.knobs()))
        tell(engine.plain([0, 1]))
    tell(engine.round([1], 8, engine.knobs()))
    return told


def cudnn_calls(mesh: Mesh, patch: pytest.MonkeyPatch) -> list[str]:
    """The queries of each call of cuDNN in a plain round that is lowered for GPUs."""
    patch.setattr(kv_cache, "platform", lambda: "gpu")
    patch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    engine = Engine(*test_gpu_attention.models("bfloat16"), SIZES, mesh=mesh)
    traced = trace(engine.models, SIZES, ("plain", 2), engine.weights, engine.state, mesh)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"@__cudnn\$fmha.* : \(tensor<([^>]*)>", text)


def benched(target: Target, drafter: Drafter, tensor: int, patch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The rows of `serve.bench --tensor N`: the command itself, its target in memory."""

    def load(path: str, dtype: str, mesh: Mesh) -> Target:
        return dataclasses.replace(
            target, params=sharding.place(target.params, sharding.shardings(target.params, mesh))
        )

    target = dataclasses.replace(target, tokenizer=Words())
    patch.setattr(setup, "load_target", load)
    patch.setattr(setup.selftest, "questions", lambda target: [])
    patch.setattr(curves_lib, "make_curves", Curves)  # tiny models may really be flat
    with tempfile.TemporaryDirectory() as folder:
        patch.setenv("XDG_CACHE_HOME", folder)
        write_drafter(f"{folder}/drafter", "deepspec", drafter.config, drafter.params, None, {})
        Path(folder, "prompts.jsonl").write_text('{"turns": ["how much is twelve"]}\n{"turns": ["a red fox"]}\n')
        command = f"--target tiny --drafter {folder}/drafter --prompts {folder}/prompts.jsonl --dtype float32"
        sizes = f"--tensor {tensor} --tokens 8 --limit 2 --single 1 --json {folder}/out.json"
        with contextlib.redirect_stdout(sys.stderr):
            assert bench.main([*command.split(), *sizes.split()]) == 0
        return json.loads(Path(folder, "out.json").read_text())["rows"]


def main() -> None:
    assert jax.device_count() == 4
    target = make_target(mixing=0.15)
    drafter = good_drafter(target)
    mesh = sharding.make_mesh(MeshSettings(data=1, fsdp=2, tensor=2))
    results = {"one": play(Engine(target, drafter, SIZES)), "mesh": play(Engine(target, drafter, SIZES, mesh=mesh))}
    results["multiplied out"] = play(Engine(target, drafter, dataclasses.replace(SIZES, dense_markov=True), mesh=mesh))
    with pytest.MonkeyPatch.context() as patch:
        results["cudnn"] = cudnn_calls(mesh, patch)
    with pytest.MonkeyPatch.context() as patch:
        results["bench"] = [row["exact_match"] for row in benched(target, drafter, 2, patch)]
    tpu_cache.ragged_paged_attention = ragged_reference.attention
    for module in (rounds, tpu_cache):
        module.paged_cache = lambda: tpu_cache.RaggedLayer
    results["ragged"] = play(Engine(target, drafter, SIZES))
    engine = Engine(target, drafter, dataclasses.replace(SIZES, scan_layers=True), mesh=mesh)
    results["ragged scanned mesh"] = play(engine)
    pages = jax.tree.leaves((engine.state.target_pages, engine.state.draft_pages))
    results["split"] = [x.sharding.shard_shape(x.shape)[2] * 2 == x.shape[2] for x in pages]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
