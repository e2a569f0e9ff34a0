"""Strata: which prompts resemble one another, by columns of the data or by the shape of their text.

Strata are nested: each depth divides the strata of the depth above. A stratum of a few prompts says no more than the
prompts themselves, so small ones are merged within the stratum above.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SMALLEST = 4  # prompts of a stratum
DISTINCT = 32  # different numbers of a column that are strata each; more are divided by quantiles
DIVISIONS = (8, 32)
COMMON = 0.02  # least share of the prompts that have a word of the frame
_TOKEN = re.compile(r"\d+|[^\W\d_]+|[^\w\s]|_")


@dataclass(frozen=True)
class StrataSettings:
    """``goldilocks.strata``: the columns whose values are the strata; none: ``data_source`` and the text's shape."""

    columns: Sequence[str] = field(default_factory=list)

    def of(self, source: Any) -> list[list[np.ndarray]]:
        """Return trees of strata: for each depth, the coarsest first, the stratum of each prompt of a source."""
        if not self.columns:
            try:
                above = [list(map(str, source.column("data_source", "")))]
            except ValueError:  # the data have no such column
                above = []
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
    depths: list[list[object]] = []
    for parts in DIVISIONS:
        edges = np.unique(np.quantile(numbers, np.linspace(0, 1, parts + 1)[1:-1]))
        depths.append(np.searchsorted(edges, numbers, side="right").tolist())
    return depths


def _numbers(values: Sequence[object]) -> np.ndarray | None:
    """Return the values as numbers, also if they are written as text; None if one is no finite number."""
    try:
        numbers = np.array([float(value) for value in values])  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return numbers if np.isfinite(numbers).all() else None


def shapes(texts: Sequence[str]) -> list[list[Sequence[object]]]:
    """Return the labels of five trees, a label for each text at each depth.

    They divide by the first word, the frame of common words, how many numbers of how many digits there are, the length
    in words, and the whole text without rare words.
    """
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


def words(text: str) -> list[str]:
    """Return the words and signs of a text; a number becomes ``#`` and how many digits it has."""
    return [f"#{len(token)}" if token[0].isdigit() else token for token in _TOKEN.findall(text.lower())]


def digits_of(word: str) -> int:
    """Return how many digits a number has; 0 for other words, also for the sign ``#``."""
    return int(word[1:]) if word[0] == "#" and len(word) > 1 else 0
