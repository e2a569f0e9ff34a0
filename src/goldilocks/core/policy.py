"""The base of every policy: selectors, allocators, filters and priors."""

from __future__ import annotations

from abc import ABC
from typing import Any


class Policy(ABC):  # noqa: B024  # each family adds its own abstract methods
    """Parameters that are checked, state that can be saved, metrics. A policy without state inherits these methods."""

    def state_dict(self) -> dict[str, Any]:
        """Return everything that changed since construction, as JSON values and numpy arrays."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # a policy without state loads nothing
        """Continue from a state that ``state_dict`` returned."""

    def metrics(self) -> dict[str, float]:
        """Return what to log of this policy, under its own names."""
        return {}
