"""``train`` says once that an update costs many times GRPO's rollouts, on a terminal and in a log."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import pytest
from rich.console import Console

from goldilocks.config.recipes import choose, compose_config
from goldilocks.launch.live import Board, LiveLine
from goldilocks.launch.train import _few_updates
from goldilocks.runs.costs import Progress


def composed(*words: str) -> Any:
    return compose_config(choose([*words, "data.train_batch_size=16", "actor_rollout_ref.rollout.n=8"], "cpu"))


def progress_of(steps: int, rollouts: int) -> Progress:
    progress = Progress(total_steps=100, rollouts_per_step=128)
    for step in range(1, steps + 1):
        progress.add({"step": step, "data": {"critic/score/mean": 0.5, "accounts/generated_rollouts": step * rollouts}})
    return progress


@pytest.fixture(autouse=True)
def _somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOLDILOCKS_TASK", "/nowhere")


@pytest.mark.parametrize("trainer", ["verl", "trl"])
def test_a_recipe_that_filters_is_told_and_one_that_does_not_is_not(trainer: str) -> None:
    sizes = ["actor_rollout_ref.actor.ppo_mini_batch_size=16", f"trainer={trainer}"]
    said = _few_updates(composed("dapo", *sizes), progress_of(5, 900))
    assert said is not None
    assert said.startswith("an update costs 900 rollouts, 7.0 times GRPO's 128: actor_rollout_ref.actor.ppo_mini_batch")
    assert _few_updates(composed("dapo", *sizes), progress_of(5, 200)) is None
    assert _few_updates(composed("grpo", *sizes), progress_of(5, 900)) is None


@pytest.mark.parametrize("terminal", [True, False])
def test_it_is_said_once(terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=40)
    asked: list[int] = []

    def notice(progress: Progress) -> str | None:
        asked.append(progress.step)
        return "an update costs [much], and that is a line longer than the terminal" if progress.step >= 4 else None

    with Board(console) as board:
        line = LiveLine(console, partial(board.draw, "run"), notice=notice)
        for steps in range(3, 7):
            line.show(True, progress_of(steps, 900), 1.0)
            line.show(False, progress_of(steps, 900), 1.0)
    assert asked == [3, 4]
    assert out.getvalue().count("goldilocks: an update costs [much], and that is a line longer than the terminal") == 1


def test_in_a_log_so_many_seconds_are_between_two_lines() -> None:
    out = io.StringIO()
    line = LiveLine(Console(file=out, force_terminal=False), lambda text: None, every_s=10.0)
    for second in range(1, 30):
        line.show(True, progress_of(3 * second, 900), float(second))
    assert [said.split()[1] for said in out.getvalue().splitlines()] == ["30/100", "60/100"]


def test_a_line_that_is_removed_is_not_shown_any_more() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=40)
    board = Board(console)
    board.draw("run", "arm a[a] step 3")
    console.print(board._status.renderable)
    assert "arm a[a] step 3" in console.file.getvalue(), "brackets are no markup"
    console.file.truncate(0)
    board.draw("run", None)
    console.print(board._status.renderable)
    assert "step 3" not in console.file.getvalue()
