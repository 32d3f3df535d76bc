"""Load time and peak memory of a 2 GB target, against reading the same files with safetensors alone.

    python -m benchmarks.load_checkpoint [--json OUT]

A Qwen3-shaped bfloat16 checkpoint of random weights is written to a temporary folder, in four files. Every reading
runs in a process of its own, whose peak resident memory the system reports; the peak of a process that only imports
the same libraries is taken off. Files are in the page cache for all of them alike. Both are run in turn, and medians
are compared.
"""

import dataclasses
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
import tyro
from safetensors.numpy import load_file, save_file

Way = Literal["nothing", "raw", "load_target"]
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 100_000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
FILES = 4


@dataclasses.dataclass(frozen=True)
class Args:
    json: Path | None = None
    repeats: int = 3
    way: Way | None = None
    """Used by the benchmark itself: read `folder` in this way and print what it took."""
    folder: str = ""


def write_checkpoint(folder: Path) -> int:
    """Random weights of SHAPE; returns their bytes."""
    d, f, h = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
    q, kv = SHAPE["num_attention_heads"] * h, SHAPE["num_key_value_heads"] * h
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (SHAPE["vocab_size"], d)}
    shapes["model.norm.weight"] = (d,)
    for i in range(SHAPE["num_hidden_layers"]):
        layer = {"input_layernorm": (d,), "post_attention_layernorm": (d,), "self_attn.q_proj": (q, d)}
        layer |= {"self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d), "self_attn.o_proj": (d, q)}
        layer |= {"self_attn.q_norm": (h,), "self_attn.k_norm": (h,)}
        layer |= {"mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f)}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    rng, weight_map, size = np.random.default_rng(0), {}, 0
    names = list(shapes)
    for part in range(FILES):
        file = f"model-{part + 1:05}-of-{FILES:05}.safetensors"
        tensors = {}
        for name in names[part::FILES]:
            bits = rng.integers(0, 2**16, shapes[name], np.uint16) & 0xBFFF  # no infinities
            tensors[name] = bits.astype(np.uint16).view(ml_dtypes.bfloat16)
            size += tensors[name].nbytes
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return size


def probe(way: Way, folder: Path) -> None:
    """Reads the checkpoint and prints seconds and this process's peak memory in bytes."""
    import jax

    from dspark_jax import load_target

    jax.devices()
    start = time.perf_counter()
    kept = None
    if way == "raw":
        kept = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    elif way == "load_target":
        kept = jax.block_until_ready(load_target(folder, "bfloat16").params)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": seconds, "peak": peak, "arrays": len(kept or ())}))


def measure(way: Way, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.load_checkpoint", "--way", way, "--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(args: Args) -> None:
    from serve import report  # not above: the measured processes import no more than they use

    if args.json:
        report.check_writable(args.json)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_checkpoint(folder)
        print(f"wrote {size / 1e9:.2f} GB in {FILES} files")
        base = measure("nothing", folder)["peak"]
        runs: dict[Way, list[dict[str, float]]] = {"raw": [], "load_target": []}
        for _ in range(args.repeats):
            for way, results in runs.items():
                results.append(measure(way, folder))
                print(way, results[-1])
    summary = {
        way: {
            "seconds": round(statistics.median(run["seconds"] for run in results), 2),
            "peak_gb_above_imports": round((statistics.median(run["peak"] for run in results) - base) / 1e9, 2),
        }
        for way, results in runs.items()
    }
    raw, ours = summary["raw"], summary["load_target"]
    result = {
        "checkpoint_gb": round(size / 1e9, 2),
        "dtype": "bfloat16",
        "machine": report.machine(),
        "repeats": args.repeats,
        **summary,
        "time_ratio": round(ours["seconds"] / raw["seconds"], 2),
        "peak_ratio": round(ours["peak_gb_above_imports"] / raw["peak_gb_above_imports"], 2),
        "peak_over_checkpoint": round(ours["peak_gb_above_imports"] * 1e9 / size, 2),
    }
    print(json.dumps(result, indent=2))
    if args.json:
        report.write_json(args.json, result)


if __name__ == "__main__":
    arguments = tyro.cli(Args, description=__doc__)
    if arguments.way is None:
        compare(arguments)
    else:
        probe(arguments.way, Path(arguments.folder))
