"""A prompt is believed to be as right as its stratum is, which is told from outside and costs the run nothing.

No run has that knowledge: it is for studies. What a run lacks against the oracle is its chooser's fault, and what the
oracle lacks is the task's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from goldilocks.core.priors.base import Counts, Prior
from goldilocks.core.priors.strata import Strata, counts_of, worth_of


class Oracle(Prior):
    """``names``: for each prompt what its stratum's rate is told under. Until it is told, it is as visits show."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names, codes = np.unique(np.array(names), return_inverse=True)
        self._strata = Strata([[codes]])
        self._told: dict[str, float] = {}

    @property
    def _tree(self) -> Any:
        return self._strata.trees[1]

    def tell(self, rates: Mapping[str, float]) -> None:
        self._told.update({name: float(rates[name]) for name in self._names.tolist() if name in rates})

    def mean(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return counts_of(self._rates()[self._tree.leaf[rows]], worth_of(self._tree))

    def overall(self) -> float:
        return float(self._rates()[self._tree.leaf].mean())

    def _rates(self) -> np.ndarray:
        told = [self._told.get(name, np.nan) for name in self._names.tolist()]
        return np.where(np.isnan(told), self._tree.means(), told)

    def catch_up(self, counts: Counts) -> None:
        self._strata.catch_up(counts)

    def state_dict(self) -> dict[str, Any]:
        return {"told": dict(self._told)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._told = dict(state.get("told", {}))

    def metrics(self) -> dict[str, float]:
        return {"belief/strata": float(len(self._names)), "belief/worth": worth_of(self._tree)}
