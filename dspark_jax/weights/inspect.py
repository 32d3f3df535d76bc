"""What a drafter checkpoint is, as a table.

    python -m dspark_jax.weights.inspect PATH [--target TARGET]

PATH is a drafter's folder in any format that is read here, a training run's folder, or a Hub id; or a language model,
which can be a plain draft model.
"""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from dspark_jax.config import SIZE_FIELDS, ConfigError, DrafterConfig
from dspark_jax.weights import cli
from dspark_jax.weights.drafter_files import DrafterCheckpoint, check_writable, open_drafter, writable
from dspark_jax.weights.export import trained_on
from dspark_jax.weights.locate import read_target


@dataclasses.dataclass(frozen=True)
class Args:
    path: Annotated[str, tyro.conf.Positional]
    """The drafter: a folder, a training run's folder, or a Hub id (org/name or org/name@revision)."""
    target: str = ""
    """The drafter's target, for checkpoints that leave something to it."""


def main(argv: Sequence[str] | None = None) -> int:
    args = tyro.cli(Args, args=argv, prog="dspark_jax.weights.inspect", description=__doc__)

    def show() -> None:
        target = read_target(args.target, only=())[0] if args.target else None
        checkpoint = open_drafter(cli.drafter_folder(args.path), target)
        table = Table("what", "value", title=args.path, title_justify="left")
        for what, value in rows(checkpoint):
            table.add_row(what, value)
        Console(soft_wrap=True).print(table)

    return cli.run(show)


def rows(checkpoint: DrafterCheckpoint) -> Iterator[tuple[str, str]]:
    """Lines of the table: name and value."""
    c, told = checkpoint.config, trained_on(checkpoint)
    leaves = jax.tree.leaves(checkpoint.params)
    if c.language_model:
        yield from _draft_model(checkpoint, sum(leaf.size for leaf in leaves))
        return
    rows_are = "every row is a draft" if c.layout == "anchor_first" else "the anchor's row is none"
    yield "format", checkpoint.form.title
    yield "layout", f"{c.layout}: {c.block_size} rows, {c.num_drafts} drafts a block ({rows_are})"
    size = sum(leaf.size for leaf in leaves)
    stored = ", ".join(sorted({str(leaf.dtype) for leaf in leaves}))
    yield "parameters", f"{size:,} of its own, {sum(leaf.nbytes for leaf in leaves) / 2**20:.1f} MiB, {stored}"
    yield "copies of the target's", ", ".join(checkpoint.copies) or "none"
    heads = f"{c.num_heads} heads, {c.num_kv_heads} key/value heads, head size {c.head_dim}"
    yield "layers", f"{c.num_layers}: width {c.d_model}, MLP {c.d_ff}, {heads}"
    yield "attention", _attention(checkpoint)
    taps = ", ".join(map(str, c.target_layer_ids))
    read = f"{taps} of {c.num_target_layers} (-1 is the embedding)" if taps else "none: its last hidden state is read"
    yield "target layers", read
    yield "sequential head", _sequential(c)
    if c.conv_group_size:
        yield "convolutions", f"around attention and MLP, coefficients shared by {c.conv_group_size} channels"
    reads = "hidden state and previous token" if c.confidence_with_markov else "hidden state"
    yield "confidence head", f"yes, from the {reads}" if c.confidence_head else "none"
    reduced = f"{c.draft_vocab_size:,} of {c.vocab_size:,} ids" if c.draft_vocab_size else f"all {c.vocab_size:,} ids"
    yield "draft vocabulary", reduced if c.chain else f"{reduced}; mask token {c.mask_token_id}"
    if c.chain:
        yield "head", "its own" if c.own_head else "the target's"
    yield "rope, norm, context", f"theta {c.rope_theta:g}, epsilon {c.norm_eps:g}, {c.max_length} positions"
    for key in ("target", "chat_template", "thinking", "loss"):
        yield f"trained on: {key.replace('_', ' ')}", _plain(told.get(key))
    for key in ("step", "measured"):
        if key in checkpoint.notes:
            yield key, _plain(checkpoint.notes[key])
    fits = f"any target of width {c.d_model}, {c.vocab_size:,} ids and {c.num_target_layers} layers"
    yield "can be served on", f"{told['target']}; in shape, {fits}" if told.get("target") else f"in shape, {fits}"
    yield "can be written as", ", ".join(name for name in writable(c.algorithm) if _writable(name, c))


def _draft_model(checkpoint: DrafterCheckpoint, size: int) -> Iterator[tuple[str, str]]:
    """The lines of a language model that may draft."""
    c, whole = checkpoint.config, checkpoint.config.language_model
    assert whole is not None
    yield "what", "a language model: it can be the plain draft model of a target with the same tokens"
    yield "drafts", f"{c.num_drafts} a block, unless load_drafter is told otherwise"
    yield "parameters", f"{size:,}"
    heads = f"{c.num_heads} heads, {c.num_kv_heads} key/value heads, head size {c.head_dim}"
    yield "layers", f"{c.num_layers} of {whole.family}: width {c.d_model}, MLP {c.d_ff}, {heads}"
    yield "head", "its embedding" if whole.tied_head else "its own"
    yield "confidence head", "yes, from the hidden state" if c.confidence_head else "none"
    tokens = "with its tokenizer" if checkpoint.tokenizer else "without a tokenizer"
    yield "vocabulary", f"{c.vocab_size:,} ids, {tokens}; a text ends with {', '.join(map(str, whole.eos_token_ids))}"
    yield "rope, norm, context", f"theta {c.rope_theta:g}, epsilon {c.norm_eps:g}, {c.max_length} positions"
    yield "can be served on", f"any target with these {c.vocab_size:,} tokens"


def _writable(format_name: str, config: DrafterConfig) -> bool:
    try:
        check_writable(format_name, config)
    except ConfigError:
        return False
    return True


def _sequential(c: DrafterConfig) -> str:
    if c.selector_rank:
        codes = "projections of the embedding" if c.selector_tied else "tables of their own"
        return f"selector, rank {c.selector_rank}, {c.selector_top_k} candidates a draft; codebooks are {codes}"
    if not c.markov_rank:
        return "none"
    sizes = "".join(f", {field.replace('_', ' ')} {getattr(c, field)}" for field in SIZE_FIELDS if getattr(c, field))
    tied = ", W1 tied to the embedding" if c.markov_tied else ""
    return f"Markov, {c.markov_head_type}, rank {c.markov_rank}{sizes}{tied}"


def _attention(checkpoint: DrafterCheckpoint) -> str:
    c = checkpoint.config
    windows, causal = c.layer_windows or (0,) * c.num_layers, c.layer_causal or (False,) * c.num_layers
    words = [
        f"{f'window {window}' if window else 'full'}{', causal in the block' if one else ''}"
        for window, one in zip(windows, causal, strict=True)
    ]
    return words[0] if len(set(words)) == 1 else "; ".join(f"layer {i}: {word}" for i, word in enumerate(words))


def _plain(value: Any) -> str:
    if value is None:
        return "not recorded"
    if isinstance(value, dict):
        return ", ".join(f"{key} {one:.4g}" if isinstance(one, float) else f"{key} {one}" for key, one in value.items())
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
