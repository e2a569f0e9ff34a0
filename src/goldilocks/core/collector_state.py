"""The base of ``Collector``: its read-only views, and how its parts are saved and loaded."""

from __future__ import annotations

from functools import partial
from typing import Any

from goldilocks.core.accounts import Accounts, PausedRollouts
from goldilocks.core.allocators import Allocator
from goldilocks.core.beliefs import Beliefs
from goldilocks.core.filters import Filter
from goldilocks.core.judged_groups import JudgedGroups
from goldilocks.core.open_groups import OpenGroups
from goldilocks.core.packing import find_prompt
from goldilocks.core.prompt_order import IssuedVisits, PromptOrder
from goldilocks.core.prompt_queue import PromptQueue
from goldilocks.core.replay import ReplayBuffer
from goldilocks.core.selectors import Selector
from goldilocks.core.source import KeyedPositions, Source
from goldilocks.core.statistics import KeepRate, StepStatistics
from goldilocks.errors import require
from goldilocks.types import Group, Rollout

STATE_LAYOUT = 2  # raised when ``state_dict`` changes its meaning

# A part's name in the saved state, and its attribute: names of states stay when attributes are renamed.
_INDEPENDENT_PARTS = {
    "ledger": "beliefs",
    "accounts": "accounts",
    "selector": "selector",
    "allocator": "allocator",
    "filter": "filter",
    "pool": "_order",
    "queue": "_queue",
    "keep_rate": "_keep_rate",
}
_PARTS_WITH_GROUPS = {"shelf": "_judged", "replay": "_replay", "open": "_open"}  # loading these finds prompts
_OTHER_PARTS = {"issued": "_issued", "paused": "_paused", "statistics": "_statistics"}


class CollectorState:
    """Views of the groups, and saving and loading. ``Collector`` makes the parts."""

    source: Source
    selector: Selector
    allocator: Allocator
    filter: Filter
    beliefs: Beliefs
    accounts: Accounts
    step: int
    prompts_issued: int
    _order: PromptOrder
    _queue: PromptQueue
    _keep_rate: KeepRate
    _issued: IssuedVisits
    _open: OpenGroups
    _judged: JudgedGroups
    _replay: ReplayBuffer
    _paused: PausedRollouts
    _statistics: StepStatistics
    _owed: int
    _exhausted: bool

    @property
    def kept(self) -> tuple[Group, ...]:
        """Groups that wait to be taken, in the order their prompts were issued."""
        return self._judged.kept

    @property
    def owed(self) -> int:
        """How many groups the current step has yet to hand out."""
        return self._owed

    @property
    def in_hand(self) -> tuple[Group, ...]:
        """The batch in hand: the groups that ``take`` handed out and ``reject`` left, then the replayed ones."""
        return (*self._judged.in_hand, *self._replay.in_hand)

    @property
    def reusable(self) -> tuple[Group, ...]:
        """The groups that may be trained again after the batch in hand: their payloads outlive their training."""
        return (*self._replay.waiting, *self._replay.reusable(self._judged.in_hand))

    @property
    def backfilled(self) -> set[str]:
        """The groups of the batch in hand that only fill it up, and are not to be judged again."""
        return self._judged.backfilled

    @property
    def waiting_rollouts(self) -> list[Rollout]:
        """Every rollout whose payload a later batch may need: of open, kept, spare and reusable groups."""
        judged = [*self._judged.kept, *(self._judged.spare if self._owed else ())]
        groups = [*(one.arrived for one in self._open), *(group.rollouts for group in judged)]
        again = [group.trained for group in self.reusable]
        return [rollout for rollouts in (*groups, *again) for rollout in rollouts]

    @property
    def alive(self) -> set[str]:
        """The groups whose payloads are needed: open, kept, held to fill up, in hand, or to be trained again."""
        again = {group.uid for group in (*self._replay.waiting, *self._replay.in_hand)}
        return {*(one.uid for one in self._open), *self._judged.uids, *again}

    @property
    def in_flight(self) -> int:
        """How many rollouts the engine was asked for and has not returned; it has lost those to ask for again."""
        return self._open.in_flight - self._open.lost

    @property
    def paused(self) -> dict[tuple[str, int], int]:
        """The rollouts that wait to go on, by group and index, with the tokens they have written."""
        return self._paused.tokens

    def state_dict(self) -> dict[str, Any]:
        """Return everything, as JSON values and numpy arrays: a run cut here goes on exactly."""
        parts = {**_INDEPENDENT_PARTS, **_PARTS_WITH_GROUPS, **_OTHER_PARTS}
        return {
            "layout": STATE_LAYOUT,
            "step": self.step,
            "prompts_issued": self.prompts_issued,
            "owed": self._owed,
            **{name: getattr(self, part).state_dict() for name, part in parts.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was written. Prompts are found by key: the data may be in another order."""
        found = state.get("layout", 1)
        require(found == STATE_LAYOUT, "layout", found, f"a state saved in layout {STATE_LAYOUT}; start the run anew")
        for name, part in _INDEPENDENT_PARTS.items():
            getattr(self, part).load_state_dict(state[name])
        find = partial(find_prompt, self.source, KeyedPositions(self.beliefs.keys))
        for name, part in _PARTS_WITH_GROUPS.items():
            getattr(self, part).load_state_dict(state[name], find)
        self._load_issued(state.get("issued"))
        self._paused.load_state_dict(state.get("paused", []))
        self._statistics = StepStatistics.from_state_dict(state["statistics"])
        self.step, self.prompts_issued = state["step"], state["prompts_issued"]
        self._owed = state["owed"]
        self._exhausted = False  # decided again, under today's limits
        self._order.claim(self._queue.indices)
        self._order.claim(one.prompt.index for one in self._open)
        self._order.claim(group.prompt.index for group in self._judged.kept)

    def _load_issued(self, state: dict[str, Any] | None) -> None:
        """Load the visits issued. A state of an earlier version has judged visits only: open ones come after those."""
        if state is not None:
            self._issued.load_state_dict(state)
            return
        self._issued.count_judged(self.beliefs.visits)
        for one in self._open:
            one.number = self._issued.number(one.prompt.index)
