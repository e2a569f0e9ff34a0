"""``goldilocks.features``: which features of the prompts a selector is given.

The matrix that a policy is given: a row for each prompt, few columns, each with mean 0 and variance 1.

Wide features are reduced to their principal components. The components are found on a sample of the prompts that is
spread evenly over the data, and the prompts are then projected a chunk at a time: a million prompts need the memory of
the matrix and not of their n-grams.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from goldilocks.errors import require
from goldilocks.features.text import LENGTHS, column_features, text_features

KINDS = ("text", "hidden")
DIMENSIONS = 48


@dataclass(frozen=True)
class Features:
    """``kind``: from the text alone, or from the policy's hidden states; ``columns`` are added to either."""

    kind: str = "text"
    columns: Sequence[str] = field(default_factory=list)
    dimensions: int = DIMENSIONS

    def __post_init__(self) -> None:
        require(self.kind in KINDS, "goldilocks.features.kind", self.kind, f"one of {', '.join(KINDS)}")
        require(self.dimensions >= 1, "goldilocks.features.dimensions", self.dimensions, "1 or more components")

    def of(self, source: Any, hidden_states: Callable[[], np.ndarray] | None = None) -> np.ndarray:
        """The matrix for a source with ``texts()`` and, where columns are named, ``column(name)``."""
        columns = {name: source.column(name, "goldilocks.features.columns") for name in self.columns}
        if self.kind == "text":
            return feature_matrix(source.texts(), columns, self.dimensions)
        require(hidden_states is not None, "goldilocks.features.kind", self.kind, "text: there is no model here")
        assert hidden_states is not None
        states = hidden_states()
        named = [column_features(name, values) for name, values in columns.items()]
        return with_intercept(reduce(lambda rows: states[rows], len(states), self.dimensions), *named)


SAMPLE = 20_000
CHUNK = 4_096

LEAST = 1e-3  # of the first component's variance: what varies less is rounding, or next to nothing


@dataclass(frozen=True)
class Standard:
    """Shifts and scales columns to mean 0 and variance 1; a column that does not vary becomes 0."""

    mean: np.ndarray
    scale: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> Standard:
        std = values.std(axis=0)
        return cls(values.mean(axis=0), np.where(std > 1e-6, 1 / np.maximum(std, 1e-6), 0.0))

    def __call__(self, values: np.ndarray) -> np.ndarray:
        return np.asarray((values - self.mean) * self.scale)


def feature_matrix(
    texts: Sequence[str], columns: Mapping[str, Sequence[object]] | None = None, dimensions: int = DIMENSIONS
) -> np.ndarray:
    """Features of the texts, and of the columns named: an intercept, lengths, components of n-grams, the columns."""
    require(dimensions >= 1, "goldilocks.features.dimensions", dimensions, "1 or more")
    reduced = reduce(lambda rows: text_features([texts[row] for row in rows]), len(texts), dimensions, LENGTHS)
    named = [column_features(name, values) for name, values in (columns or {}).items()]
    return with_intercept(reduced, *named)


def reduce(features: Callable[[np.ndarray], np.ndarray], size: int, dimensions: int, untouched: int = 0) -> np.ndarray:
    """The first ``untouched`` columns and the principal components of the rest; ``features`` gives rows by index."""
    sample = features(np.unique(np.linspace(0, size - 1, min(size, SAMPLE)).astype(np.int64)))
    standard = Standard.of(sample)
    wide = standard(sample)[:, untouched:]
    components = _components(wide, dimensions)
    parts = []
    for start in range(0, size, CHUNK):
        rows = standard(features(np.arange(start, min(start + CHUNK, size))))
        parts.append(np.hstack([rows[:, :untouched], rows[:, untouched:] @ components]))
    return np.concatenate(parts)


def _components(values: np.ndarray, dimensions: int) -> np.ndarray:
    """The directions in which the rows vary most; those in which they hardly vary are left out.

    The sign of each is fixed, so that the order of the rows does not decide it.
    """
    variances, vectors = np.linalg.eigh((values.T @ values).astype(np.float64))
    variances, vectors = variances[::-1][:dimensions], vectors[:, ::-1][:, :dimensions]
    vectors = vectors[:, variances > LEAST * max(variances[0], 1e-12)]
    largest = np.abs(vectors).argmax(axis=0)
    return np.asarray(vectors * np.sign(vectors[largest, np.arange(vectors.shape[1])]))


def with_intercept(*blocks: np.ndarray) -> np.ndarray:
    """Blocks of columns side by side, standardised, behind a column of ones. Columns that do not vary are left out."""
    values = np.hstack(blocks)
    standardised = Standard.of(values)(values)
    varies = np.abs(standardised).max(axis=0, initial=0.0) > 0
    ones = np.ones((len(values), 1))
    return np.ascontiguousarray(np.hstack([ones, standardised[:, varies]]), dtype=np.float32)
