"""Plain draft models: one network in training and decoding, what it may see, and what runs every drafter.

Rows are LENGTH texts of LENGTH tokens nearly everywhere: few programs to compile.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafter_runs import losses_of_a_few_steps, served
from tiny import TARGET as SHAPE
from tiny import (
    check_a_rule_splits_every_weight,
    draft_model,
    forced_outputs,
    make_drafter,
    make_target,
    random_tokens,
)

from dspark_jax import ConfigError, Drafter, SamplingParams, Target, generate, load_drafter, load_target
from dspark_jax.config import DraftSettings, LossConfig, drafter_config, plain_drafter
from dspark_jax.config_files import load_config
from dspark_jax.drafters import lm, registry
from dspark_jax.drafters.base import Committed, Proposal
from dspark_jax.kv_cache import LayerCache
from dspark_jax.sampling import sampling_rows
from dspark_jax.weights import inspect
from dspark_jax.weights.drafter_files import open_drafter, write_drafter
from dspark_jax.weights.language_model import check_tokens
from train.main import main
from train.tiny import tiny_target, tiny_tokenizer

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "tiny_lm.py"
LENGTH, DRAFTS, CLOSE = 12, 4, 1e-5
TARGET = make_target(mixing=0.15)
SMALL: dict[str, Any] = {"d_model": 16, "d_ff": 24, "num_heads": 2, "num_kv_heads": 1}  # narrower than its target
MODELS = {
    "qwen3": make_target(3, num_layers=2, **SMALL),
    "windows": make_target(4, family="mistral", layer_windows=(3, 0), tied_head=True, **SMALL),
}
DRAFTERS = {name: draft_model(TARGET, model, name == "qwen3") for name, model in MODELS.items()}
ANCHORS = np.tile([3, 0, 6], (LENGTH, 1))
_propose = jax.jit(lm.propose, static_argnames=("config", "greedy", "shortlist"))
_commit = jax.jit(lm.commit, static_argnames="config")


@pytest.fixture(params=DRAFTERS)
def drafter(request) -> Drafter:
    return DRAFTERS[request.param]


def seen(tokens: np.ndarray, seed: int = 0) -> Committed:
    """Tokens with random features, which nobody should read."""
    rng, shape = np.random.default_rng(seed), (*tokens.shape, TARGET.config.d_model)
    return Committed(tokens, np.zeros((*tokens.shape, 0, shape[-1]), np.float32), rng.normal(size=shape))


def commit(drafter: Drafter, caches: list[LayerCache], tokens: np.ndarray, start: np.ndarray) -> list[LayerCache]:
    position = start[:, None] + np.arange(tokens.shape[1])[None, :]
    return _commit(drafter.config, drafter.params, drafter.frozen, caches, seen(tokens), position)


def empty(drafter: Drafter) -> list[LayerCache]:
    return registry.init_caches(drafter.config, LENGTH, LENGTH + 4, jnp.float32)


def propose(
    drafter: Drafter, caches: list[LayerCache], first: np.ndarray, anchor: np.ndarray, **changes: Any
) -> Proposal:
    keys = jax.random.split(jax.random.key(0), (LENGTH, DRAFTS))
    rows = sampling_rows([SamplingParams(1.0), SamplingParams(0.5, top_k=3)] * (LENGTH // 2))
    return _propose(drafter.config, drafter.params, drafter.frozen, caches, first, anchor, keys, rows, **changes)


def forced(drafter: Drafter, tokens: np.ndarray, anchors: np.ndarray = ANCHORS) -> dict[str, np.ndarray]:
    return forced_outputs(drafter, seen(tokens), anchors)


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen3", "sampled"), ("windows", "sampled"), ("qwen3", "greedy"), ("windows", "shortlist")]
)
def test_a_block_has_the_law_of_the_same_block_teacher_forced(name: str, kind: str) -> None:
    """Caches filled as in decoding, the tokens from the anchor on among them; then the drafts as if they were text."""
    drafter, tokens = DRAFTERS[name], random_tokens(0, LENGTH, LENGTH)
    anchor = np.arange(LENGTH) % (LENGTH - DRAFTS)
    caches = commit(drafter, empty(drafter), tokens, np.zeros(LENGTH, int))
    changes = {"sampled": {}, "greedy": {"greedy": True}, "shortlist": {"shortlist": 5}}[kind]
    proposal = propose(drafter, caches, tokens[np.arange(LENGTH), anchor], anchor, **changes)
    sample, text = proposal.sample, tokens.copy()
    for row in range(LENGTH):
        text[row, anchor[row] + 1 : anchor[row] + 1 + DRAFTS] = sample.tokens_RG[row]
    found = forced(drafter, text, np.stack([anchor] * 3, axis=1))
    logits = found["logits"][:, 1]
    assert logits.shape == (LENGTH, DRAFTS, 40)
    if kind == "shortlist":
        best = np.argsort(-logits, axis=-1)[..., :5]
        np.testing.assert_array_equal(sample.support_RGK, best)
        logits = np.take_along_axis(logits, best, -1)
    if kind == "greedy":
        np.testing.assert_array_equal(sample.tokens_RG, logits.argmax(axis=-1))
    else:
        sharp = np.where(logits >= np.sort(logits, axis=-1)[..., -3:-2], 2 * logits, -np.inf)  # 0.5, the best 3
        wanted = np.where((np.arange(LENGTH) % 2 == 1)[:, None, None], sharp, logits)
        np.testing.assert_allclose(sample.law_RGV, jax.nn.softmax(jnp.asarray(wanted)), atol=CLOSE)
    if drafter.config.confidence_head:
        np.testing.assert_allclose(proposal.confidence_RG, found["confidence"][:, 1, :, 0], atol=CLOSE)
    else:
        assert proposal.confidence_RG is None


def test_a_slot_sees_the_tokens_up_to_the_one_before_it_and_nothing_of_the_target() -> None:
    """Row p of the batch has another token at position p and nothing else changed: the exact map of what is seen."""
    drafter, tokens = DRAFTERS["qwen3"], np.repeat(random_tokens(2, 1, LENGTH), LENGTH, axis=0)
    changed = (tokens + np.eye(LENGTH, dtype=np.int32)) % TARGET.config.vocab_size
    before, after = forced(drafter, tokens), forced(drafter, changed)
    moved = np.any([np.any(before[name] != after[name], axis=-1) for name in before], axis=0)
    position, slot = np.arange(LENGTH)[:, None], np.arange(DRAFTS)[None, :]
    for block, anchor in enumerate(ANCHORS[0]):
        np.testing.assert_array_equal(moved[:, block], position <= anchor + slot)
    other = drafter.teacher_forced(tokens, seen(tokens).taps_BSMD, ANCHORS, hidden_BSD=seen(tokens, 9).hidden_BSD)
    np.testing.assert_array_equal(other.logits_BAGV, before["logits"])


def test_rejected_tokens_are_unseen_and_then_overwritten(drafter: Drafter) -> None:
    """And caches filled in pieces are caches filled at once."""
    tokens, start = random_tokens(11, LENGTH, LENGTH), np.arange(LENGTH) % 8
    clean = commit(drafter, empty(drafter), tokens, np.zeros(LENGTH, int))
    dirty = commit(drafter, clean, random_tokens(13, LENGTH, 4), start)
    first = random_tokens(15, LENGTH)
    jax.tree.map(np.testing.assert_array_equal, *(propose(drafter, caches, first, start) for caches in (clean, dirty)))
    index = start[:, None] + np.arange(4)[None, :]
    repaired = commit(drafter, dirty, tokens[np.arange(LENGTH)[:, None], index], start)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=CLOSE), repaired, clean)


def test_a_block_reads_its_own_conversation_and_nothing_else() -> None:
    drafter, anchors = DRAFTERS["windows"], np.array([[1, 3, 4, 6, 8, 10]])
    start, tokens = np.repeat([0, 4, 8], 4)[None].astype(np.int32), random_tokens(16, 1, LENGTH)

    @jax.jit
    def blocks(tokens: jax.Array, start: jax.Array, anchors: jax.Array) -> jax.Array:
        arguments = drafter.config, drafter.params, drafter.frozen
        rows = lm.context_rows(*arguments, Committed(tokens, tokens, tokens), start)
        return lm.teacher_forced_blocks(*arguments, tokens, rows, anchors).hidden_BAGD

    packed = np.asarray(blocks(tokens, start, anchors))
    for begin in (0, 4, 8):
        own = start[0, anchors[0]] == begin
        alone = blocks(tokens[:, begin : begin + 4], np.zeros((1, 4), np.int32), anchors[:, own] - begin)
        inside = anchors[0, own, None] + np.arange(DRAFTS) < begin + 4
        np.testing.assert_allclose(packed[:, own][:, inside], np.asarray(alone)[:, inside], atol=CLOSE)


PROMPTS = [random_tokens(i, length).tolist() for i, length in enumerate((1, 3, 12, 20))]
NEW = 12


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [one.tokens for one in generate(TARGET, None, PROMPTS, NEW)]


def test_greedy_text_is_the_targets_own(drafter: Drafter, plain: list[list[int]]) -> None:
    """Though the draft model is nonsense."""
    assert [one.tokens for one in generate(TARGET, drafter, PROMPTS, NEW)] == plain


def test_a_target_that_drafts_for_itself_is_always_right(plain: list[list[int]]) -> None:
    texts = generate(TARGET, draft_model(TARGET, TARGET), PROMPTS, NEW)
    assert [one.tokens for one in texts] == plain
    # The prompt's pass brings one token, each round all drafts and one more; the last is cut.
    assert [[r.accepted for r in one.rounds] for one in texts] == [[DRAFTS] * -(-(NEW - 1) // (DRAFTS + 1))] * 4


@pytest.mark.slow
@pytest.mark.parametrize("itself", [True, False])
def test_the_engine_writes_the_same_text(itself: bool, plain: list[list[int]]) -> None:
    drafter = draft_model(TARGET, TARGET) if itself else DRAFTERS["windows"]
    for texts in served(TARGET, drafter, PROMPTS, NEW, 1e-5):
        assert [text.tokens for text in texts] == plain
        assert not itself or sum(text.accepted for text in texts) > 8


def test_a_rule_says_how_every_weight_is_split(drafter: Drafter) -> None:
    check_a_rule_splits_every_weight(drafter.params)


def test_a_few_steps_lower_the_loss() -> None:
    losses = losses_of_a_few_steps(load_config(CONFIG))
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.97 * losses[0]


@pytest.mark.slow
def test_a_run_writes_a_language_model_that_loads_and_trains_on(tmp_path: Path) -> None:
    """From the command line: trained, measured, written; then tuned further as any language model is."""
    short = {"max-steps": 2, "eval-every": 2, "eval-prompts": 2, "eval-tokens": 8}
    more = [f"--train.{name}={value}" for name, value in short.items()]
    for name, further in (("a", []), ("b", ["--train.start-from", str(tmp_path / "a" / "drafter")])):
        assert main(["--config", str(CONFIG), "--workdir", str(tmp_path / name), *more, *further]) == 0
        drafter = load_drafter(tmp_path / name / "drafter_best", tiny_target())
        assert (drafter.config.algorithm, drafter.config.num_layers, drafter.config.num_drafts) == ("lm", 1, 3)
        load_target(tmp_path / name / "drafter")
        assert str(tmp_path) not in (tmp_path / name / "drafter" / "config.json").read_text(), "a place on this machine"


def with_tokens(target: Target) -> Target:
    return dataclasses.replace(target, tokenizer=tiny_tokenizer())


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2"])
def test_a_round_trip_is_bit_equal_and_a_target_too(tmp_path: Path, name: str) -> None:
    model = make_target(6, family=name, qkv_bias=name == "qwen2", tied_head=name == "llama", **SMALL)
    drafter = draft_model(TARGET, model, name == "qwen3")
    config = dataclasses.replace(drafter.config, block_size=3)
    write_drafter(tmp_path / "m", "huggingface", config, drafter.params, None, {"step": 7}, "float32")
    checkpoint = open_drafter(tmp_path / "m", TARGET.config)
    assert (checkpoint.config, checkpoint.notes) == (config, {"step": 7})
    jax.tree.map(np.testing.assert_array_equal, checkpoint.params, drafter.params)
    jax.tree.map(np.testing.assert_array_equal, load_target(tmp_path / "m").params, model.params)


def test_a_language_model_is_recognised_and_told_how_much_to_draft(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    c = draft_model(TARGET, MODELS["qwen3"])
    write_drafter(tmp_path / "m", "huggingface", c.config, c.params, None, {}, "bfloat16")
    assert load_drafter(tmp_path / "m", TARGET).config.num_drafts == 4
    assert "a language model (qwen3, 2 layers of width 16) as a plain draft model, 4 drafts" in capsys.readouterr().err
    assert load_drafter(tmp_path / "m", TARGET, block_size=2).config.num_drafts == 2
    shown = dict(inspect.rows(open_drafter(tmp_path / "m")))
    assert "it can be the plain draft model of a target with the same tokens" in shown["what"]
    assert shown["vocabulary"].startswith("40 ids, without a tokenizer")
    d = make_drafter(TARGET)
    write_drafter(tmp_path / "d", "deepspec", d.config, d.params, None, {})
    with pytest.raises(ConfigError, match="block_size = 2: only a plain draft model leaves that open"):
        load_drafter(tmp_path / "d", TARGET, block_size=2)


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    c = draft_model(TARGET, make_target(6, eos_token_ids=(3,), **SMALL))
    write_drafter(tmp_path / "m", "huggingface", c.config, c.params, None, {})
    with pytest.raises(ConfigError, match="vocab_size = 40, but the target's is 50, so it cannot draft"):
        load_drafter(tmp_path / "m", make_target(vocab_size=50))
    with pytest.raises(ConfigError, match=r"eos_token_id = \[3\], but the target's are \[2, 5\]"):
        load_drafter(tmp_path / "m", make_target(eos_token_ids=(2, 5)))
    assert load_drafter(tmp_path / "m", make_target(eos_token_ids=(2, 3))).config.num_drafts == 4
    same, other = tiny_tokenizer(), tiny_tokenizer()
    check_tokens("m", c.config, same, TARGET.config, other)
    other.tokenizer.add_tokens(["<new>"])
    with pytest.raises(ConfigError, match="its tokenizer has id None for '<new>', the target's 260"):
        check_tokens("m", c.config, same, TARGET.config, other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"language_model": None}, "language_model = None: a drafter of algorithm 'lm' is one"),
        ({"d_model": 8}, "d_model = 8: this plain draft model has 16"),
        ({"markov_rank": 8}, "markov_rank = 8: not a setting of lm"),
        ({"draft_vocab_size": 8}, "draft_vocab_size = 8: lm has 0 and nothing else"),
        ({"algorithm": "mtp", "num_layers": 1}, "language_model = .*: not a setting of mtp"),
        ({"confidence_with_markov": True}, "confidence_with_markov = True: not a setting of lm"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(plain_drafter(MODELS["qwen3"].config, 4), **changes)


def test_settings_become_a_decoder_of_the_targets_kind() -> None:
    made = drafter_config(DraftSettings(algorithm="lm", num_layers=1, d_ff=8), SHAPE)
    assert made.language_model == dataclasses.replace(SHAPE, num_layers=1, d_ff=8)
    assert (made.num_drafts, made.confidence_head) == (7, True)
    for changes in ({"layer_windows": (4,)}, {"draft_vocab_size": 8}, {"markov_rank": 8}, {"target_layer_ids": (0,)}):
        with pytest.raises(ConfigError, match="lm drafters have"):
            drafter_config(DraftSettings(algorithm="lm", **changes), SHAPE)
    config = load_config(CONFIG)
    with pytest.raises(ConfigError, match="loss base_until, base_ce: an lm drafter"):
        dataclasses.replace(config, loss=LossConfig(base_ce=1.0))


def test_what_hugging_face_has_no_words_for_is_not_written(tmp_path: Path) -> None:
    c = DRAFTERS["windows"]
    with pytest.raises(ConfigError, match="cannot hold sliding windows"):
        write_drafter(tmp_path / "m", "huggingface", c.config, c.params, None, {})
