"""Several filters, one after another: the first that drops a group gives the reason."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from goldilocks.core.filters.base import Filter
from goldilocks.types import KEEP, Group, Verdict


class Chain(Filter):
    """Keeps what every filter keeps."""

    def __init__(self, filters: Sequence[Filter]) -> None:
        self.filters = tuple(filters)

    def judge(self, group: Group) -> Verdict:
        verdicts = (link.judge(group) for link in self.filters)
        return next((verdict for verdict in verdicts if not verdict.keep), KEEP)

    def state_dict(self) -> dict[str, Any]:
        return {"filters": [link.state_dict() for link in self.filters]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for link, saved in zip(self.filters, state["filters"], strict=True):
            link.load_state_dict(saved)

    def metrics(self) -> dict[str, float]:
        return {name: value for link in self.filters for name, value in link.metrics().items()}
