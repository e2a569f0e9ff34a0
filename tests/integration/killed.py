"""A run that was killed in the middle, and what it had trained by then."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from run_files import groups_in

from .conftest import Launch, Run, kill


@dataclass(frozen=True)
class Killed:
    """A launch whose task runner was killed: the step of its last checkpoint, and the groups it is known to have
    trained, by step."""

    run: Run
    saved: int
    trained: dict[int, dict[str, list[float]]]


def killed(launch: Launch, folder: Path, *overrides: str) -> Killed:
    """Start a run that saves every step and dumps into ``folder / "rollouts"``, and kill it in its second step.

    verl dumps in a thread, one file after another: a file is whole when the next one is there.
    """
    dumps = folder / "rollouts"
    run = launch(*overrides, "trainer.total_training_steps=1000", during=kill("TaskRunner", once=dumps / "2.jsonl"))
    assert run.status != 0
    saved = int((folder / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    whole = [step for step in range(1, saved + 1) if (dumps / f"{step + 1}.jsonl").exists()]
    assert whole
    return Killed(run, saved, {step: trained_groups(dumps, step) for step in whole})


def dumped_every_step(folder: Path) -> list[str]:
    """The settings that ``killed`` needs."""
    return ["trainer.save_freq=1", f"trainer.rollout_data_dir={folder / 'rollouts'}"]


def trained_groups(folder: Path, step: int) -> dict[str, list[float]]:
    """The scores of every group trained in a step, padding left out."""
    return {uid: [row["score"] for row in rows] for uid, rows in groups_in(folder / f"{step}.jsonl").items()}


def assert_none_twice(*steps: dict[str, list[float]]) -> None:
    """No group was trained in two of these steps."""
    trained = [uid for groups in steps for uid in groups]
    assert len(trained) == len(set(trained)), "a group was trained twice"
