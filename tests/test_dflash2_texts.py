"""Texts that DFlash 2 drafts for: exact, greedy and sampled, offline and through the engine."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from test_generate_law import TARGET as LAW_TARGET
from test_generate_law import p_values
from tiny import DFLASH2, make_drafter, make_target, random_tokens

from dspark_jax import Drafter, Target, generate
from serve.curves import Curves
from serve.engine import Engine, EngineConfig
from serve.scheduler import Request
from serve.server import Server


def good(target: Target, top_k: int) -> Drafter:
    """Often right about a target with little `mixing`: the layers pass nothing on, so every draft has the mask token's
    hidden state, which the selector turns into a table of the target's own transitions."""
    t = target.config
    changes = DFLASH2 | {"conv_group_size": 4, "selector_rank": t.d_model, "selector_top_k": top_k, "num_layers": 1}
    drafter = make_drafter(target, layout="fill_in", block_size=5, **changes)
    embed = np.asarray(target.params["embed"])
    rows = embed / np.sqrt((embed * embed).mean(-1, keepdims=True))
    hidden = 1e-3 * rows[drafter.config.mask_token_id]  # so small that the parallel logits say next to nothing
    layer = drafter.params["backbone"]["layers_0"]
    layer = layer | {name: jnp.zeros_like(layer[name]) for name in ("o", "down")}
    backbone = drafter.params["backbone"] | {"layers_0": layer, "norm": jnp.full(t.d_model, 1e-3)}
    selector = {
        "predecessor": jnp.asarray(rows),
        "successor": target.params["head"] * target.params["final_norm"][None, :],
        "hidden_projection": jnp.asarray(np.tile(hidden / (hidden @ hidden), (t.d_model, 1)), jnp.float32),
    }
    return dataclasses.replace(drafter, params=drafter.params | {"backbone": backbone, "selector": selector})


CLEAR = make_target(mixing=0.15)
PROMPTS = [random_tokens(30 + i, 4 + i).tolist() for i in range(4)]
NEW = 12


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [one.tokens for one in generate(CLEAR, None, PROMPTS, NEW)]


def test_drafting_does_not_change_greedy_text(plain: list[list[int]]) -> None:
    drafted = generate(CLEAR, good(CLEAR, 40), PROMPTS, NEW)
    assert [one.tokens for one in drafted] == plain
    assert np.mean([r.accepted for one in drafted for r in one.rounds]) > 1


@pytest.mark.slow
def test_the_engines_greedy_text_is_that_of_plain_decoding(plain: list[list[int]]) -> None:
    """One request at a time, every draft verified: three programs will do."""
    made = Engine(
        CLEAR, good(CLEAR, 40), EngineConfig(max_requests=1, max_context=32, page_size=16, prefill_lengths=(8,))
    )
    made.compile([("prefill", 8), ("plain", 1), ("round", 1, 5)])
    sizes = [(1, tokens) for tokens in (0, *made.token_buckets[1])]
    server = Server(made, "fixed:4", Curves({(*size, sampled): 1e-3 for size in sizes for sampled in (False, True)}))
    texts = [server.submit(Request(tuple(prompt), NEW)) for prompt in PROMPTS]
    server.run()
    assert [text.tokens for text in texts] == plain
    assert sum(text.accepted for text in texts) > 10


@pytest.mark.slow
@pytest.mark.parametrize("verify", ["token", "block"])
def test_sampled_texts_follow_the_targets_law(verify: str) -> None:
    """Seven candidates of twelve tokens: what the drafter cannot draw must come from the residual."""
    values, accepted = p_values(LAW_TARGET, good(LAW_TARGET, 7), verify)
    assert values.min() > 1e-3, values
    assert 0.3 < accepted.mean() < 3.5
