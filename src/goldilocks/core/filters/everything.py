"""Keeps every group."""

from __future__ import annotations

from dataclasses import dataclass

from goldilocks.core.filters.base import Filter
from goldilocks.types import KEEP, Group, Verdict


@dataclass
class Everything(Filter):
    """No filter."""

    def judge(self, group: Group) -> Verdict:
        return KEEP
