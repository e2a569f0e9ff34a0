"""How long the rollouts of a step would be if none were aborted.

A rule that trains whatever finishes first trains short answers. The mean over finished rollouts does not show it, since
the long ones that were aborted are missing from it. Their lengths are known in part: at least what they had written.
The Kaplan-Meier estimate of the mean uses both: a rollout aborted at length L says nothing about what is longer, and
counts as one that went past every length below L. A rollout that paused in an earlier step with B tokens says nothing
about what is shorter than B: it counts from there on.
"""

from __future__ import annotations

from collections import Counter
from typing import Any


class StartedLengths:
    """Counts of finished and of aborted rollouts by length."""

    def __init__(self) -> None:
        self._finished: Counter[int] = Counter()
        self._aborted: Counter[int] = Counter()
        self._resumed: Counter[int] = Counter()  # by the length at which they went on

    def add(self, tokens: int, *, finished: bool, before: int = 0) -> None:
        """Count one rollout, of which ``before`` tokens were written in an earlier step."""
        if tokens > before or not before:
            (self._finished if finished else self._aborted)[tokens] += 1
            self._resumed[before] += bool(before)

    @property
    def mean(self) -> float:
        """The estimated mean length of everything that was started; 0 if nothing was."""
        at_risk = self._finished.total() + self._aborted.total() - self._resumed.total()
        mean, surviving, last = 0.0, 1.0, 0
        for length in sorted({*self._finished, *self._aborted, *self._resumed}):
            mean += surviving * (length - last)
            surviving *= 1 - self._finished[length] / at_risk if at_risk else 1.0
            at_risk += self._resumed[length] - self._finished[length] - self._aborted[length]
            last = length
        return mean

    def state_dict(self) -> dict[str, Any]:
        return {name: sorted(counts.items()) for name, counts in self._counts().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, counts in self._counts().items():
            counts.clear()
            counts.update(dict(state.get(name, [])))

    def _counts(self) -> dict[str, Counter[int]]:
        return {"finished": self._finished, "aborted": self._aborted, "resumed": self._resumed}
