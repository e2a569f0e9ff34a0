"""``goldilocks.features``: which features of the prompts a selector is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from goldilocks.errors import require
from goldilocks.features.matrix import DIMENSIONS, feature_matrix, reduce, with_intercept
from goldilocks.features.text import column_features

KINDS = ("text", "hidden")


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
