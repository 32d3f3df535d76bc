"""What tests run with every kind of drafter: a small engine, a few training steps."""

from collections.abc import Iterator, Sequence

import jax
import numpy as np
from tiny import timeless

from dspark_jax import Drafter, Target
from dspark_jax.config import Config
from serve.curves import Curves
from serve.engine import Engine, EngineConfig
from serve.scheduler import Request, Text
from serve.server import Server
from train import data, setup
from train.evaluate import to_batch
from train.step import train_step


def served(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], new: int, rise: float
) -> Iterator[list[Text]]:
    """Greedy texts under each of two policies: four slots, prompts over several pages and prefill chunks, prefixes of
    every length verified. A packed token is said to cost `rise` seconds, a round a thousandth of one besides."""
    config = EngineConfig(
        max_requests=4, request_sizes=(4,), max_context=64, page_size=8, prefill_lengths=(16,), shortlist=16
    )
    engine = Engine(target, drafter, config)
    engine.token_buckets = {4: (8, 20)}
    engine.compile([("prefill", 16), ("plain", 4), ("round", 4, 8), ("round", 4, 20)])
    curves = Curves({(4, t, s): 1e-3 + rise * t for t in (0, 8, 20) for s in (False, True)})
    for policy in ("fixed:4", "scheduled"):
        server = Server(engine, policy, curves, timeless)
        texts = [server.submit(Request(tuple(prompt), new)) for prompt in prompts]
        server.run()
        yield texts


def losses_of_a_few_steps(config: Config) -> list[float]:
    """The losses of eight steps on the same four conversations."""
    run = setup.build(config, None)
    rows = [data.element((record,), run.shapes[0], np.random.default_rng(3)) for record in run.train[:4]]
    batch = to_batch(jax.tree.map(lambda *leaves: np.stack(leaves), *rows))
    state, losses = run.first_state(), []
    for _ in range(8):
        state, metrics = train_step(run.models, run.mesh, state, run.weights, batch)
        losses.append(float(metrics["loss"]))
    return losses
