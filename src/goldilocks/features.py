"""Features and strata of prompts: from the text, from columns of the data, or from a model.

``goldilocks.features``: a matrix with a row for each prompt, few columns with mean 0 and variance 1. Without a model
they are hashed n-grams and lengths of a prompt's text, and columns of the data. In an n-gram, a number is replaced by
its number of digits: ``17 + 250`` and ``23 + 118`` are equally hard, and share their n-grams. The hash is the same in
every process, so features need not be saved with a checkpoint. Wide features are reduced to their principal components,
which are found on a sample that is spread evenly over the data. The prompts are then projected a chunk at a time, so
that a million prompts need the memory of the matrix and not of their n-grams.

``goldilocks.strata``: which prompts resemble one another. Strata are nested: each depth divides the strata of the depth
above. A stratum of a few prompts says no more than the prompts themselves, so small ones are merged within the stratum
above.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

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
_TOKEN = re.compile(r"\d+|[^\W\d_]+|[^\w\s]|_")

SMALLEST = 4  # prompts of a stratum
DISTINCT = 32  # different numbers of a column that are strata each; more are divided by quantiles
DIVISIONS = (8, 32)
COMMON = 0.02  # least share of the prompts that have a word of the frame


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


def words(text: str) -> list[str]:
    """Return the words and signs of a text; a number becomes ``#`` and how many digits it has."""
    return [f"#{len(token)}" if token[0].isdigit() else token for token in _TOKEN.findall(text.lower())]


def digits_of(word: str) -> int:
    """Return how many digits a number has; 0 for other words, also for the sign ``#``."""
    return int(word[1:]) if word[0] == "#" and len(word) > 1 else 0


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


@dataclass(frozen=True)
class StrataSettings:
    """``columns``: their values are the strata, the first divides first; none: ``data_source`` and the text's shape."""

    columns: Sequence[str] = field(default_factory=list)

    def of(self, source: Any) -> list[list[np.ndarray]]:
        """Return trees of strata: for each depth, the coarsest first, the stratum of each prompt of a source."""
        if not self.columns:
            above = _data_source(source)
            return [nested([*above, *tree]) for tree in shapes(source.texts())]
        columns = [column_depths(source.column(name, "goldilocks.strata.columns")) for name in self.columns]
        turns = range(len(columns))  # each column divides first in one tree
        return [nested([depth for column in columns[turn:] + columns[:turn] for depth in column]) for turn in turns]


def nested(labels: Sequence[Sequence[object]]) -> list[np.ndarray]:
    """Return the strata by the labels of each depth, within those of the depth above; small ones are merged."""
    depths: list[np.ndarray] = []
    above = np.zeros(len(labels[0]), dtype=np.int64)
    for column in labels:
        pairs = list(zip(above.tolist(), column, strict=True))
        many = Counter(pairs)
        codes: dict[Any, int] = {}
        merged = (pair if many[pair] >= SMALLEST else pair[0] for pair in pairs)
        above = np.fromiter((codes.setdefault(one, len(codes)) for one in merged), dtype=np.int64, count=len(pairs))
        depths.append(above)
    return depths


def column_depths(values: Sequence[object]) -> list[list[object]]:
    """Return the depths of a column: its values, or quantiles of many different numbers."""
    numbers = _numbers(values)
    if numbers is None:
        return [[str(value) for value in values]]
    if len(np.unique(numbers)) <= DISTINCT:
        return [numbers.tolist()]
    return [_divided(numbers, parts) for parts in DIVISIONS]


def _divided(numbers: np.ndarray, parts: int) -> list[object]:
    edges = np.unique(np.quantile(numbers, np.linspace(0, 1, parts + 1)[1:-1]))
    return list(np.searchsorted(edges, numbers, side="right").tolist())


def _numbers(values: Sequence[object]) -> np.ndarray | None:
    """Return the values as numbers, also if they are written as text; None if one is no finite number."""
    try:
        numbers = np.array([float(value) for value in values])  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return numbers if np.isfinite(numbers).all() else None


def _data_source(source: Any) -> list[list[object]]:
    try:
        return [list(map(str, source.column("data_source", "")))]
    except ValueError:
        return []


def shapes(texts: Sequence[str]) -> list[list[Sequence[object]]]:
    """Return trees by the first word, the frame of common words, the numbers, the length, and the frequent words."""
    tokens = [words(text) for text in texts]
    many = Counter(token for one in tokens for token in set(one))
    common = {token for token, prompts in many.items() if prompts >= max(COMMON * len(texts), SMALLEST)}
    rare = {token for token, prompts in many.items() if prompts < SMALLEST}
    first = [one[0] if one else "" for one in tokens]
    frame = [tuple(dict.fromkeys(t for t in one if t in common and len(t) > 1 and not digits_of(t))) for one in tokens]
    numbers = [_numbers_of(one) for one in tokens]
    length = [len(one) for one in tokens]
    whole = [" ".join(token for token in one if token not in rare) for one in tokens]
    return [[first, numbers, whole], [frame, numbers, whole], [numbers, frame], [first, length, whole], [length, frame]]


def _numbers_of(tokens: Sequence[str]) -> tuple[int, int]:
    """Return how many numbers there are, and how many digits together."""
    digits = [digits for digits in map(digits_of, tokens) if digits]
    return len(digits), sum(digits)
