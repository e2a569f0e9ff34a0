"""The same number for every prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from goldilocks.core.allocators.base import Allocator
from goldilocks.core.ledger import Ledger
from goldilocks.errors import require
from goldilocks.types import Group


@dataclass
class Fixed(Allocator):
    """GRPO's n."""

    n: int = 8

    def __post_init__(self) -> None:
        require(self.n >= 1, "allocator.n", self.n, "1 or more rollouts")

    def first(self, rows: np.ndarray, ledger: Ledger) -> Sequence[int]:
        return [self.n] * len(rows)

    def wanted(self, group: Group, ledger: Ledger) -> int:
        return self.n
