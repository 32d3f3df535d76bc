"""Sequential heads beyond the published Markov ones: each is its formula, and its closed form is its scan."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import check_a_rule_splits_every_weight, committed, make_drafter, make_target, random_tokens

from dspark_jax import ConfigError, SamplingParams, generate, load_drafter
from dspark_jax.config import DraftSettings, drafter_config
from dspark_jax.drafters import Drafter, dspark, registry
from dspark_jax.drafters.cells.ngrams import _odd_factors, _primes
from dspark_jax.drafters.heads import MarkovHead, first_state
from dspark_jax.sampling import request_law, sample_block, sample_rows, sampling_rows
from dspark_jax.weights.drafter_files import read_drafter, write_drafter
from serve.curves import Curves
from serve.engine import Engine, EngineConfig
from serve.scheduler import Request
from serve.server import Server

TARGET = make_target(mixing=0.4)
V, D, RANK, BLOCK, LENGTH = TARGET.config.vocab_size, TARGET.config.d_model, 6, 5, 12
STATE: dict[str, Any] = {"cell_heads": 2, "cell_size": 4}
HASH: dict[str, Any] = {"ngram_tokens": 3, "hash_tables": 2, "hash_rows": 64}
DOMINO: dict[str, Any] = {"markov_head_type": "domino", "cell_size": 8, "confidence_with_markov": False}
HEADS: dict[str, dict[str, Any]] = {
    "ngram": {"markov_head_type": "ngram", "ngram_tokens": 3},
    "hashed_ngram": {"markov_head_type": "hashed_ngram"} | HASH,
    "gdn": {"markov_head_type": "gdn"} | STATE,
    "kda": {"markov_head_type": "kda"} | STATE,
    "mamba2": {"markov_head_type": "mamba2"} | STATE,
    "domino": DOMINO | {"pure_draft_prefix_len": 1},
    "tied": {"markov_tied": True},
}
PLAIN: dict[str, Any] = {"num_layers": 1, "markov_rank": RANK, "block_size": BLOCK}
DRAFTERS = {name: make_drafter(TARGET, **PLAIN, **changes) for name, changes in HEADS.items()}
_propose = jax.jit(dspark.propose, static_argnames=("config", "greedy"))
_commit = jax.jit(dspark.commit, static_argnames="config")


@pytest.fixture(params=HEADS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def taps_like(seed: int, rows: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, LENGTH, 2, D)).astype(np.float32)


def head(drafter: Drafter) -> Any:
    """The head's methods on the drafter's weights."""
    module, params = MarkovHead(drafter.config), {"params": drafter.params["markov"]}
    return lambda method, *arguments: module.apply(params, *arguments, method=method)


def embedded(drafter: Drafter, tokens: jax.Array) -> jax.Array | None:
    return drafter.frozen.embed_VD[tokens] if drafter.config.head_reads_embedding else None


@functools.cache
def latents(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Hidden states and previous tokens of blocks, and their latents by the closed form and by steps in a Python loop.
    Tokens repeat, so that keys of a block do."""
    drafter = DRAFTERS[name]
    hidden = np.random.default_rng(1).normal(size=(2, 3, BLOCK, D)).astype(np.float32)
    tokens = random_tokens(2, 2, 3, BLOCK, vocab_size=4)

    @jax.jit
    def both(hidden: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        call = head(drafter)
        whole = call("latents", hidden, call("embed", tokens, embedded(drafter, tokens)))
        projected, state, steps = call("project", hidden), first_state(drafter.config, (2, 3)), []
        for slot in range(BLOCK):
            token = tokens[:, :, slot]
            own = jax.tree.map(lambda x: x[:, :, slot], projected)  # noqa: B023
            state, latent = call("step", state, call("embed", token, embedded(drafter, token)), own)
            steps.append(latent)
        return whole, jnp.stack(steps, axis=2)

    return hidden, tokens, *map(np.asarray, both(jnp.asarray(hidden), jnp.asarray(tokens)))


def test_the_closed_form_is_the_loop_over_steps(name: str) -> None:
    _, _, whole, steps = latents(name)
    np.testing.assert_allclose(whole, steps, atol=1e-5)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def silu(x: Any) -> Any:
    return x * sigmoid(x)


def softplus(x: Any) -> Any:
    return np.log1p(np.exp(x))


def rms(x: np.ndarray, scale: Any = 1.0) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def ngram(w: dict, window: list[int], e: np.ndarray, h: np.ndarray) -> np.ndarray:
    return e + sum((w["ngram"][back][token] for back, token in enumerate(window[1:3])), np.zeros(RANK))


def hashed_ngram(w: dict, window: list[int], e: np.ndarray, h: np.ndarray) -> np.ndarray:
    primes, found = _primes(4, 64), np.zeros(2 * RANK)
    for order in (2, 3):
        for table in range(2 if len(window) >= order else 0):
            mixed = 0
            for back in range(order):
                mixed ^= window[back] * int(_odd_factors(order, back, 2)[table]) % 2**32
            place = 2 * (order - 2) + table
            row = w["hash_table"][64 * place + mixed % primes[place]]
            found[place * RANK // 2 : (place + 1) * RANK // 2] = row
    score = rms(w["hash_key"] @ found) @ rms(w["hidden_in"] @ h) / RANK**0.5
    return e + sigmoid(score / np.sqrt(np.abs(score) + 1e-6)) * (w["hash_out"] @ found)


def delta(kind: str, w: dict, state: np.ndarray, z: np.ndarray) -> np.ndarray:
    out = []
    for i in range(2):
        q, k, v = (silu(w["cell_qkv"][j, i] @ z) for j in range(3))
        q, k = unit(q) / 2, unit(k)
        if kind == "gdn":
            decay = np.exp(-np.exp(w["a_log"][i]) * softplus(w["cell_gates"][0, i] @ z + w["dt_bias"][i]))
            beta, gate = sigmoid(w["cell_gates"][1, i] @ z), silu(w["out_gate"][i] @ z)
        else:
            own = slice(4 * i, 4 * i + 4)
            step = w["decay_out"][i] @ w["decay_in"] @ z + w["dt_bias"][own]
            decay = np.exp(-np.exp(w["a_log"][i]) * softplus(step))[:, None]
            beta = sigmoid(w["cell_beta"][i] @ z)
            gate = sigmoid(w["out_gate_out"][i] @ w["out_gate_in"] @ z + w["out_gate_bias"][own])
        state[i] *= decay
        state[i] += beta * np.outer(k, v - k @ state[i])
        out.append(rms(q @ state[i], w["out_norm"]) * gate)
    return np.concatenate(out)


def mamba2(w: dict, state: np.ndarray, z: np.ndarray) -> np.ndarray:
    gate, x, b, c, dt = np.split(w["cell_in"] @ z, (8, 16, 20, 24))
    x, b, c, dt = silu(x).reshape(2, 4), silu(b), silu(c), softplus(dt + w["dt_bias"])
    y = np.zeros((2, 4))
    for i in range(2):
        state[i] = np.exp(-dt[i] * np.exp(w["a_log"][i])) * state[i] + dt[i] * np.outer(x[i], b)
        y[i] = state[i] @ c + w["skip"][i] * x[i]
    return rms(y.reshape(-1) * silu(gate), w["out_norm"])


def domino(w: dict, state: np.ndarray, x: np.ndarray, h: np.ndarray) -> np.ndarray:
    inputs, own = w["gru_in"] @ x, w["gru_state"] @ state
    reset, update = sigmoid(inputs[0] + own[0]), sigmoid(inputs[1] + own[1])
    state[:] = (1 - update) * np.tanh(inputs[2] + reset * own[2]) + update * state
    return silu(w["merge"] @ np.concatenate([h, state]))


def by_formula(name: str, hidden: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Latents of one block, slot by slot in float64 (spec, drafters 5)."""
    w = {key: np.asarray(x, np.float64) for key, x in DRAFTERS[name].params["markov"].items()}
    embed = np.asarray(TARGET.params["embed"], np.float64)
    rows, state = [], np.zeros(8) if name == "domino" else np.zeros((2, 4, 4))
    for slot, h in enumerate(hidden):
        window = tokens[: slot + 1][::-1].tolist()
        e = w["w1"][window[0]] if "w1" in w else np.zeros(RANK)
        if name == "tied":
            rows.append(w["tied"] @ embed[window[0]])
        elif name in ("ngram", "hashed_ngram"):
            rows.append({"ngram": ngram, "hashed_ngram": hashed_ngram}[name](w, window, e, h))
        elif name == "domino":
            rows.append(domino(w, state, embed[window[0]], h) * (slot > 0))
        else:
            z = rms(np.concatenate([e, w["hidden_in"] @ h]), w["z_norm"])
            read = mamba2(w, state, z) if name == "mamba2" else delta(name, w, state, z)
            rows.append(e + w["cell_out"] @ read)
    return np.stack(rows)


def test_each_head_is_its_formula(name: str) -> None:
    hidden, tokens, whole, _ = latents(name)
    for block in np.ndindex(2, 3):
        np.testing.assert_allclose(whole[block], by_formula(name, hidden[block], tokens[block]), atol=1e-4)


def test_the_scan_sampler_is_a_python_loop() -> None:
    """The same keys and laws, for a cell with a state and an input a slot."""
    drafter, rows = DRAFTERS["kda"], 3
    rng, call = np.random.default_rng(5), head(DRAFTERS["kda"])
    base = jnp.asarray(rng.normal(size=(rows, BLOCK, V)), jnp.float32)
    keys, requests = jax.random.split(jax.random.key(1), (rows, BLOCK)), sampling_rows([SamplingParams(0.8)] * rows)
    first = jnp.asarray(random_tokens(6, rows))

    @jax.jit
    def both(hidden: jax.Array) -> tuple[Any, jax.Array]:
        def step(state: Any, token: jax.Array, projected: Any) -> tuple[Any, jax.Array]:
            state, latent = call("step", state, call("embed", token, None), projected)
            return state, call("bias", latent)

        projected, state = call("project", hidden), first_state(drafter.config, (rows,))
        scanned = sample_block(step, state, first, base, projected, keys, requests)
        token, drawn = first, []
        for slot in range(BLOCK):
            state, bias = step(state, token, projected[:, slot])
            token = sample_rows(keys[:, slot], request_law(base[:, slot] + bias, *requests))
            drawn.append(token)
        return scanned.tokens_RG, jnp.stack(drawn, axis=1)

    np.testing.assert_array_equal(*both(jnp.asarray(rng.normal(size=(rows, BLOCK, D)), jnp.float32)))


def test_a_sampled_block_has_the_law_of_the_same_block_teacher_forced(name: str) -> None:
    drafter, rows = DRAFTERS[name], BLOCK + 1
    tokens, taps, anchor = random_tokens(0, rows, LENGTH), taps_like(1, rows), np.arange(rows) % 5 + 1
    caches = registry.init_caches(drafter.config, rows, LENGTH, jnp.float32)
    seen, position = committed(np.zeros((rows, LENGTH), np.int32), taps), np.tile(np.arange(LENGTH), (rows, 1))
    caches = _commit(drafter.config, drafter.params, drafter.frozen, caches, seen, position)
    keys = jax.random.split(jax.random.key(0), (rows, BLOCK))
    first, requests = tokens[np.arange(rows), anchor], sampling_rows([SamplingParams(1.0)] * rows)
    proposal = _propose(drafter.config, drafter.params, drafter.frozen, caches, first, anchor, keys, requests, False)
    for row in range(rows):
        tokens[row, anchor[row] + 1 : anchor[row] + 1 + BLOCK] = proposal.sample.tokens_RG[row]
    out = drafter.teacher_forced(tokens, taps, anchor[:, None])
    np.testing.assert_allclose(proposal.sample.law_RGV, jax.nn.softmax(out.logits_BAGV[:, 0]), atol=1e-5)
    assert proposal.confidence_RG is not None
    assert out.confidence_BAG is not None
    np.testing.assert_allclose(proposal.confidence_RG, out.confidence_BAG[:, 0], atol=1e-5)


def test_what_a_slot_knows_of_the_block(name: str) -> None:
    """Another token at one place of the block, after the anchor: only later slots change, as far as the head's memory
    goes. A confidence changes with the token before its slot and no other, so it never sees its own draft."""
    drafter, rows, anchor = DRAFTERS[name], BLOCK + 1, 2
    tokens, taps = np.repeat(random_tokens(4, 1, LENGTH), rows, axis=0), np.repeat(taps_like(5, 1), rows, axis=0)
    changed = tokens.copy()
    for row in range(1, rows):
        changed[row, anchor + row] = (changed[row, anchor + row] + 1) % V
    before, after = (drafter.teacher_forced(x, taps, np.full((rows, 1), anchor)) for x in (tokens, changed))
    moved = np.any(np.asarray(before.logits_BAGV) != np.asarray(after.logits_BAGV), axis=-1)[:, 0]
    slots, place = np.arange(BLOCK)[None, :], np.arange(rows)[:, None]
    memory = {"tied": 1, "ngram": 3, "hashed_ngram": 3}.get(name, BLOCK)
    expected = (slots >= place) & (slots < place + memory) & (place > 0)
    if name == "hashed_ngram":  # the previous token has its row; older ones may meet in a row of the small tables
        np.testing.assert_array_equal(moved & (slots == place), expected & (slots == place))
        assert not np.any(moved & ~expected) and np.any(moved & (slots == place + 2))
    else:
        np.testing.assert_array_equal(moved, expected)
    assert before.confidence_BAG is not None
    assert after.confidence_BAG is not None
    gate = (np.asarray(before.confidence_BAG) != np.asarray(after.confidence_BAG))[:, 0]
    np.testing.assert_array_equal(gate, (slots == place) & (place > 0) & (name != "domino"))


def test_a_fresh_head_is_the_vanilla_one(name: str) -> None:
    """With the same W1 and W2; Domino's, which has no W1, is none at all."""
    drafter = DRAFTERS[name]
    hidden, tokens = jnp.ones((1, BLOCK, D)), jnp.asarray(random_tokens(7, 1, BLOCK))
    module, vanilla = MarkovHead(drafter.config), MarkovHead(make_drafter(TARGET, **PLAIN).config)

    def logits(module: MarkovHead, tokens: jax.Array, rows: jax.Array | None) -> jax.Array:
        return module.bias(module.latents(hidden, module.embed(tokens, rows)))

    arguments = tokens, embedded(drafter, tokens)
    own, params = jax.jit(functools.partial(module.init_with_output, method=logits))(jax.random.key(3), *arguments)
    params = params["params"]
    if name == "domino":
        assert not np.asarray(own).any()
        assert np.abs(params["gru_state"]).max() <= 8**-0.5
        return
    w1 = params["w1"] if "w1" in params else drafter.frozen.embed_VD @ params["tied"].T
    plain: Any = vanilla.apply({"params": {"w1": w1, "w2": params["w2"]}}, tokens, None, method=logits)
    np.testing.assert_allclose(own, plain, atol=1e-6)
    assert np.abs(plain).max() > 1e-4
    for unread in {"ngram", "hash_out", "cell_out"} & set(params):
        assert not np.asarray(params[unread]).any()
    if "dt_bias" in params and name != "kda":
        steps = softplus(np.asarray(params["dt_bias"]))
        assert (steps > 0.9e-3).all() and (steps < 0.11).all()


def test_decays_of_any_strength_keep_the_closed_form_finite() -> None:
    """exp(G_i) and exp(-G_j) alone would overflow here."""
    drafter = DRAFTERS["kda"]
    params = drafter.params["markov"] | {"a_log": jnp.full(2, 5.0)}
    hidden = jnp.asarray(np.random.default_rng(8).normal(size=(1, BLOCK, D)), jnp.float32)
    module, tokens = MarkovHead(drafter.config), jnp.zeros((1, BLOCK), jnp.int32)

    def total(params: Any) -> jax.Array:
        previous: Any = module.apply({"params": params}, tokens, None, method="embed")
        return jnp.sum(module.apply({"params": params}, hidden, previous, method="latents") ** 2)  # type: ignore[operator]

    value, gradient = jax.jit(jax.value_and_grad(total))(params)
    assert np.isfinite(value) and all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"markov_head_type": "lstm"}, "markov_head_type = 'lstm': expected one of vanilla, gated"),
    ({"markov_head_type": "kda"}, "cell_heads = 0: a kda head needs it, usually 4"),
    ({"markov_head_type": "gdn"} | STATE | {"cell_size": -1}, "cell_size = -1: a gdn head needs it"),
    (STATE, "cell_heads = 2: a vanilla head does not read it"),
    (HEADS["kda"] | {"ngram_tokens": 2}, "ngram_tokens = 2: a kda head does not read it"),
    ({"markov_head_type": "ngram", "ngram_tokens": 4}, "ngram_tokens = 4: expected 2 or 3"),
    ({"markov_head_type": "ngram", "ngram_tokens": 3, "block_size": 2}, "at most the 2 drafts of a block"),
    (HEADS["hashed_ngram"] | {"hash_tables": 4}, "hash_tables = 4: expected at most 8, a divisor of markov_rank = 6"),
    (HEADS["hashed_ngram"] | {"hash_rows": 8}, "hash_rows = 8: expected at least 64"),
    (HEADS["kda"] | {"pure_draft_prefix_len": 1}, "pure_draft_prefix_len = 1: expected 0 to 0 for a kda head"),
    (DOMINO | {"pure_draft_prefix_len": BLOCK}, "pure_draft_prefix_len = 5: expected 0 to 4 for a domino head"),
    (DOMINO | {"markov_tied": True}, "markov_tied: a domino head of rank 6 has no W1"),
    (DOMINO | {"confidence_with_markov": True}, "confidence_with_markov: a domino head has no W1"),
    ({"markov_rank": 0, "markov_tied": True, "confidence_with_markov": False}, "markov_tied: a vanilla head of rank 0"),
    ({"markov_rank": 0, "confidence_with_markov": False} | HEADS["kda"], "'kda' needs markov_rank > 0"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_impossible_heads_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_drafter(TARGET, **(PLAIN | changes))


def test_settings_of_a_run_fill_in_what_is_usual() -> None:
    settings = functools.partial(DraftSettings, mask_token_id=3, target_layer_ids=(0,))
    made = drafter_config(settings(markov_head_type="kda", cell_size=32), TARGET.config)
    assert (made.markov_head_type, made.cell_heads, made.cell_size, made.hash_rows) == ("kda", 4, 32, 0)
    made = drafter_config(settings(markov_head_type="domino"), TARGET.config)
    assert (made.pure_draft_prefix_len, made.cell_size, made.confidence_with_markov) == (1, 1024, False)
    with pytest.raises(ConfigError, match="hash_rows = 99: a kda head does not read it"):
        drafter_config(settings(markov_head_type="kda", hash_rows=99), TARGET.config)


def test_every_parameter_is_in_the_sharding_table(name: str) -> None:
    check_a_rule_splits_every_weight(DRAFTERS[name].params)


def test_a_round_trip_through_our_deepspec_files_is_bit_equal(tmp_path: Path, name: str) -> None:
    drafter = DRAFTERS[name]
    write_drafter(tmp_path, "deepspec", drafter.config, drafter.params, None, {"step": 1}, "float32")
    config, params, _ = read_drafter(tmp_path, TARGET)
    assert config == drafter.config
    jax.tree.map(np.testing.assert_array_equal, params, drafter.params)
    for other in ("speculators", "zlab"):
        with pytest.raises(ConfigError, match=f"cannot hold (a {drafter.config.markov_head_type} head|a tied|the lay)"):
            write_drafter(tmp_path / "b", other, drafter.config, drafter.params, None, {})


def test_a_tied_head_is_multiplied_out_when_loaded(tmp_path: Path) -> None:
    drafter = DRAFTERS["tied"]
    write_drafter(tmp_path, "deepspec", drafter.config, drafter.params, None, {}, "float32")
    loaded = load_drafter(tmp_path, TARGET)
    assert not loaded.config.markov_tied
    assert loaded.params["markov"]["w1"].shape == (V, RANK)
    given = random_tokens(9, 2, LENGTH), taps_like(10, 2), np.full((2, 1), 3)
    for own, folded in zip(drafter.teacher_forced(*given), loaded.teacher_forced(*given), strict=True):
        np.testing.assert_allclose(own, folded, atol=1e-5)
    with pytest.raises(ConfigError, match="a tied vanilla head of rank 6 is not a table"):
        dspark.transition_table(drafter.config, drafter.params)


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [g.tokens for g in generate(TARGET, None, [[1, 2, 3], [4]], 12)]


def test_generate_gives_the_plain_greedy_text(plain: list[list[int]]) -> None:
    assert [g.tokens for g in generate(TARGET, DRAFTERS["kda"], [[1, 2, 3], [4]], 12)] == plain


@pytest.mark.slow
def test_the_engine_gives_the_plain_greedy_text(plain: list[list[int]]) -> None:
    sizes = EngineConfig(max_requests=2, request_sizes=(2,), max_context=32, page_size=16, prefill_lengths=(16,))
    engine = Engine(TARGET, DRAFTERS["domino"], sizes)
    engine.compile([("prefill", 16), ("plain", 2), ("round", 2, 12)])
    engine.token_buckets = {2: (12,)}
    curves = Curves({(2, t, s): 1.0 for t in (0, 12) for s in (False, True)})
    server = Server(engine, f"fixed:{BLOCK}", curves)
    texts = [server.submit(Request(prompt, 12)) for prompt in ((1, 2, 3), (4,))]
    server.run()
    assert [text.tokens for text in texts] == plain
