"""Epochs are passes over the data, counted in prompts issued; updates are another clock."""

from __future__ import annotations

import math

from goldilocks.core import Collector


class Epochs:
    """How far a run is through its data, and whether it ends with them."""

    def __init__(self, collector: Collector, total: int | None = None) -> None:
        """``total``: the epochs that end the run; None: something else ends it."""
        self._collector = collector
        self.size = len(collector.source)
        self.prompts = math.inf if total is None else total * self.size

    @property
    def current(self) -> int:
        """The epoch of the next prompt, from 0."""
        return self._collector.prompts_issued // self.size

    @property
    def over(self) -> bool:
        """Whether the prompts that are left, with the groups that wait, cannot fill another batch."""
        collector = self._collector
        step = collector.step if collector.owed else collector.step + 1
        oldest = step - collector.surplus.max_carry_steps
        waiting = sum(group.version >= oldest for group in collector.kept)  # others expire before they are trained
        return self.prompts - collector.prompts_issued < collector.target_groups - waiting
