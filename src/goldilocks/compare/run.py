"""One live display for arms that run at the same time, a line for each.

Runs an arm with ``goldilocks train`` in the study's folder, and shows the study's progress on its line.

From a study to its results: arms that have ended are not run again, and several may run at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import TracebackType

from rich.console import Console

from goldilocks.compare.arm import Arm
from goldilocks.compare.results import Result, Results, read_result
from goldilocks.compare.show import settings
from goldilocks.compare.study import Study, StudyFolder
from goldilocks.launch import on_trl
from goldilocks.launch.fork_server import ForkServer
from goldilocks.launch.machine import share_of_cores
from goldilocks.launch.recipe import Choice, choose
from goldilocks.launch.supervisor import LiveLine
from goldilocks.launch.train import STALL_S, Launch, prepared, supervise
from goldilocks.runs.progress import Progress, clock


class Board:
    """``with Board(console) as board: LiveLine(console, place=board.place(name))``"""

    def __init__(self, console: Console) -> None:
        self._status = console.status("starting")
        self._lines: dict[str, str] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Board:
        if self._status.console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._status.stop()

    def place(self, name: str) -> BoardLine:
        """Return the line of one arm."""
        return BoardLine(self, name)

    def draw(self, name: str, text: str | None) -> None:
        """Show this text for an arm; None removes its line."""
        with self._lock:
            self._lines.pop(name, None)
            if text is not None:
                self._lines[name] = text
            self._status.update("\n".join(self._lines[name] for name in sorted(self._lines)))


class BoardLine:
    """One arm's line on the board; it has the methods of rich's ``Status``."""

    def __init__(self, board: Board, name: str) -> None:
        self._board = board
        self._name = name

    def start(self) -> None:
        self._board.draw(self._name, f"{self._name} · starting")

    def update(self, text: str, /) -> None:
        self._board.draw(self._name, text)

    def stop(self) -> None:
        self._board.draw(self._name, None)


OBJECT_STORE = 1 << 30  # bytes, of each of several Rays; alone, Ray takes a third of the machine's memory


class Launcher:
    """Runs the arms of a study, each with a Ray of its own. ``stop`` ends all running arms."""

    def __init__(
        self,
        study: Study,
        folder: StudyFolder,
        device: str,
        console: Console,
        board: Board,
        forks: ForkServer,
        stall_s: float = STALL_S,
    ) -> None:
        self.stop = threading.Event()
        self._stall_s = stall_s
        self._study = study
        self._folder = folder
        self._device = device
        self._console = console
        self._board = board
        self._forks = forks
        self._composing = threading.Lock()  # Hydra composes one config at a time

    def __call__(self, arm: Arm, place: Place) -> Result:
        title = f"arm {place.number}/{place.of} {arm.name}"
        line = LiveLine(self._console, lambda *now: _line(title, place, *now), self._board.place(title))
        with ExitStack() as stack:
            with self._composing:
                launch = stack.enter_context(prepared(self._choice(arm, place), self._folder.path, arm.name))
                launch = replace(launch, env=self._environment(launch, place))
            stack.enter_context(line)
            outcome = supervise(launch, line, self._stall_s, self.stop)
        if outcome.failure is not None:
            failed = f"arm {arm.name} failed: {outcome.failure}; everything it printed: {launch.run_dir.log}"
            self._console.print(failed, highlight=False, soft_wrap=True)  # now: the others may run for hours
            raise ArmFailed(failed)
        result = read_result(arm, launch.run_dir.path, outcome.seconds)
        self._console.print(_summary(title, arm, result), highlight=False, soft_wrap=True)
        return result

    def _environment(self, launch: Launch, place: Place) -> dict[str, str]:
        """Return the arm's variables: its share of the cores, and on TRL the server that it is forked from."""
        env = share_of_cores(place.at_once) | launch.env
        return env | (self._forks.variables(env) if on_trl.chosen(launch.config) else {})

    def _choice(self, arm: Arm, place: Place) -> Choice:
        shared = [f"++ray_kwargs.ray_init.object_store_memory={OBJECT_STORE}"] if place.at_once > 1 else []
        return choose(arm.command([*shared, *self._study.overrides]), self._device)


def _line(title: str, place: Place, line: str, progress: Progress, elapsed: float) -> str:
    """Return the arm's line with the time left of the study."""
    left = "" if progress.eta is None else f" · study {clock(place.seconds_left(elapsed, progress.eta))} left"
    return f"{title} · {line}{left}"


def _summary(title: str, arm: Arm, result: Result) -> str:
    first, last = result.validations[0].accuracy, result.validations[-1].accuracy
    tried = f" ({settings(arm.settings)})" if arm.settings else ""
    return (
        f"{title}{tried}: {first:.1%} → {last:.1%}, {result.rollouts:,.0f} rollouts, {result.updates} updates, "
        f"{clock(60 * result.wall_minutes)}"
    )


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
