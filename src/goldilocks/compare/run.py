"""From a study to its results, arm by arm; arms that have ended are not run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from goldilocks.compare.arm import Arm
from goldilocks.compare.folder import StudyFolder
from goldilocks.compare.result import Result
from goldilocks.compare.study import Study


@dataclass(frozen=True)
class Place:
    """Where in the study an arm is, and how long those before it took."""

    number: int
    of: int
    minutes_before: tuple[float, ...]

    def seconds_left(self, elapsed: float, eta: float) -> float:
        """For the whole study, of an arm that has run for ``elapsed`` seconds and has ``eta`` to go."""
        before = self.minutes_before
        an_arm = 60 * sum(before) / len(before) if before else elapsed + eta
        return eta + an_arm * (self.of - self.number)


RunArm = Callable[[Arm, Place], Result]


@dataclass(frozen=True)
class Results:
    """Every arm of a study that has ended."""

    tuned: tuple[Result, ...]
    reported: tuple[Result, ...]


def run_study(study: Study, folder: StudyFolder, run_arm: RunArm) -> Results:
    """Tune, choose, and run what is reported."""
    ran: list[Result] = []

    def run_all(arms: Sequence[Arm]) -> tuple[Result, ...]:
        return tuple(_ended(arm, folder, run_arm, study.arms, ran) for arm in arms)

    tuned = run_all(study.tuning_arms())
    reported = run_all(study.reported_arms(study.choose(tuned)))
    return Results(tuned, reported)


def _ended(arm: Arm, folder: StudyFolder, run_arm: RunArm, arms: int, ran: list[Result]) -> Result:
    result = folder.result(arm)
    if result is None:
        folder.clear(arm)
        place = Place(len(ran) + 1, arms, tuple(one.wall_minutes for one in ran))
        result = run_arm(arm, place)
        folder.finish(arm, result)
    ran.append(result)
    return result
