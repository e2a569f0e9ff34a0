"""A judgement after generation: which rollouts of the batch in hand may not be trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from goldilocks.drive.rows import Place
from goldilocks.runs.history import combine
from goldilocks.types import Group

Rollouts = dict[str, list[int]]  # of each group, by their numbers
Metrics = dict[str, float]


class Judgement(NamedTuple):
    """Rollouts that may not be trained, sound ones that their group can do without, and metrics.

    A refused rollout leaves its group; one that is cut stays in the group's baseline.
    """

    refused: Rollouts
    cut: Rollouts
    metrics: Metrics


class Gate(ABC):
    """Judges groups of the batch in hand. What it refuses is replaced, not masked."""

    reason: str  # names the gate in the accounts
    refuses_flat = False  # whether what it refuses has no gradient, and may fill up an exhausted batch

    @abstractmethod
    def judge(self, groups: Sequence[Group]) -> Judgement:
        """Judge fresh groups, each once: by the rollouts that would be trained."""

    def prepare(self, groups: Sequence[Group]) -> None:  # noqa: B027 (most have nothing to prepare)
        """Compute what rows must have before they are judged or trained. ``groups`` are all that were just taken."""

    def combined(self, judgements: Sequence[Metrics], trained: Sequence[Group], batches: int = 1) -> Metrics:
        """Return the metrics of all judgements of an update as those of one; ``trained`` are its batches' groups."""
        return combine(judgements)

    def state_dict(self) -> dict[str, Any]:
        """Return what decides how the gate goes on, as JSON values and arrays."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (most have no state)
        """Take up where ``state_dict`` was written; a gate without state may follow one that had some."""


def by_group(places: Iterable[Place]) -> Rollouts:
    """Return the rollouts of each group, each once: a rollout of several turns has several rows."""
    found: Rollouts = defaultdict(list)
    for uid, index in places:
        if index not in found[uid]:
            found[uid].append(index)
    return dict(found)
