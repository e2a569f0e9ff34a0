"""What every policy is, of whichever family: parameters that are checked, state that can be saved, metrics."""

from __future__ import annotations

from abc import ABC
from typing import Any


class Policy(ABC):  # noqa: B024  # each family adds its own abstract methods
    """The common base. A policy without state or metrics of its own inherits these as they are."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that changed since construction, as JSON values and numpy arrays."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027  # a policy without state loads nothing
        """Take up where ``state_dict`` was written."""

    def metrics(self) -> dict[str, float]:
        """What to log of this policy, under its own names."""
        return {}
