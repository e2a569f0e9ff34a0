"""Strata: which prompts resemble one another, by columns of the data or by the shape of their text.

A division puts each prompt into one stratum. Several divisions hold at once: by level, by subject, by both; by the
first word, by how many numbers there are. What each says is estimated (``goldilocks.core.effects``). A stratum of a few
prompts says no more than the prompts themselves, so the small ones of a division are one.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import numpy as np

from goldilocks.core.effects import Division
from goldilocks.hashing import content_key

SMALLEST = 4  # prompts of a stratum
DISTINCT = 32  # different numbers of a column that are strata each; more are divided by quantiles
QUANTILES = (8, 32)
NEAR = 4  # parts that fewer numbers are divided into too, where one has two or more of them: neighbours resemble
COMMON = 0.02  # least share of the prompts that have a word of the frame
SAMPLE = 20_000  # prompts, spread evenly, that say which words are common and which are rare
BITS, MANY = 21, 2**21 - 1  # of a count
PIECES = 2**17  # of texts that are remembered
CHUNK = 65_536  # prompts between two words of progress
_NUMBER = re.compile(r"\d+")
_WORD = re.compile(r"#\d+|\w+|[^\w\s]")
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)  # of a number only its length counts
_UTF8 = ("utf-8", "surrogatepass")
_MIX = np.uint64(0x9E3779B97F4A7C15)

Tell = Callable[[int, int], None]  # how many prompts of how many are done


@dataclass(frozen=True)
class StrataSettings:
    """``goldilocks.strata``: the columns whose values are the strata; none: ``data_source`` and the text's shape."""

    columns: Sequence[str] = field(default_factory=list)

    def of(self, source: Any, tell: Tell = lambda done, size: None) -> list[Division]:
        """Return the divisions of a source's prompts."""
        if self.columns:
            named = [source.column(name, "goldilocks.strata.columns") for name in self.columns]
            labels = [one for values in named for one in column_labels(values)]
            if len(named) > 1:
                crossed = labels[0]
                for other in labels[1:]:
                    crossed = crossed * _MIX + other
                labels.append(crossed)
        else:
            try:
                labels = column_labels(source.column("data_source", ""))
            except ValueError:  # the data have no such column
                labels = []
            labels += text_labels(source.texts(), tell)
        return [one for one in map(division, labels) if len(one.keys) > 1]


def division(labels: np.ndarray) -> Division:
    """Return the strata of these labels, a 64-bit number for each prompt; the small ones are one."""
    keys, strata, counts = np.unique(labels, return_inverse=True, return_counts=True)
    large = counts >= SMALLEST
    places = np.where(large, np.cumsum(large) - (1 if large.all() else 0), 0)  # the small ones are stratum 0
    kept = keys[large] if large.all() else np.concatenate([np.zeros(1, dtype=np.uint64), keys[large]])
    return Division(places[strata].astype(np.int32), kept)


def column_labels(values: Sequence[object]) -> list[np.ndarray]:
    """Return the labels of a column: its values, or the quantiles of many different numbers, or both."""
    try:
        numbers = np.array([float(value) for value in values])  # type: ignore[arg-type]
    except (TypeError, ValueError):
        numbers = np.full(len(values), np.nan)
    if not np.isfinite(numbers).all():
        known = {value: content_key(str(value)) for value in set(map(str, values))}
        return [np.fromiter((known[str(value)] for value in values), dtype=np.uint64, count=len(values))]
    distinct = len(np.unique(numbers))
    if distinct > DISTINCT:
        return [_quantiles(numbers, parts) for parts in QUANTILES]
    return [numbers.view(np.uint64), *([_quantiles(numbers, NEAR)] if distinct > 2 * NEAR else [])]


def _quantiles(numbers: np.ndarray, parts: int) -> np.ndarray:
    edges = np.unique(np.quantile(numbers, np.linspace(0, 1, parts + 1)[1:-1]))
    return np.searchsorted(edges, numbers, side="right").astype(np.uint64)


def text_labels(texts: Sequence[str], tell: Tell = lambda done, size: None) -> list[np.ndarray]:
    """Return the labels of texts by their first word, their numbers, their length, their frame and their words.

    The frame are the common words in the order they first stand there; the words are all but the rare ones. A driver
    has a million texts: each is read once.
    """
    size = len(texts)
    sample = [texts[row] for row in np.unique(np.linspace(0, size - 1, min(size, SAMPLE)).astype(np.int64))]
    many = Counter(token for text in sample for token in set(words(text)))
    least = max(COMMON * len(sample), SMALLEST)
    common = {token for token, found in many.items() if found >= least and len(token) > 1 and token[0] != "#"}
    frequent = {token for token, found in many.items() if found >= SMALLEST}
    pieces = Pieces(common, frequent)
    first_key = functools.lru_cache(PIECES)(lambda piece: content_key(words(piece)[0]))
    keys = {name: np.zeros(size, dtype=np.uint64) for name in ("first", "frame", "words")}
    counts = np.zeros(size, dtype=np.int64)
    for row, text in enumerate(texts):
        if len(pieces) > PIECES:
            pieces = Pieces(common, frequent)
        parts = text.lower().encode(*_UTF8).translate(_DIGITS).decode(*_UTF8).split()  # bytes are quicker to translate
        kept = itemgetter("", "", *parts)(pieces)  # of one key alone it would not return a tuple
        frame = map(pieces.frames.__getitem__, filter(pieces.frames.__contains__, kept))
        counts[row] = len(parts) + sum(map(pieces.counts.__getitem__, filter(pieces.counts.__contains__, parts)))
        keys["first"][row] = first_key(parts[0]) if parts else 0
        keys["frame"][row] = content_key(" ".join(dict.fromkeys(frame)))
        keys["words"][row] = content_key(" ".join(filter(None, kept)))
        if row % CHUNK == CHUNK - 1:
            tell(row + 1, size)
    length, numbers, digits = counts & MANY, counts >> BITS & MANY, counts >> 2 * BITS
    both = numbers.astype(np.uint64) * _MIX + digits.astype(np.uint64)
    lengths = [_quantiles(length.astype(np.float64), parts) for parts in QUANTILES]
    return [keys["first"], numbers.astype(np.uint64), both, *lengths, keys["frame"], keys["words"]]


class Pieces(dict[str, str]):
    """The words that are not rare of what stands between two blanks.

    ``frames`` has those of the frame, by the words that are not rare, if there are any. ``counts`` has what a piece
    counts beyond one word: words, numbers and digits in one integer, ``BITS`` each. Most pieces come again, so
    they are remembered.
    """

    def __init__(self, common: set[str], frequent: set[str]) -> None:
        self.common, self.frequent = common, frequent
        self.frames: dict[str, str] = {}
        self.counts: dict[str, int] = {}

    def __missing__(self, piece: str) -> str:
        tokens, numbers = words(piece), _NUMBER.findall(piece)
        kept, frame = (" ".join([one for one in tokens if one in some]) for some in (self.frequent, self.common))
        more = len(tokens) - 1 + (len(numbers) << BITS) + (sum(map(len, numbers)) << 2 * BITS)
        if frame:
            self.frames[kept] = frame
        if more:
            self.counts[piece] = more
        self[piece] = piece if kept == piece else kept  # one string in memory is read quicker than two
        return kept


def words(text: str) -> list[str]:
    """Return the words and signs of a text; a number becomes ``#`` and how many digits it has."""
    counted = _NUMBER.sub(lambda number: f"#{len(number[0])}", text.lower())
    return _WORD.findall(counted.replace("_", " _ "))
