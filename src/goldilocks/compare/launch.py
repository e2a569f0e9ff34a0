"""An arm for real: a run of ``goldilocks train`` in the study's folder, with the study's progress on its line."""

from __future__ import annotations

from rich.console import Console

from goldilocks.compare.arm import Arm
from goldilocks.compare.folder import StudyFolder
from goldilocks.compare.result import Result, read_result
from goldilocks.compare.run import Place
from goldilocks.compare.show import settings
from goldilocks.compare.study import Study
from goldilocks.launch.live_line import LiveLine
from goldilocks.launch.recipe import choose
from goldilocks.launch.train import prepared, supervise
from goldilocks.runs.progress import Progress, clock


class ArmFailed(Exception):
    """An arm ended before its time; the message is for the user."""


class Launcher:
    """Runs arms of a study, one after the other."""

    def __init__(self, study: Study, folder: StudyFolder, device: str, console: Console) -> None:
        self._study = study
        self._folder = folder
        self._device = device
        self._console = console

    def __call__(self, arm: Arm, place: Place) -> Result:
        choice = choose(arm.command(self._study.overrides), self._device)
        title = f"arm {place.number}/{place.of} {arm.name}"
        line = LiveLine(self._console, lambda *now: _line(title, place, *now))
        with prepared(choice, self._folder.path, arm.name) as launch, line:
            outcome = supervise(launch, line)
        if outcome.failure is not None:
            raise ArmFailed(f"arm {arm.name} failed: {outcome.failure}; everything it printed: {launch.run_dir.log}")
        result = read_result(arm, launch.run_dir.path, outcome.seconds)
        self._console.print(_summary(title, arm, result), highlight=False, soft_wrap=True)
        return result


def _line(title: str, place: Place, line: str, progress: Progress, elapsed: float) -> str:
    """The arm's own line, and when the study will be done."""
    left = "" if progress.eta is None else f" · study {clock(place.seconds_left(elapsed, progress.eta))} left"
    return f"{title} · {line}{left}"


def _summary(title: str, arm: Arm, result: Result) -> str:
    first, last = result.validations[0].accuracy, result.validations[-1].accuracy
    tried = f" ({settings(arm.settings)})" if arm.settings else ""
    return (
        f"{title}{tried}: {first:.1%} → {last:.1%}, {result.rollouts:,.0f} rollouts, {result.updates} updates, "
        f"{clock(60 * result.wall_minutes)}"
    )
