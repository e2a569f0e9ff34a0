"""From a study to its results: arms that have ended are not run again, and several may run at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from goldilocks.compare.arm import Arm
from goldilocks.compare.folder import StudyFolder
from goldilocks.compare.result import Result, Results
from goldilocks.compare.study import Study

TRIES = 2  # of an arm: a port in use or a lack of memory may be gone the next time


class ArmFailed(Exception):
    """An arm failed; the message is for the user."""


@dataclass(frozen=True)
class Place:
    """The place of an arm in its study: its cost, the cost and time of ended arms, and the cost still to come."""

    number: int
    of: int
    cost: float
    cost_before: float
    cost_after: float
    minutes_before: float
    at_once: int = 1

    def seconds_left(self, elapsed: float, eta: float) -> float:
        """Return the seconds left of the study; this arm has run for ``elapsed`` seconds and has ``eta`` left.

        Estimated by cost, since tuning arms may have less to spend than the others.
        """
        known = self.cost_before > 0
        seconds, cost = (60 * self.minutes_before, self.cost_before) if known else (elapsed + eta, self.cost)
        return eta + seconds / cost * self.cost_after / self.at_once


RunArm = Callable[[Arm, Place], Result]


def run_study(
    study: Study, folder: StudyFolder, run_arm: RunArm, parallel: int = 1, stop: threading.Event | None = None
) -> Results:
    """Tune, choose, and run what is reported; ``parallel`` arms at a time. An interrupt sets ``stop``.

    An arm that fails is tried once more. If it fails again the others still run to their end, and then it is raised.
    """
    costs = [study.tuning_cost.amount] * study.number_of_tries + [study.cost.amount] * len(study.recipes) * study.seeds
    crew = _Crew(costs, folder, run_arm, parallel, stop or threading.Event())
    tuned: tuple[Result, ...] = ()
    while arms := study.tuning_arms(tuned):
        tuned += crew.run(arms)
    return Results(tuned, crew.run(study.reported_arms(study.choose(tuned))))


class _Crew:
    """Runs arms, ``parallel`` at a time, and tracks the place of each in the study."""

    def __init__(
        self, costs: Sequence[float], folder: StudyFolder, run_arm: RunArm, parallel: int, stop: threading.Event
    ) -> None:
        self._costs = costs
        self._folder = folder
        self._run_arm = run_arm
        self._parallel = parallel
        self._lock = threading.Lock()
        self._begun = 0
        self._cost, self._minutes = 0.0, 0.0  # of the arms that have ended
        self._stop = stop

    def run(self, arms: Sequence[Arm]) -> tuple[Result, ...]:
        """Return the results in the order of the arms. Any error other than ``ArmFailed`` stops all arms."""
        with ThreadPoolExecutor(self._parallel) as pool:
            futures = [pool.submit(self._result, arm) for arm in arms]
            try:
                errors = [error for future in futures if (error := future.exception())]
            except BaseException:  # an interrupt of the thread that waits here
                self._stop.set()
                raise
        for error in sorted(errors, key=lambda error: isinstance(error, ArmFailed)):
            raise error
        return tuple(future.result() for future in futures)

    def _result(self, arm: Arm) -> Result:
        if self._stop.is_set():
            raise ArmFailed(f"arm {arm.name} was not begun")
        try:
            return self._ended(arm) or self._run(arm)
        except ArmFailed:
            raise
        except BaseException:  # a user error would hit the next arm too
            self._stop.set()
            raise

    def _ended(self, arm: Arm) -> Result | None:
        result = self._folder.result(arm)
        if result is not None:
            self._count(self._begin(), result)
        return result

    def _run(self, arm: Arm) -> Result:
        place = self._begin()
        result = self._try(arm, place)
        self._folder.finish(arm, result)
        self._count(place, result)
        return result

    def _try(self, arm: Arm, place: Place) -> Result:
        for left in reversed(range(TRIES)):
            self._folder.clear(arm)
            try:
                return self._run_arm(arm, place)
            except ArmFailed:
                if not left or self._stop.is_set():
                    raise
        raise AssertionError("an arm is tried at least once")

    def _begin(self) -> Place:
        with self._lock:
            number, self._begun = self._begun, self._begun + 1
        after = sum(self._costs[number + 1 :])
        cost, minutes = self._cost, self._minutes
        return Place(number + 1, len(self._costs), self._costs[number], cost, after, minutes, self._parallel)

    def _count(self, place: Place, result: Result) -> None:
        with self._lock:
            self._cost += place.cost
            self._minutes += result.wall_minutes
