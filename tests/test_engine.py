"""The engine on tiny models: texts equal to plain decoding under every policy, whatever runs beside them."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import good_drafter, make_target, random_tokens, timeless

from dspark_jax import ConfigError, SamplingParams, generate
from dspark_jax.schedule import prefix_schedule
from serve import rounds
from serve.curves import Curves
from serve.engine import Engine, EngineConfig, trace
from serve.scheduler import Request, Text, positions
from serve.server import Server
from serve.sizes import request_buckets, token_buckets

TARGET = make_target(mixing=0.15)
DRAFTER = good_drafter(TARGET)
SMALL = EngineConfig(
    max_requests=4, request_sizes=(4,), max_context=64, page_size=16, prefill_lengths=(16,), shortlist=16
)
POLICIES = ("off", "fixed:1", "fixed:4", "threshold:0.5", "scheduled", "scheduled:sync")


@functools.cache
def engine(verify: str = "token", shortlist: int = 16) -> Engine:
    made = Engine(TARGET, DRAFTER, dataclasses.replace(SMALL, verify=verify, shortlist=shortlist))
    made.compile(made.program_keys(sync=verify == "token"))
    return made


@functools.cache
def of_one() -> Engine:
    """For one request at a time."""
    made = Engine(TARGET, DRAFTER, dataclasses.replace(SMALL, max_requests=1, request_sizes=(1,)))
    made.compile()
    return made


def curves(flat: float = 1e-3, rise: float = 1e-6) -> Curves:
    """Time flat + rise * tokens, greedy and sampled alike; by default drafts cost next to nothing."""
    made = engine()
    sizes = {(r, t) for r in made.request_buckets for t in (0, *made.token_buckets[r])}
    return Curves({(r, t, s): flat + rise * (t or r) for r, t in sizes for s in (False, True)})


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(random_tokens(seed * 100 + i, int(rng.integers(1, 30))).tolist()) for i in range(count)]


def serve(policy: str, requests: list[Request], verify: str = "token", shortlist: int = 16) -> list[Text]:
    server = Server(engine(verify, shortlist), policy, curves(), timeless)
    texts = [server.submit(request) for request in requests]
    server.run()
    server.scheduler.check()
    return texts


@functools.cache
def plain_texts(count: int, new: int, stop: tuple[int, ...] = ()) -> list[list[int]]:
    done = generate(TARGET, None, [list(p) for p in prompts(count)], new, eos_token_ids=stop)
    return [g.tokens for g in done]


def test_buckets_hold_every_round():
    assert request_buckets(1) == (1,) and request_buckets(6) == (1, 2, 4, 6) and request_buckets(8) == (1, 2, 4, 8)
    assert request_buckets(64, 4) == (1, 4, 16, 64) and token_buckets(16, 7, 4) == (64, 128)
    for growth in (2, 3, 16):
        for requests in request_buckets(8, growth):
            edges = token_buckets(requests, 4, growth)
            assert edges[0] > requests and edges[-1] == requests * 5 and list(edges) == sorted(set(edges))


def test_fewer_than_four_places_are_no_size_of_their_own():
    assert token_buckets(1, 5) == (4, 6) and token_buckets(2, 5) == (4, 8, 12) and token_buckets(1, 2) == (3,)


@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_texts_are_those_of_plain_decoding(policy: str):
    requests = [Request(p, 12) for p in prompts(7)]
    texts = serve(policy, requests)
    assert [t.tokens for t in texts] == plain_texts(7, 12)
    assert all(t.reason == "length" for t in texts)
    if policy not in ("off", "fixed:1", "scheduled:sync"):  # early stop sticks at the staircase's first cliff
        assert sum(t.accepted for t in texts) > 10, "a good drafter whose drafts are not accepted"


def test_sync_says_at_once_which_programs_it_misses():
    made = Engine(TARGET, DRAFTER, SMALL)
    made._programs = dict.fromkeys(made.program_keys(), len)  # what compile() makes by default
    with pytest.raises(ConfigError, match=r"engine\.program_keys\(sync=True\)"):
        Server(made, "scheduled:sync", Curves({}))
    made._programs |= dict.fromkeys(made.program_keys(sync=True), len)
    Server(made, "scheduled:sync", Curves({}))


def test_algorithm_1_of_a_bucket_is_that_of_its_requests():
    """Two requests in a bucket of four: the empty rows, whatever they hold, count as no tokens."""
    rng = np.random.default_rng(0)
    confidence_RG = jnp.asarray(rng.uniform(0.6, 1.0, (4, 4)), jnp.float32)
    drafted = rounds.Drafted(None, confidence_RG, confidence_RG, confidence_RG)
    for slope in (0.01, 0.05, 0.1, 0.2):
        curve_B = jnp.asarray(1 / (1 + slope * np.arange(4 * 5 + 1)), jnp.float32)
        alone = prefix_schedule(confidence_RG[:2], curve_B).tolist()
        assert rounds.choose_now(drafted, jnp.array([3, 1, 4, 4]), 4, curve_B).tolist() == [*alone, 0, 0]


def test_stop_ids_end_a_text_inside_a_block_and_are_kept():
    plain = plain_texts(5, 16)
    stop = (plain[0][5], plain[1][9])
    texts = serve("fixed:4", [Request(p, 16, stop_ids=stop) for p in prompts(5)])
    for text, whole in zip(texts, plain, strict=True):
        ends = [i for i, token in enumerate(whole) if token in stop]
        assert text.tokens == (whole[: ends[0] + 1] if ends else whole)
        assert text.reason == ("stop" if ends else "length")


def test_a_text_does_not_depend_on_its_neighbours():
    """Sampled rows, top-k and top-p among them: alone, and in a batch of other requests, the same tokens."""
    params = [SamplingParams(1.0), SamplingParams(0.7, top_k=5), SamplingParams(1.2, top_p=0.8), SamplingParams(0.0)]
    requests = [Request(p, 10, params[i % 4], seed=i) for i, p in enumerate(prompts(6, seed=3))]
    for policy in ("off", "fixed:4"):
        together = [t.tokens for t in serve(policy, requests)]
        alone = [serve(policy, [request])[0].tokens for request in requests]
        assert together == alone
        # In a smaller round too, whose dots may go another way.
        single = []
        for request in requests:
            server = Server(of_one(), policy, None)
            text = server.submit(request)
            server.run()
            single.append(text.tokens)
        assert together == single


def test_nothing_is_transferred_unasked_and_unknown_shapes_are_refused():
    made = engine()
    server = Server(made, "scheduled", curves(), timeless)
    texts = [server.submit(Request(p, 9, seed=i)) for i, p in enumerate(prompts(9, seed=5))]
    with jax.transfer_guard("disallow"):
        server.run()
    assert all(t.reason == "length" for t in texts)
    with pytest.raises(ConfigError, match="was not compiled"):
        made.round([0], 3, made.knobs())


def test_prompts_keep_up_with_drafts(monkeypatch: pytest.MonkeyPatch):
    """As many chunks a step as a request got tokens in the last round, where times say nothing: the clock stands."""
    made, chunks = engine(), []
    prefill = made.prefill
    monkeypatch.setattr(made, "prefill", lambda *args: (chunks.append(1), prefill(*args))[1])
    for policy in ("off", "fixed:4"):
        server = Server(made, policy, curves(), timeless)
        texts = [server.submit(Request(p, 8)) for p in prompts(16)]
        most = 0
        while not server.idle:
            chunks.clear()
            server.step()
            gained = [round_.accepted + 1 for text in texts for round_ in text.rounds] or [1]
            assert len(chunks) <= max(gained)
            most = max(most, len(chunks))
        assert most == 1 if policy == "off" else most > 1


@pytest.mark.slow
def test_traces_do_not_exceed_buckets():
    """As a plain jit, called over and over while lengths grow, the round is traced once a bucket."""
    chex.clear_trace_counter()
    made = Engine(TARGET, DRAFTER, SMALL)
    counted = chex.assert_max_traces(rounds.draft_round, n=len(made.token_buckets[4]))
    step = jax.jit(counted, static_argnames=("models", "num_tokens"))
    state, slot_R = made.state, made._slots([0, 1, 2, 3])
    for _ in range(3):
        for tokens in made.token_buckets[4]:
            state, _ = step(made.models, tokens, made.weights, state, slot_R, made.knobs())


def test_a_row_with_nan_ends_alone_with_an_error():
    made = engine()
    server = Server(made, "fixed:4", curves())
    texts = [server.submit(Request(p, 12)) for p in prompts(4)]
    for _ in range(6):
        server.step()
    victim = texts[1]
    layers = made.state.target_pages
    k, v = layers[0]
    made.state = made.state._replace(target_pages=[(k.at[victim.pages[0], :, :, 0].set(jnp.nan), v), *layers[1:]])
    server.run()
    assert victim.reason == "error"
    for text, whole in zip(texts, plain_texts(4, 12), strict=True):
        if text is not victim:
            assert text.tokens == whole and text.reason == "length"
    # Its pages serve the next requests, which take all that there are, as if nothing had been.
    pages, long = set(victim.pages), [tuple(random_tokens(i, 20).tolist()) for i in range(4)]
    again = [server.submit(Request(p, 30)) for p in long]
    server.step()
    assert pages <= {page for text in again for page in text.pages}
    server.run()
    assert [text.tokens for text in again] == [g.tokens for g in generate(TARGET, None, [list(p) for p in long], 30)]


def test_policies_that_go_by_confidences_ask_for_them():
    config = dataclasses.replace(DRAFTER.config, confidence_head=False, confidence_with_markov=False)
    params = {name: part for name, part in DRAFTER.params.items() if name != "confidence_head"}
    made = Engine(TARGET, dataclasses.replace(DRAFTER, config=config, params=params), SMALL)
    for policy in ("threshold:0.5", "scheduled:sync"):
        with pytest.raises(ConfigError, match="this drafter has no confidence head"):
            Server(made, policy, curves())


def test_requests_come_leave_and_are_cancelled_at_any_time():
    made = engine()
    server = Server(made, "scheduled", curves(), timeless)
    everything = prompts(10)
    whole = plain_texts(10, 12)
    texts = []
    for number, prompt in enumerate(everything):
        texts.append(server.submit(Request(prompt, 12)))
        server.step()
        if number % 4 == 2:
            server.cancel(texts[-1])
        server.scheduler.check()
    server.run()
    for number, (text, tokens) in enumerate(zip(texts, whole, strict=True)):
        if number % 4 == 2:
            assert text.reason == "cancelled" and text.tokens == tokens[: len(text.tokens)]
        else:
            assert text.tokens == tokens
    assert server.idle


def test_drift_of_the_confidences_is_told_once(caplog: pytest.LogCaptureFixture):
    server = Server(engine(), "fixed:4", curves(), timeless)

    def told_after(rows: int, accepted: int) -> list[str]:
        """What is logged while serving, after so many rows of four drafts that were all called certain."""
        for _ in range(rows):
            server.monitor.observe(np.ones(4), 4, accepted)
        caplog.clear()
        server.submit(Request(prompts(1)[0], 4))
        server.run()
        return [record.getMessage() for record in caplog.records]

    (message,) = told_after(100, 0)
    assert "serve.calibrate" in message
    assert not told_after(100, 0), "told already"
    assert not told_after(5000, 4), "the head is right again"
    assert len(told_after(1000, 0)) == 1


def test_the_context_limit_holds_a_text_and_its_last_block():
    """A prompt and text that fill max_context to the last position: nothing leaks, nothing overruns."""
    prompt = tuple(random_tokens(7, SMALL.max_context - positions(0, 20, DRAFTER.config.num_drafts)).tolist())
    text = serve("fixed:4", [Request(prompt, 20)])[0]
    assert text.tokens == generate(TARGET, None, [list(prompt)], 20)[0].tokens
    with pytest.raises(ConfigError, match="exceeds max_context"):
        serve("fixed:4", [Request(prompt, 21)])


def test_no_round_goes_past_what_its_request_reserved(monkeypatch: pytest.MonkeyPatch):
    """Rounds that are dispatched before an end is seen included: a kernel reads the pages up to a request's length."""
    made, drafts, late = engine(), DRAFTER.config.num_drafts, 0
    server, dispatch = Server(made, "fixed:4", curves(), timeless), made.round

    def spy(slots, *args):
        nonlocal late
        length_N = np.asarray(made.state.slots.length_N)
        for slot in slots:
            text, touched = server.scheduler.running[slot], int(length_N[slot]) + 1 + drafts
            asked = len(text.request.prompt), text.request.max_new_tokens
            assert touched <= positions(*asked, drafts)
            late += touched > sum(asked) + drafts
        return dispatch(slots, *args)

    monkeypatch.setattr(made, "round", spy)
    for i, prompt in enumerate(prompts(40)):
        server.submit(Request(prompt, 5 + i % 8))
    server.run()
    assert late, "no round started behind the end of its text: this test saw nothing"


def test_a_listener_that_raises_costs_no_text_its_tokens():
    heard: dict[int, list[int]] = {}

    def listen(text: Text, tokens: list[int]) -> None:
        heard.setdefault(text.number, []).extend(tokens)
        if text.number == 0:
            raise RuntimeError("the client went away")

    server, failed = Server(engine(), "fixed:4", curves(), timeless, listen), 0
    texts = [server.submit(Request(p, 12)) for p in prompts(7)]
    while not server.idle:
        try:
            server.step()
        except RuntimeError:
            failed += 1
    assert failed and [text.tokens for text in texts] == plain_texts(7, 12)
    assert heard == {text.number: text.tokens for text in texts}


def test_places_that_no_request_has_do_not_sample():
    """The slot that a filler reads may have served a sampled request: the round is greedy all the same."""
    slots = engine().state.slots
    hot = rounds.SamplingRows(jnp.full(4, 0.8), jnp.full(4, 5), jnp.full(4, 0.9))
    view = rounds._view(slots._replace(sampling=hot), jnp.asarray([1, 4], jnp.int32))
    assert [np.asarray(x).tolist() for x in view.sampling] == [
        pytest.approx([0.8, 0.0]), [5, 0], pytest.approx([0.9, 1.0]),
    ]  # fmt: skip


def test_length_zero_is_reached_and_left_again():
    """On a machine where every drafted token costs a full step, drafting stops, but is tried from time to time."""
    server = Server(engine(), "scheduled", curves(flat=0.0, rise=1.0), timeless)
    for prompt in prompts(4):
        server.submit(Request(prompt, 30))
    server.run()
    assert 0 < server.totals.draft_rounds < server.totals.rounds // 4
    cheap = Server(engine(), "scheduled", curves(flat=1.0, rise=0.0), timeless)
    for prompt in prompts(4):
        cheap.submit(Request(prompt, 30))
    cheap.run()
    assert 0.8 * cheap.totals.rounds < cheap.totals.draft_rounds < cheap.totals.rounds  # a plain one now and then


def test_a_dearer_machine_verifies_less():
    verified = []
    for rise in (1e-5, 1e-4, 1e-3):
        server = Server(engine(), "scheduled", curves(rise=rise), timeless)
        for prompt in prompts(8):
            server.submit(Request(prompt, 16))
        server.run()
        verified.append(server.totals.verified / server.totals.rounds)
    assert verified[0] > verified[-1] and verified == sorted(verified, reverse=True)


def test_a_multiplied_out_head_drafts_the_same():
    """The table of transitions is the head: same drafts accepted, same texts."""
    requests = [Request(p, 12) for p in prompts(4)]
    made = Engine(TARGET, DRAFTER, dataclasses.replace(SMALL, dense_markov=True))
    made.compile([("prefill", 16), ("plain", 4), ("round", 4, 20)])
    made.token_buckets = {4: (20,)}
    server = Server(made, "fixed:4", curves())
    texts = [server.submit(request) for request in requests]
    server.run()
    assert [t.tokens for t in texts] == plain_texts(7, 12)[:4]
    assert [t.accepted for t in texts] == [t.accepted for t in serve("fixed:4", requests)]


def test_a_round_keeps_two_arrays_of_logits():
    """Memory of verification: the packed logits and their laws are whole, all else is rows of a request or less."""
    target = make_target(mixing=0.15, vocab_size=8192)
    config = EngineConfig(max_requests=16, request_sizes=(16,), max_context=32, page_size=16, prefill_lengths=(16,))
    made = Engine(target, good_drafter(target), config)
    program = trace(made.models, config, ("round", 16, 64), made.weights, made.state, None).lower().compile()
    assert program.memory_analysis().temp_size_in_bytes < 3 * (64 * 8192 * 4)
