"""Write a drafter in one of the public formats.

    python -m dspark_jax.weights.export CHECKPOINT --format deepspec|speculators|zlab|specforge|mtp OUT

CHECKPOINT is a drafter's folder in any format that is read here, a training run's folder, or a Hub id. Weights are
stored as they are, bit for bit, except that --target multiplies tied codebooks out into the tables that others read.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from dspark_jax.config import ConfigError
from dspark_jax.drafters import registry
from dspark_jax.drafters.drafter import frozen_parts
from dspark_jax.weights import cli
from dspark_jax.weights.drafter_files import (
    DrafterCheckpoint,
    check_copies,
    extensions,
    open_drafter,
    write_drafter,
)
from dspark_jax.weights.drafter_format import EMBEDDING, HEAD
from dspark_jax.weights.locate import EMBEDDED, EMBEDDED_NAME, read_target


@dataclasses.dataclass(frozen=True)
class Args:
    checkpoint: Annotated[str, tyro.conf.Positional]
    """The drafter: a folder, a training run's folder, or a Hub id (org/name or org/name@revision)."""
    out: Annotated[str, tyro.conf.Positional]
    """Folder to write, new or empty."""
    format: Literal["deepspec", "speculators", "zlab", "specforge", "mtp"]
    """deepspec: what DeepSpec trains. speculators: what vLLM serves. zlab: DFlash without heads, fill_in; DFlash 2.
    specforge: EAGLE-3 with a Llama layer, what SGLang serves. mtp: MTP."""
    target: str = ""
    """The drafter's target, to check it and to put its embedding and head beside the drafter."""


def main(argv: Sequence[str] | None = None) -> int:
    args = tyro.cli(Args, args=argv, prog="dspark_jax.weights.export", description=__doc__)
    return cli.run(lambda: export(args.checkpoint, args.out, args.format, args.target))


def export(checkpoint_path: str, out: str, format_name: str, target_path: str = "") -> None:
    """Reads a drafter and writes it to `out` in the named format. Raises ConfigError for what cannot be."""
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{out}: already there and not an empty folder; name another")
    place = cli.drafter_folder(checkpoint_path)
    target = read_target(target_path, only=("embed", "head")) if target_path else None
    checkpoint = open_drafter(place, target[0] if target else None)
    if checkpoint.config.kind.whole_model:
        raise ConfigError(f"{checkpoint_path}: a language model; servers read it as it is, so there is nothing to do")
    reduced = checkpoint.draft_to_target is not None and not checkpoint.config.own_head
    if target is None and reduced and format_name in ("speculators", "specforge") and HEAD not in checkpoint.copies:
        if trained_on(checkpoint)["target"] not in (EMBEDDED, EMBEDDED_NAME):
            raise ConfigError(
                f"{checkpoint_path}: drafts over {checkpoint.config.draft_vocab_size} ids, whose head the {format_name}"
                " format stores and this checkpoint does not; name its target with --target"
            )
        target = read_target(EMBEDDED, only=("embed", "head"))
        checkpoint = open_drafter(place, target[0])
    copies: dict[str, np.ndarray] = {}
    notes = checkpoint.notes | {"trained_on": trained_on(checkpoint)}
    if target:
        target_config, target_params, tokenizer = target
        check_copies(checkpoint, target_params)
        if format_name != "zlab":
            copies = _copies(checkpoint, target_params)
        known = {"target": target_config.name, "chat_template": tokenizer.template_hash if tokenizer else None}
        recorded = {key: value for key, value in notes["trained_on"].items() if value is not None}
        notes["trained_on"] = notes["trained_on"] | known | recorded
        checkpoint = _folded(checkpoint, target_params)
    elif format_name != "zlab":
        copies = {name: checkpoint.copy(name) for name in checkpoint.copies}
    write_drafter(
        folder, format_name, checkpoint.config, checkpoint.params, checkpoint.draft_to_target, notes, None, copies
    )
    if ours := extensions(format_name, checkpoint.config):
        print(f"{out}: only dspark_jax reads {', '.join(ours)} in the {format_name} format", file=sys.stderr)
    beside = f"with the target's {' and '.join(copies)}" if copies else "without the target's embedding and head"
    print(f"{out}: {checkpoint.summary.replace(checkpoint.form.title, format_name)}; {beside}")


def _folded(checkpoint: DrafterCheckpoint, target_params: dict[str, Any]) -> DrafterCheckpoint:
    """The checkpoint as other programs know it, with nothing left that needs the target's embedding."""
    frozen = frozen_parts(target_params, checkpoint.draft_to_target)
    config, params = registry.fold(checkpoint.config, checkpoint.params, frozen)
    return dataclasses.replace(checkpoint, config=config, params=params)


def trained_on(checkpoint: DrafterCheckpoint) -> dict[str, Any]:
    """What a checkpoint's notes say of its training: target, chat template, thinking, layout, loss; None where
    nothing is known."""
    notes = checkpoint.notes
    run = notes.get("config") or {}
    found = {
        "target": (run.get("target") or {}).get("path"),
        "chat_template": notes.get("chat_template"),
        "thinking": notes.get("thinking"),
        "layout": checkpoint.config.layout,
        "loss": run.get("loss"),
    }
    return found | (notes.get("trained_on") or {})


def _copies(checkpoint: DrafterCheckpoint, target_params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The target's embedding and, where the drafter has no head of its own, its head's rows for the draft vocabulary,
    in the drafter's own dtype."""
    dtype = checkpoint.params["backbone"]["fc"].dtype
    embedding = {EMBEDDING: np.asarray(target_params["embed"]).astype(dtype)}
    if checkpoint.config.own_head:
        return embedding
    head = np.asarray(target_params.get("head", target_params["embed"]))
    rows = checkpoint.draft_to_target
    return embedding | {HEAD: (head if rows is None else head[rows]).astype(dtype)}


if __name__ == "__main__":
    sys.exit(main())
