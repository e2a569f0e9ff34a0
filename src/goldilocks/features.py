"""Features of prompts: from the text, from columns of the data, or from a model.

``goldilocks.features``: a matrix with a row for each prompt, few columns with mean 0 and variance 1. Without a model
they are hashed n-grams and lengths of a prompt's text, and columns of the data. In an n-gram, a number is replaced by
its number of digits: ``17 + 250`` and ``23 + 118`` are equally hard, and share their n-grams. The hash is the same in
every process, so features need not be saved with a checkpoint. Wide features are reduced to their principal components,
which are found on a sample that is spread evenly over the data. The prompts are then projected a chunk at a time, so
that a million prompts need the memory of the matrix and not of their n-grams.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from goldilocks.core.strata import digits_of, words
from goldilocks.errors import require

KINDS = ("text", "hidden")
DIMENSIONS = 48
SAMPLE = 20_000
CHUNK = 4_096
LEAST = 1e-3  # share of the first component's variance below which a component is left out
BUCKETS = 512
LONGEST_GRAM = 3
MOST_WORDS = 32  # of a column
LENGTHS = 4  # columns before the buckets


@dataclass(frozen=True)
class Features:
    """``kind``: from the text alone, or from the policy's hidden states. ``columns`` are added to either."""

    kind: str = "text"
    columns: Sequence[str] = field(default_factory=list)
    dimensions: int = DIMENSIONS

    def __post_init__(self) -> None:
        require(self.kind in KINDS, "goldilocks.features.kind", self.kind, f"one of {', '.join(KINDS)}")
        require(self.dimensions >= 1, "goldilocks.features.dimensions", self.dimensions, "1 or more components")

    def of(self, source: Any, hidden_states: Callable[[], np.ndarray] | None = None) -> np.ndarray:
        """Return the matrix for a source with ``texts()`` and, where columns are named, ``column(name, key)``.

        It has an intercept, the lengths and n-grams of the texts or the states, as components, and the columns.
        """
        key = "goldilocks.features.columns"
        named = [column_features(name, source.column(name, key)) for name in self.columns]
        if self.kind == "text":
            texts, size = source.texts(), self.dimensions
            reduced = reduce(lambda rows: text_features([texts[row] for row in rows]), len(texts), size, LENGTHS)
            return with_intercept(reduced, *named)
        if hidden_states is None:
            raise ValueError(f"goldilocks.features.kind={self.kind!r} is not accepted: text: there is no model here")
        states = hidden_states()
        return with_intercept(reduce(lambda rows: states[rows], len(states), self.dimensions), *named)


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


def reduce(features: Callable[[np.ndarray], np.ndarray], size: int, dimensions: int, untouched: int = 0) -> np.ndarray:
    """Return the first ``untouched`` columns and the principal components of the rest; ``features`` returns rows."""
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
    """Return the directions in which the rows vary most. Their signs do not depend on the order of the rows."""
    variances, vectors = np.linalg.eigh((values.T @ values).astype(np.float64))
    variances, vectors = variances[::-1][:dimensions], vectors[:, ::-1][:, :dimensions]
    vectors = vectors[:, variances > LEAST * max(variances[0], 1e-12)]
    largest = np.abs(vectors).argmax(axis=0)
    return np.asarray(vectors * np.sign(vectors[largest, np.arange(vectors.shape[1])]))


def with_intercept(*blocks: np.ndarray) -> np.ndarray:
    """Return the columns that vary, side by side and standardised, behind a column of ones."""
    values = np.hstack(blocks)
    standardised = Standard.of(values)(values)
    varies = np.abs(standardised).max(axis=0, initial=0.0) > 0
    ones = np.ones((len(values), 1))
    return np.ascontiguousarray(np.hstack([ones, standardised[:, varies]]), dtype=np.float32)


def text_features(texts: Sequence[str]) -> np.ndarray:
    """Return a row for each text: four lengths, then the logarithm of each bucket's count of n-grams."""
    counts = np.zeros((len(texts), LENGTHS + BUCKETS), dtype=np.float32)
    for row, text in zip(counts, texts, strict=True):
        found = words(text)
        numbers = [word for word in found if digits_of(word)]
        digits = sum(character.isdigit() for character in text)
        row[:LENGTHS] = len(text), len(found), len(numbers), digits
        for size in range(1, LONGEST_GRAM + 1):
            for start in range(len(found) - size + 1):
                row[LENGTHS + _bucket(" ".join(found[start : start + size]))] += 1
    return np.log1p(counts)


@lru_cache(maxsize=1 << 16)
def _bucket(gram: str) -> int:
    return zlib.crc32(gram.encode()) % BUCKETS


def column_features(name: str, values: Sequence[object]) -> np.ndarray:
    """Return a column of numbers, missing ones as their mean; of words, a column for each frequent word."""
    key = "goldilocks.features.columns"
    require(any(value is not None for value in values), key, name, "a column with values")
    try:
        column = np.array([math.nan if value is None else float(value) for value in values])  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return _indicators(list(map(str, values)))
    known = np.isfinite(column)
    require(bool(known.any()), key, name, "a column with finite numbers")
    return np.asarray(np.where(known, column, column[known].mean())[:, None])


def _indicators(values: Sequence[str]) -> np.ndarray:
    """Return a column for each of the most frequent values, 1 where a prompt has the value."""
    frequent = Counter(sorted(values)).most_common(MOST_WORDS)
    places = {value: place for place, (value, _) in enumerate(frequent)}
    found = np.array([places.get(value, -1) for value in values])
    return found[:, None] == np.arange(len(places))[None, :]
