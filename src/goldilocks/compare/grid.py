"""The grid of tuning: values for some keys, the same for every recipe."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

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
    return key, tuple(override.sweep_string_iterator()) if override.is_sweep_override() else (value,)


def combinations(grid: Grid) -> list[dict[str, str]]:
    """Return every combination of values; an empty grid has one, which is empty."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
