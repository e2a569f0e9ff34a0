"""From a study to its results: each arm is a run of ``goldilocks train`` in the study's folder, several at a time.

Arms that have ended are not run again. An arm that fails is tried once more; if it fails again the others still run to
their end, and then its failure is raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

from rich.console import Console

from goldilocks.compare.arm import Arm
from goldilocks.compare.results import Result, Results, read_result
from goldilocks.compare.show import settings
from goldilocks.compare.study import Study, StudyFolder
from goldilocks.launch import on_trl
from goldilocks.launch.display import Board, LiveLine
from goldilocks.launch.fork_server import ForkServer
from goldilocks.launch.machine import share_of_cores
from goldilocks.launch.recipe import Choice, choose
from goldilocks.launch.train import STALL_S, Launch, prepared, supervise
from goldilocks.runs.progress import Progress, clock

TRIES = 2  # of an arm: a port in use or a lack of memory may be gone the next time
OBJECT_STORE = 1 << 30  # bytes, of each of several Rays; alone, Ray takes a third of the machine's memory


class ArmFailed(Exception):
    """An arm failed; the message is for the user."""


@dataclass(frozen=True)
class Turn:
    """An arm's number in its study, its cost, the cost and time of the arms that have ended, and the cost to come."""

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


RunArm = Callable[[Arm, Turn], Result]


def run_study(
    study: Study, folder: StudyFolder, run_arm: RunArm, parallel: int = 1, stop: threading.Event | None = None
) -> Results:
    """Tune, choose, and run what is reported; ``parallel`` arms at a time. An interrupt sets ``stop``."""
    costs = [study.tuning_cost.amount] * study.number_of_tries + [study.cost.amount] * len(study.recipes) * study.seeds
    crew = _Crew(costs, folder, run_arm, parallel, stop or threading.Event())
    tuned: tuple[Result, ...] = ()
    while arms := study.tuning_arms(tuned):
        tuned += crew.run(arms)
    return Results(tuned, crew.run(study.reported_arms(study.choose(tuned))))


@dataclass
class _Crew:
    """Runs arms, ``parallel`` at a time, and gives each its turn."""

    costs: Sequence[float]
    folder: StudyFolder
    run_arm: RunArm
    parallel: int
    stop: threading.Event
    begun: int = 0
    cost_before: float = 0.0  # of the arms that have ended, as their minutes
    minutes_before: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, arms: Sequence[Arm]) -> tuple[Result, ...]:
        """Return the results in the order of the arms. Any error other than ``ArmFailed`` stops all arms."""
        with ThreadPoolExecutor(self.parallel) as pool:
            futures = [pool.submit(self._result, arm) for arm in arms]
            try:
                errors = [error for future in futures if (error := future.exception())]
            except BaseException:  # an interrupt of the thread that waits here
                self.stop.set()
                raise
        for error in sorted(errors, key=lambda error: isinstance(error, ArmFailed)):
            raise error
        return tuple(future.result() for future in futures)

    def _result(self, arm: Arm) -> Result:
        """Return the arm's result, from its folder if it has ended, and count its cost."""
        if self.stop.is_set():
            raise ArmFailed(f"arm {arm.name} was not begun")
        try:
            result = self.folder.result(arm)
            turn = self._begin()
            if result is None:
                result = self._try(arm, turn)
                self.folder.finish(arm, result)
        except ArmFailed:
            raise
        except BaseException:  # a user error would hit the next arm too
            self.stop.set()
            raise
        with self.lock:
            self.cost_before += turn.cost
            self.minutes_before += result.wall_minutes
        return result

    def _begin(self) -> Turn:
        with self.lock:
            number, self.begun = self.begun, self.begun + 1
        cost, after = self.costs[number], sum(self.costs[number + 1 :])
        return Turn(number + 1, len(self.costs), cost, self.cost_before, after, self.minutes_before, self.parallel)

    def _try(self, arm: Arm, turn: Turn) -> Result:
        for left in reversed(range(TRIES)):
            self.folder.clear(arm)
            try:
                return self.run_arm(arm, turn)
            except ArmFailed:
                if not left or self.stop.is_set():
                    raise
        raise AssertionError("an arm is tried at least once")


@dataclass(frozen=True)
class Launcher:
    """Runs the arms of a study, each with a Ray of its own. ``stop`` ends all running arms."""

    study: Study
    folder: StudyFolder
    device: str
    console: Console
    board: Board
    forks: ForkServer
    stall_s: float = STALL_S
    stop: threading.Event = field(default_factory=threading.Event)
    composing: threading.Lock = field(default_factory=threading.Lock)  # Hydra composes one config at a time

    def __call__(self, arm: Arm, turn: Turn) -> Result:
        """Run the arm to its end. Its failure is printed at once, since the other arms may run for hours."""
        title = f"arm {turn.number}/{turn.of} {arm.name}"
        line = LiveLine(self.console, partial(self.board.draw, title), partial(_line, title, turn))
        with ExitStack() as stack:
            with self.composing:
                launch = stack.enter_context(prepared(self._choice(arm, turn), self.folder.path, arm.name))
                launch = replace(launch, env=self._environment(launch, turn))
            outcome = supervise(launch, line, self.stall_s, self.stop)
        if outcome.failure is not None:
            failed = f"arm {arm.name} failed: {outcome.failure}; everything it printed: {launch.run_dir.log}"
            self.console.print(failed, highlight=False, soft_wrap=True)
            raise ArmFailed(failed)
        result = read_result(arm, launch.run_dir.path, outcome.seconds)
        self.console.print(_summary(title, arm, result), highlight=False, soft_wrap=True)
        return result

    def _choice(self, arm: Arm, turn: Turn) -> Choice:
        shared = [f"++ray_kwargs.ray_init.object_store_memory={OBJECT_STORE}"] if turn.at_once > 1 else []
        return choose(arm.command([*shared, *self.study.overrides]), self.device)

    def _environment(self, launch: Launch, turn: Turn) -> dict[str, str]:
        """Return the arm's variables: its share of the cores, and on TRL the server that it is forked from."""
        env = share_of_cores(turn.at_once) | launch.env
        return env | (self.forks.variables(env) if on_trl.chosen(launch.config) else {})


def _line(title: str, turn: Turn, line: str, progress: Progress, elapsed: float) -> str:
    """Return the arm's line with the time left of the study."""
    left = "" if progress.eta is None else f" · study {clock(turn.seconds_left(elapsed, progress.eta))} left"
    return f"{title} · {line}{left}"


def _summary(title: str, arm: Arm, result: Result) -> str:
    first, last = result.validations[0].accuracy, result.validations[-1].accuracy
    tried = f" ({settings(arm.settings)})" if arm.settings else ""
    return (
        f"{title}{tried}: {first:.1%} → {last:.1%}, {result.rollouts:,.0f} rollouts, {result.updates} updates, "
        f"{clock(60 * result.wall_minutes)}"
    )
