"""W1 and W2 of the sequential head from the bigrams of the training answers, in place of random numbers.

The table to factor is the log-ratio of what follows a token to what follows any token, with K pseudo-counts a row that
are spread as the unigram law p is:

    log ((N_ab + K p_b) / (N_a + K) / p_b)  =  log (1 + N_ab / (K p_b))  +  log (K / (N_a + K))

The second term is the same for every b, and a softmax takes no notice of it. What is left is zero for every pair that
was never seen, so a sparse table is the exact one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse

from train.conversations import Record

_PSEUDO_COUNTS = 10.0
_SPARE_DIRECTIONS, _ITERATIONS = 16, 6  # of the subspace iteration


def bigram_factors(
    records: Sequence[Record], rank: int, vocab_size: int, draft_vocabulary: np.ndarray | None, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """W1 [V, rank] and W2 [rows of the draft head, rank], float32, whose product is near the table above.

    The truncated SVD is weighted: row a counts by how often a comes, column b by how often b follows, so that rank is
    not spent on pairs that hardly ever occur. Columns of the factors for which the table has no more directions are
    Normal(0, 0.02), as they are without a corpus. The same for the same records and seed.
    """
    counts = _counts(records, vocab_size, draft_vocabulary)
    row_weight, column_weight = (np.asarray(counts.sum(axis=axis)).ravel() / counts.sum() for axis in (1, 0))
    table = counts.copy()
    table.data = np.log1p(counts.data / (_PSEUDO_COUNTS * column_weight[counts.indices]))
    by_row, by_column = (scipy.sparse.diags_array(np.sqrt(weight)) for weight in (row_weight, column_weight))
    rng = np.random.default_rng(seed)
    left, strength, right = _truncated_svd(by_row @ table @ by_column, rank, rng)
    kept = strength > 1e-6 * strength.max()
    left, right = left[:, kept] / np.sqrt(strength[kept]), right[kept].T / np.sqrt(strength[kept])
    sizes = len(row_weight), len(column_weight)
    w1, w2 = (rng.normal(scale=0.02, size=(size, rank)).astype(np.float32) for size in sizes)
    # Each side is the table times the other's singular vectors: rows of no weight need no division.
    w1[:, : kept.sum()] = table @ (by_column @ right)
    w2[:, : kept.sum()] = table.T @ (by_row @ left)
    return w1, w2


def _truncated_svd(table: Any, rank: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Singular vectors and values by subspace iteration, largest first: U [rows, k], S [k], V' [k, columns].

    scipy's own (ARPACK) gave other signs from one call to the next, whatever was seeded.
    """
    width = min(rank + _SPARE_DIRECTIONS, *table.shape)
    basis = np.linalg.qr(table @ rng.normal(size=(table.shape[1], width)))[0]
    for _ in range(_ITERATIONS):
        basis = np.linalg.qr(table @ np.linalg.qr(table.T @ basis)[0])[0]
    left, strength, right = np.linalg.svd((table.T @ basis).T, full_matrices=False)
    return (basis @ left)[:, :rank], strength[:rank], right[:rank]


def _counts(records: Sequence[Record], vocab_size: int, draft_vocabulary: np.ndarray | None) -> Any:
    """How often each draft id [columns] is the assistant's own and follows each id [rows]: a sparse array, by rows."""
    previous = np.concatenate([record.tokens[:-1][record.supervised[1:]] for record in records])
    following = np.concatenate([record.tokens[1:][record.supervised[1:]] for record in records])
    columns = vocab_size
    if draft_vocabulary is not None:
        columns = len(draft_vocabulary)
        place = np.full(vocab_size, -1)
        place[draft_vocabulary] = np.arange(columns)
        following = place[following]
        previous, following = previous[following >= 0], following[following >= 0]
    pairs, number = np.unique(previous.astype(np.int64) * columns + following, return_counts=True)
    where = pairs // columns, pairs % columns
    return scipy.sparse.csr_array((number.astype(np.float64), where), shape=(vocab_size, columns))
