"""``goldilocks train`` for real: verl on Ray on this machine, started, watched and ended by the command."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from run_files import json_lines

from .conftest import GOLDILOCKS, PATIENCE_S, SMALL, end, processes_of, start, wait_for

pytestmark = pytest.mark.integration


@dataclass(frozen=True)
class Trained:
    """A finished ``goldilocks train``."""

    status: int
    out: str
    err: str
    run: Path

    @property
    def log(self) -> str:
        """The end of what verl printed."""
        path = self.run / "log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else "no log"


Train = Callable[..., Trained]


@pytest.fixture
def train(arithmetic: Path, tmp_path: Path) -> Train:
    """``train(*words, within=seconds)`` runs the command and checks that it left nothing running."""

    def run(
        *words: str, within: float = PATIENCE_S, during: Callable[[Path, subprocess.Popen[str]], None] | None = None
    ) -> Trained:
        folder = tmp_path / "runs" / "test"
        where = ("--name", "test", "--runs", str(tmp_path / "runs"))
        words = ("train", *where, *SMALL, "trainer.total_training_steps=2", *words)
        process = start(*GOLDILOCKS, *words, GOLDILOCKS_TASK=str(arithmetic))
        if during is not None:
            during(folder, process)
        out, err = process.communicate(timeout=within)
        assert processes_of(folder) == []
        return Trained(process.returncode, out, err, folder)

    return run


def records(run: Path) -> list[dict]:
    return json_lines(run / "metrics.jsonl")


JUDGE = """
seen = set()

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    name = (extra_info or {}).get("index"), solution_str
    if name not in seen:
        seen.add(name)
        raise ConnectionError("the judge is busy")
    return {"score": -float(len(solution_str)), "cost": 0.25}
"""


@pytest.mark.runs(2)
def test_a_run_with_a_judge_ends_at_its_budget_with_a_summary_and_goes_on_when_it_is_given_more(train, tmp_path):
    """The judge is a second reward and fails at first."""
    path = tmp_path / "judge.py"
    path.write_text(JUDGE)
    judged = [
        f"goldilocks.rewards.functions={{answer: {{weight: 1.0}}, brevity: {{path: {path}, weight: 0.01}}}}",
        "goldilocks.rewards.retries=1",
        "goldilocks.rewards.backoff=0",
        "goldilocks.rewards.concurrency=4",
    ]

    def trained() -> list[tuple[int, float]]:
        key = "accounts/generated_rollouts"
        return [(one["step"], one["data"][key]) for one in records(done.run) if key in one["data"]]

    done = train(*judged, "goldilocks.budget.rollouts=48", "trainer.total_training_steps=1000")
    assert done.status == 0, done.err + done.log
    assert "step 2 · 133% of the budget" in done.out
    assert "validation" in done.out
    assert "points)" in done.out
    assert trained() == [(1, 32), (2, 64)]
    assert (done.run / "config.yaml").exists()
    assert (done.run / "checkpoints/global_step_2").is_dir()
    *_, last = [one["data"] for one in records(done.run) if "reward/brevity" in one["data"]]
    assert last["reward/brevity"] < 0 <= last["reward/answer"]
    assert last["train/rollout_failures"] == 0
    calls, retries, cost = (last[f"accounts/reward_{what}"] for what in ("calls", "retries", "cost"))
    assert retries > 0  # each new answer is refused once
    assert calls - retries == 8 * cost  # two functions for each answer, of which one says what it costs
    assert "accounts/reward_failures" not in last

    seconds = sum(one["data"].get("timing_s/step", 0.0) for one in records(done.run))
    resumed = train(*judged, f"goldilocks.budget.seconds={seconds + 1e-3}", "trainer.total_training_steps=1000")
    assert resumed.status == 0, resumed.err + resumed.log
    said = "what was spent before counts, and the next update takes more than is left"
    assert trained() == [(1, 32), (2, 64), (3, 96)], said


def test_interrupted_it_leaves_nothing_running(train):
    def during(run: Path, process: subprocess.Popen[str]) -> None:
        wait_for(run, "raylet", process)
        process.send_signal(signal.SIGINT)

    assert train("trainer.total_training_steps=1000", during=during).status == 130


GONE_S = 20.0


@pytest.mark.parametrize(
    ("killed", "there"),
    [
        ("supervisor", "launch.train"),
        ("driver", "gcs_server"),
        ("supervisor", "dashboard/agent.py"),  # of Ray's processes the one that is the last to notice
        pytest.param("supervisor", "ray::AgentLoopWorker", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_of_a_run_whose_supervisor_or_driver_was_killed_when_there_was(train, killed, there):
    def during(run: Path, process: subprocess.Popen[str]) -> None:
        wait_for(run, there, process)
        children = psutil.Process(process.pid).children()
        (driver,) = (one for one in children if "goldilocks.launch.train" in one.cmdline())
        (process if killed == "supervisor" else driver).kill()
        deadline = time.monotonic() + GONE_S
        while (left := processes_of(run)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == []

    done = train("trainer.total_training_steps=1000", during=during)
    assert done.status == (-signal.SIGKILL if killed == "supervisor" else 1)


def test_a_prompt_that_is_too_long_is_one_message_before_a_worker_starts(train):
    done = train("data.max_prompt_length=6")
    assert done.status == 1
    assert "data.max_prompt_length=6 is not accepted" in done.err
    assert "data.filter_overlong_prompts=True" in done.err
    assert done.err.count("\n") == 2


RAISES = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    raise LookupError("the answer sheet is missing")
"""


def test_a_reward_function_that_raises_ends_the_run_with_the_reason_on_verls_own_trainer_too(train, tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(RAISES)
    done = train(f"reward.custom_reward_function.path={path}", "trainer.v1.trainer_mode=sync")
    assert done.status == 1, done.log
    assert "LookupError: the answer sheet is missing" in done.err, done.err + done.log


def test_doctor_finds_the_plugin_in_a_ray_worker(tmp_path):
    status, said = end(start(*GOLDILOCKS, "doctor", "--runs", str(tmp_path)))
    assert status == 0, said
    assert "live in a Ray worker" in said
