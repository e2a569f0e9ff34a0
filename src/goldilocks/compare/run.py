"""From a study to its results, arm by arm; arms that have ended are not run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from goldilocks.compare.arm import Arm
from goldilocks.compare.folder import StudyFolder
from goldilocks.compare.result import Result, Results
from goldilocks.compare.study import Study


@dataclass(frozen=True)
class Place:
    """Where in the study an arm is: what it costs, what those before it cost and took, and what is still to come."""

    number: int
    of: int
    cost: float
    cost_before: float
    cost_after: float
    minutes_before: float

    def seconds_left(self, elapsed: float, eta: float) -> float:
        """For the whole study, of an arm that has run for ``elapsed`` seconds and has ``eta`` to go.

        By cost, since the arms of tuning may have less to spend than the others.
        """
        seconds, cost = (60 * self.minutes_before, self.cost_before) if self.number > 1 else (elapsed + eta, self.cost)
        return eta + seconds / cost * self.cost_after


RunArm = Callable[[Arm, Place], Result]


def run_study(study: Study, folder: StudyFolder, run_arm: RunArm) -> Results:
    """Tune, choose, and run what is reported."""
    ended: list[Result] = []
    tuning = study.tuning_arms()
    untuned = study.reported_arms(study.choose([]))  # what is reported costs the same, whatever tuning chooses
    costs = [arm.cost.amount for arm in (*tuning, *untuned)]

    def run_all(arms: Sequence[Arm]) -> tuple[Result, ...]:
        first = len(ended)
        for arm in arms:
            ended.append(_result(arm, _place(costs, ended), folder, run_arm))
        return tuple(ended[first:])

    tuned = run_all(tuning)
    return Results(tuned, run_all(study.reported_arms(study.choose(tuned))))


def _place(costs: Sequence[float], ended: Sequence[Result]) -> Place:
    number = len(ended)
    before, after = sum(costs[:number]), sum(costs[number + 1 :])
    return Place(number + 1, len(costs), costs[number], before, after, sum(one.wall_minutes for one in ended))


def _result(arm: Arm, place: Place, folder: StudyFolder, run_arm: RunArm) -> Result:
    result = folder.result(arm)
    if result is None:
        folder.clear(arm)
        result = run_arm(arm, place)
        folder.finish(arm, result)
    return result
