"""What there is to see of a collector. Looking changes nothing."""

from __future__ import annotations

from goldilocks.core.open_groups import OpenGroups
from goldilocks.core.paused import PausedRollouts
from goldilocks.core.replay import ReplayShelf
from goldilocks.core.shelf import Shelf
from goldilocks.types import Group, Rollout


class Views:
    """Read-only properties over the parts that hold groups; ``Collector`` makes the parts."""

    _open: OpenGroups
    _shelf: Shelf
    _replay: ReplayShelf
    _paused: PausedRollouts
    _owed: int

    @property
    def kept(self) -> tuple[Group, ...]:
        """Groups that wait to be taken, in the order their prompts were issued."""
        return self._shelf.kept

    @property
    def owed(self) -> int:
        """How many groups the current step has yet to hand out."""
        return self._owed

    @property
    def in_hand(self) -> tuple[Group, ...]:
        """The batch in hand: what ``take`` handed out and ``reject`` left, then what is trained again."""
        return (*self._shelf.in_hand, *self._replay.in_hand)

    @property
    def reusable(self) -> tuple[Group, ...]:
        """The groups that may be trained again after the batch in hand: their payloads outlive their training."""
        return (*self._replay.waiting, *self._replay.reusable(self._shelf.in_hand))

    @property
    def backfilled(self) -> set[str]:
        """The groups of the batch in hand that only fill it up, and are not to be judged again."""
        return self._shelf.backfilled

    @property
    def waiting_rollouts(self) -> list[Rollout]:
        """Every rollout whose payload a later batch may need.

        They are of open groups, of kept ones, in a step of spare ones, and of groups that may be trained again.
        """
        judged = [*self._shelf.kept, *(self._shelf.spare if self._owed else ())]
        groups = [*(visit.arrived for visit in self._open), *(group.rollouts for group in judged)]
        again = [group.trained for group in self.reusable]
        return [rollout for rollouts in (*groups, *again) for rollout in rollouts]

    @property
    def alive(self) -> set[str]:
        """The groups whose payloads are needed: open, kept, held to fill up, in hand, or to be trained again."""
        again = {group.uid for group in (*self._replay.waiting, *self._replay.in_hand)}
        return {*(visit.uid for visit in self._open), *self._shelf.uids, *again}

    @property
    def in_flight(self) -> int:
        """How many rollouts the engine was asked for and has not returned; it has lost those to ask for again."""
        return self._open.in_flight - self._open.lost

    @property
    def paused(self) -> dict[tuple[str, int], int]:
        """The rollouts that wait to go on, by group and index, with the tokens they have written."""
        return self._paused.tokens
