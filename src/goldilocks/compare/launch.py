"""Runs an arm with ``goldilocks train`` in the study's folder, and shows the study's progress on its line."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import replace

from rich.console import Console

from goldilocks.compare.arm import Arm
from goldilocks.compare.board import Board
from goldilocks.compare.folder import StudyFolder
from goldilocks.compare.result import Result, read_result
from goldilocks.compare.run import ArmFailed, Place
from goldilocks.compare.show import settings
from goldilocks.compare.study import Study
from goldilocks.launch import on_trl
from goldilocks.launch.fork_server import ForkServer
from goldilocks.launch.live_line import LiveLine
from goldilocks.launch.machine import share_of_cores
from goldilocks.launch.recipe import Choice, choose
from goldilocks.launch.train import STALL_S, Launch, prepared, supervise
from goldilocks.runs.progress import Progress, clock

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
