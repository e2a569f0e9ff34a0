"""Features without a model: hashed n-grams and lengths of a prompt's text, and columns of the data.

In an n-gram, a number is replaced by its number of digits: ``17 + 250`` and ``23 + 118`` are equally hard, and share
their n-grams. The hash is the same in every process, so features need not be saved with a checkpoint.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from goldilocks.errors import require

BUCKETS = 512
LONGEST_GRAM = 3
MOST_WORDS = 32  # of a column
LENGTHS = 4  # columns before the buckets
_TOKEN = re.compile(r"\d+|[^\W\d_]+|[^\w\s]|_")


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
