"""The cells of the sequential head, by the name of the head's type."""

from dspark_jax.config import DrafterConfig, MarkovHeadType
from dspark_jax.drafters.cells.base import Cell
from dspark_jax.drafters.cells.base import Previous as Previous
from dspark_jax.drafters.cells.delta import GatedDeltaNet, KimiDelta
from dspark_jax.drafters.cells.gates import Domino, Gated, Rnn, Vanilla
from dspark_jax.drafters.cells.mamba import Mamba2
from dspark_jax.drafters.cells.ngrams import HashedNgram, Ngram

_CELLS: dict[MarkovHeadType, type[Cell]] = {
    "vanilla": Vanilla,
    "gated": Gated,
    "rnn": Rnn,
    "ngram": Ngram,
    "hashed_ngram": HashedNgram,
    "gdn": GatedDeltaNet,
    "kda": KimiDelta,
    "mamba2": Mamba2,
    "domino": Domino,
}


def make_cell(config: DrafterConfig) -> Cell:
    return _CELLS[config.markov_head_type](config)
