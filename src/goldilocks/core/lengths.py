"""How long the rollouts of a step would be if none were aborted.

A rule that trains whatever finishes first trains short answers. The mean over finished rollouts does not show it, since
the long ones that were aborted are missing from it. Their lengths are known in part: at least what they had written.
The Kaplan-Meier estimate of the mean uses both: a rollout aborted at length L says nothing about what is shorter, and
counts as one that went past every length below L.
"""

from __future__ import annotations

from typing import Any


class StartedLengths:
    """Counts of finished and of aborted rollouts by length."""

    def __init__(self) -> None:
        self._finished: dict[int, int] = {}
        self._aborted: dict[int, int] = {}

    def add(self, tokens: int, *, finished: bool) -> None:
        """Count one rollout."""
        counts = self._finished if finished else self._aborted
        counts[tokens] = counts.get(tokens, 0) + 1

    @property
    def mean(self) -> float:
        """The estimated mean length of everything that was started; 0 if nothing was."""
        at_risk = sum(self._finished.values()) + sum(self._aborted.values())
        mean, surviving, before = 0.0, 1.0, 0
        for length in sorted({*self._finished, *self._aborted}):
            mean += surviving * (length - before)
            surviving *= 1 - self._finished.get(length, 0) / at_risk
            at_risk -= self._finished.get(length, 0) + self._aborted.get(length, 0)
            before = length
        return mean

    def state_dict(self) -> dict[str, Any]:
        return {"finished": sorted(self._finished.items()), "aborted": sorted(self._aborted.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._finished = dict(state["finished"])
        self._aborted = dict(state["aborted"])
