"""The measurements of an evaluation, a function a kind of cell: models and machine in, plain JSON out."""

import dataclasses
import functools
import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from dspark_jax import Drafter, Generation, Round, SamplingParams, Target, generate
from dspark_jax.weights.locate import EMBEDDED, embedded_file
from serve import curves as curves_lib
from serve import law, load, profile, sweep
from serve.cells import Bench
from serve.engine import Engine, EngineConfig
from serve.scheduler import GREEDY
from serve.suite_sets import PromptSet
from serve.suite_store import Cell

BATCH = 8  # texts decoded together by `generate`
LAW_TEMPERATURES = (1.0, 0.8)  # the law that was sampled from, and a wrong one that the test must tell from it
LATENCY_REPEATS = 11
Tell = Callable[[str], None]
Result = dict[str, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Contender:
    """A drafter under its name in the report. `fingerprint` changes with its files."""

    name: str
    path: Path
    drafter: Drafter

    @functools.cached_property
    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        path = embedded_file() if str(self.path) == EMBEDDED else self.path
        for file in sorted(path.iterdir()) if path.is_dir() else [path]:
            if file.suffix in (".json", ".safetensors", ".bin", ".gguf"):
                digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
        return digest.hexdigest()[:16]


class Lab:
    """What cells measure with. Engines are compiled when a cell asks, and only the last drafter's are kept."""

    def __init__(
        self, target: Target, contenders: Mapping[str, Contender], sets: Mapping[str, PromptSet], under_load: load.Args
    ) -> None:
        self.target, self.contenders, self.sets, self.under_load = target, contenders, sets, under_load
        self._compiled: tuple[str, dict[bool, Engine]] | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(ids) for prompts in self.sets.values() for ids in prompts.ids)

    def by_domain(self) -> dict[str, list[tuple[int, ...]]]:
        """Prompts of each domain, its sets taking turns."""
        domains = dict.fromkeys(prompts.domain for prompts in self.sets.values())
        return {d: interleave([s.ids for s in self.sets.values() if s.domain == d]) for d in domains}

    def engines(self, name: str, tell: Tell) -> dict[bool, Engine]:
        """Compiled engines with the drafter and without."""
        if self._compiled is None or self._compiled[0] != name:
            self._compiled = None  # the last drafter's pages are let go of first
            contender = self.contenders[name]
            engines = load.make_engines(self.under_load, self.longest, self.target, contender.drafter, contender.path)
            for engine in engines.values():
                engine.compile(on_program=lambda key: tell(f"compiled {' '.join(map(str, key))}"))
            self._compiled = name, engines
        return self._compiled[1]


def shortened(drafter: Drafter, num_drafts: int) -> Drafter:
    """The drafter made to draft fewer tokens a block: its weights do not depend on how many."""
    dropped = drafter.config.num_drafts - num_drafts
    config = dataclasses.replace(drafter.config, block_size=drafter.config.block_size - dropped)
    return dataclasses.replace(drafter, config=config)


def headless(drafter: Drafter) -> Drafter:
    """The drafter with its sequential head's bias at zero: every slot drafts as its backbone alone would."""
    markov = drafter.params["markov"]
    return dataclasses.replace(
        drafter, params=drafter.params | {"markov": markov | {"w2": jnp.zeros_like(markov["w2"])}}
    )


def _seed(cell: Cell) -> int:
    """Each set draws random numbers of its own: tests over all sets take their tokens for independent."""
    return cell.settings["seed"] + zlib.crc32(cell.set.encode()) % 2**24


def rollout(lab: Lab, cell: Cell, needs: Sequence[Result], tell: Tell) -> Result:
    """Texts with every draft verified, and all that happened in their rounds. With a confidence head and at
    temperature 0 also the blocks that a threshold would ask for (`sweep`)."""
    del needs
    s, prompts = cell.settings, lab.sets[cell.set].first(cell.settings["limit"])
    contender = lab.contenders[cell.drafter]
    drafter = shortened(contender.drafter, s["block"])
    if not s["head"]:
        drafter = headless(drafter)
    # Few shapes to compile: sets of like length share theirs.
    longest = max(128, 1 << (max(map(len, prompts.ids)) - 1).bit_length())
    done = [0]

    def on_progress(tokens: int) -> None:
        done[0] += tokens
        tell(f"{done[0]} tokens")

    texts = generate(
        lab.target, drafter, prompts.ids, s["tokens"], SamplingParams(s["temperature"]), _seed(cell),
        lab.target.config.eos_token_ids, batch_size=BATCH, longest_prompt=longest, on_progress=on_progress,
    )  # fmt: skip
    result: Result = {"texts": [g.tokens for g in texts], "rounds": [[_to_json(r) for r in g.rounds] for g in texts]}
    if s["head"] and s["temperature"] == 0 and drafter.config.confidence_head:
        tell("drafting at every position")
        blocks = sweep.blocks_everywhere(
            lab.target, drafter, prompts.ids, [g.tokens for g in texts], replay_limit(s["tokens"], s["block"])
        )
        result["blocks"] = [[_to_json(r) for r in row] for row in blocks]
    return result


def replay_limit(tokens: int, block: int) -> int:
    """Tokens of a text that a threshold can be replayed on: behind the last block the text must still be known."""
    return tokens - block + 1


def _to_json(round_: Round) -> list[Any]:
    confidence = None if round_.confidence is None else [round(logit, 5) for logit in round_.confidence]
    return [round_.draft, round_.accepted, confidence]


def generations(result: Result) -> list[Generation]:
    """The texts of a `rollout`, as `generate` gave them."""
    return [
        Generation(tokens, [Round(*r) for r in rounds])
        for tokens, rounds in zip(result["texts"], result["rounds"], strict=True)
    ]


def latency(lab: Lab, cell: Cell, needs: Sequence[Result], tell: Tell) -> Result:
    """Seconds of full rounds, every draft verified, by block size; block 0 is a round of plain decoding. All sizes
    take turns, so that whatever else the machine does falls on all alike."""
    del needs
    drafter, points = lab.contenders[cell.drafter].drafter, []
    for requests in cell.settings["requests"]:
        sizes = EngineConfig(
            max_requests=requests, request_sizes=(requests,), max_context=256, prefill_lengths=(64,)
        )  # fmt: skip
        rounds: list[tuple[int, int, Engine]] = []  # block, packed places, engine
        for block in cell.settings["blocks"]:
            engine = Engine(lab.target, shortened(drafter, block), sizes)
            places = requests * (block + 1)
            keys: list[tuple[Any, ...]] = [("prefill", 64), ("round", requests, places)]
            if not rounds:
                rounds.append((0, 0, engine))
                keys.append(("plain", requests))
            tell(f"compiling {requests} requests, block {block}")
            engine.compile(keys)
            profile.fill(engine, GREEDY)
            rounds.append((block, places, engine))
        tell(f"timing {requests} requests")
        turns = [
            [profile.once(engine, list(range(requests)), places) for _, places, engine in rounds]
            for _ in range(LATENCY_REPEATS + 1)
        ][1:]
        points += [
            {"requests": requests, "block": block, "seconds": [turn[i] for turn in turns]}
            for i, (block, _, _) in enumerate(rounds)
        ]
    return {"points": points}


def curves(lab: Lab, cell: Cell, needs: Sequence[Result], tell: Tell) -> Result:
    """The step times by which `scheduled` decides, measured here and now."""
    del needs
    engine = lab.engines(cell.drafter, tell)[True]
    return {"curves": profile.measure(engine, on_point=lambda text: tell(f"timing {text}")).to_json()}


def under_load(lab: Lab, cell: Cell, needs: Sequence[Result], tell: Tell) -> Result:
    """Closed loops of users, all domains mixed, every policy in turn (`serve.load`)."""
    engines = lab.engines(cell.drafter, tell)
    args = dataclasses.replace(lab.under_load, policies=tuple(cell.settings["policies"]))
    return {"rows": load.run(engines, curves_lib.from_json(needs[0]["curves"]), lab.by_domain(), args, tell)}


def lossless(lab: Lab, cell: Cell, needs: Sequence[Result], tell: Tell) -> Result:
    """Greedy texts of each policy against plain ones, and where sampled texts fall in the target's law."""
    s, engines = cell.settings, lab.engines(cell.drafter, tell)
    bench = Bench(
        lab.target, engines[False], engines[True], curves_lib.from_json(needs[0]["curves"]), s["tokens"], _seed(cell)
    )
    most, prompts = max(s["concurrency"]), lab.sets[cell.set].first(s["limit"]).ids
    rows, differences = [], []
    for requests in dict.fromkeys((1, most)):
        chosen = prompts if requests == most else prompts[: s["single"]]
        made = bench.cell(cell.set, chosen, requests, 0.0, s["policies"], tell)
        rows += made.rows
        differences += made.differences
    length = -(-(lab.longest + s["tokens"]) // 64) * 64
    places: dict[str, list[list[float]]] = {}
    for policy in s["policies"][1:]:
        tell(f"{policy}, sampled")
        found = []
        for start in range(0, len(prompts), most):
            batch = bench.decode(prompts[start : start + most], policy, LAW_TEMPERATURES[0], start)
            for i, text in enumerate(batch.generations, start):
                uniform_N = np.random.default_rng((_seed(cell), i)).random(len(text.tokens))
                found.append(law.places(lab.target, prompts[i], text.tokens, length, uniform_N, LAW_TEMPERATURES))
        places[policy] = np.concatenate(found, axis=1).round(6).tolist()
    return {"rows": rows, "differences": differences, "places": places}


KINDS: dict[str, Callable[[Lab, Cell, Sequence[Result], Tell], Result]] = {
    "rollout": rollout,
    "latency": latency,
    "curves": curves,
    "load": under_load,
    "lossless": lossless,
}


def interleave(groups: Sequence[Sequence[Any]]) -> list[Any]:
    """First of each group, second of each, ...: a1, b1, c1, a2, b2, ..."""
    return [group[i] for i in range(max(map(len, groups))) for group in groups if i < len(group)]
