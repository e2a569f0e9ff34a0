"""The grid of tuning: values for some keys, the same for every recipe."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

Grid = Mapping[str, Sequence[str]]
Values = Mapping[str, str]


def parse_grid(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parse ``key=value,value`` words, in Hydra's grammar for sweeps."""
    grid: dict[str, tuple[str, ...]] = {}
    for word in words:
        key, values = _parse(word)
        if key in grid:
            raise ValueError(f"--tune {word!r} is not accepted: {key} is there already; write all its values at once")
        grid[key] = values
    return grid


def _parse(word: str) -> tuple[str, tuple[str, ...]]:
    key, equals, value = word.partition("=")
    if not equals:
        raise ValueError(f"--tune {word!r} is not accepted: key=value,value; recipes stand before the options")
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException as error:
        raise ValueError(f"--tune {word!r} is not accepted: {' '.join(str(error).split())}") from None
    values = tuple(override.sweep_string_iterator()) if override.is_sweep_override() else (value,)
    if len(set(values)) < len(values):
        raise ValueError(f"--tune {word!r} is not accepted: each value once")
    return key, values


def combinations(grid: Grid) -> list[dict[str, str]]:
    """Return every combination of values; an empty grid has one, which is empty."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


@dataclass(frozen=True)
class Edge:
    """A recipe's best value that is the lowest or the highest one tried: a better one may lie beyond it."""

    recipe: str
    key: str
    value: str
    side: str  # lowest or highest


def edges(grid: Grid, recipe: str, chosen: Values) -> list[Edge]:
    """Return the chosen values at an end of their list. Values that are not numbers have no order, and no end."""
    found = []
    for key, values in grid.items():
        numbers = [_number(value) for value in values]
        known = [number for number in numbers if number is not None]
        if len(values) < 2 or len(known) < len(values):
            continue
        ends = {min(known): "lowest", max(known): "highest"}
        side = ends.get(float(chosen[key]))
        found += [Edge(recipe, key, chosen[key], side)] if side else []
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
