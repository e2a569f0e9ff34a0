"""A collector's state: everything that decides how it goes on, as JSON values and numpy arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

from goldilocks.core.accounts import Accounts
from goldilocks.core.allocators import Allocator
from goldilocks.core.filters import Filter
from goldilocks.core.issued import IssuedVisits
from goldilocks.core.keep_rate import KeepRate
from goldilocks.core.ledger import Ledger
from goldilocks.core.pool import Pool
from goldilocks.core.prompt_queue import PromptQueue
from goldilocks.core.selectors import Selector
from goldilocks.core.source import KeyedPositions, Source, find_prompt
from goldilocks.core.step_statistics import StepStatistics
from goldilocks.core.views import Views
from goldilocks.errors import require

STATE_LAYOUT = 2  # raised when ``state_dict`` changes its meaning
_PARTS = ("ledger", "accounts", "selector", "allocator", "filter", "_pool", "_queue", "_keep_rate")


class Saved(Views):
    """Saves and loads the parts that ``Collector`` makes."""

    source: Source
    selector: Selector
    allocator: Allocator
    filter: Filter
    ledger: Ledger
    accounts: Accounts
    step: int
    prompts_issued: int
    _pool: Pool
    _queue: PromptQueue
    _keep_rate: KeepRate
    _issued: IssuedVisits
    _statistics: StepStatistics
    _exhausted: bool

    def state_dict(self) -> dict[str, Any]:
        """Return everything, as JSON values and numpy arrays: a run cut here goes on exactly."""
        parts = (
            (name.removeprefix("_"), getattr(self, name))
            for name in (*_PARTS, "_issued", "_open", "_paused", "_shelf", "_replay", "_statistics")
        )
        return {
            "layout": STATE_LAYOUT,
            "step": self.step,
            "prompts_issued": self.prompts_issued,
            "owed": self._owed,
            **{name: part.state_dict() for name, part in parts},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was written. Prompts are found by key: the data may be in another order."""
        found = state.get("layout", 1)
        require(found == STATE_LAYOUT, "layout", found, f"a state saved in layout {STATE_LAYOUT}; start the run anew")
        for name in _PARTS:
            getattr(self, name).load_state_dict(state[name.removeprefix("_")])
        find = partial(find_prompt, self.source, KeyedPositions(self.ledger.keys))
        self._shelf.load_state_dict(state["shelf"], find)
        self._replay.load_state_dict(state["replay"], find)
        self._open.load_state_dict(state["open"], find)
        self._load_issued(state.get("issued"))
        self._paused.load_state_dict(state.get("paused", []))
        self._statistics = StepStatistics.from_state_dict(state["statistics"])
        self.step, self.prompts_issued = state["step"], state["prompts_issued"]
        self._owed = state["owed"]
        self._exhausted = False  # found out again, under the limits of today
        self._pool.claim(self._queue.indices)
        self._pool.claim(visit.prompt.index for visit in self._open)
        self._pool.claim(group.prompt.index for group in self._shelf.kept)

    def _load_issued(self, state: dict[str, Any] | None) -> None:
        """A state of an earlier version counts the judged visits alone: the open ones come after those."""
        if state is not None:
            self._issued.load_state_dict(state)
            return
        self._issued.count_judged(self.ledger.visits)
        for visit in self._open:
            visit.number = self._issued.number(visit.prompt.index)
