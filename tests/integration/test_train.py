"""``goldilocks train`` for real: verl on Ray on this machine, started, watched and ended by the command."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from goldilocks.tasks.arithmetic import Arithmetic
from goldilocks.tasks.base import write_split
from goldilocks.tasks.tiny_model import make
from goldilocks.verl import defaults
from goldilocks.verl.guarded_reward import compute_score
from goldilocks.verl.supervisor import MARK

pytestmark = pytest.mark.integration

# One step of a few rollouts: what is tested here is everything around it.
SMALL = [
    "data.train_batch_size=8",
    "data.val_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "trainer.total_training_steps=2",
]


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


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default task, small and hardly taught."""
    root = tmp_path_factory.mktemp("arithmetic")
    task = Arithmetic()
    write_split(root / "data", task.data_source, "train", task.problems("train", 64, 0))
    write_split(root / "data", task.data_source, "val", task.problems("val", 16, 0))
    make(root / "model", steps=100)
    return root


@pytest.fixture
def train(arithmetic: Path, tmp_path: Path) -> Train:
    """``train(*words, within=seconds)`` runs the command and checks that it left nothing running."""

    def run(
        *words: str, within: float = 200, during: Callable[[Path, subprocess.Popen[str]], None] | None = None
    ) -> Trained:
        folder = tmp_path / "runs" / "test"
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "goldilocks.cli",
                "train",
                "--name",
                "test",
                "--runs",
                str(tmp_path / "runs"),
                *SMALL,
                *words,
            ],
            env={**os.environ, defaults.VARIABLE: str(arithmetic), "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if during is not None:
            during(folder, process)
        out, err = process.communicate(timeout=within)
        assert processes_of(folder) == []
        return Trained(process.returncode, out, err, folder)

    return run


def processes_of(run: Path) -> list[str]:
    """The command lines of what is alive of a run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == str(run.resolve()):
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def records(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_ends_with_a_summary_and_leaves_everything_in_its_directory(train):
    done = train("trainer.save_freq=2")
    assert done.status == 0, done.err + done.log
    assert "step 2/2" in done.out
    assert "validation" in done.out
    assert "points)" in done.out
    assert [record["step"] for record in records(done.run) if "critic/score/mean" in record["data"]] == [1, 2]
    assert (done.run / "config.yaml").exists()
    assert (done.run / "checkpoints/global_step_2").is_dir()

    resumed = train("trainer.save_freq=2", "trainer.total_training_steps=3")
    assert resumed.status == 0, resumed.err + resumed.log
    assert [record["step"] for record in records(done.run) if "critic/score/mean" in record["data"]] == [3]
    assert (done.run / "metrics.1.jsonl").exists()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_or_killed_it_leaves_nothing_running(train, sent):
    def during(run: Path, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 120
        while not any("raylet" in line for line in processes_of(run)):
            assert time.monotonic() < deadline, "no Ray"
            assert process.poll() is None, process.communicate()
            time.sleep(0.2)
        time.sleep(3)
        process.send_signal(sent)
        process.wait(30)
        while processes_of(run) and time.monotonic() < deadline:  # after SIGKILL Ray takes itself down
            time.sleep(0.2)

    done = train(during=during)
    assert done.status == (130 if sent == signal.SIGINT else -signal.SIGKILL)


def test_a_prompt_that_is_too_long_is_one_message_before_ray_starts(train):
    done = train("data.max_prompt_length=6", within=90)
    assert done.status == 1
    assert "prompts are longer than data.max_prompt_length=6" in done.err
    assert "data.filter_overlong_prompts=True" in done.err
    assert done.err.count("\n") == 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise LookupError('the answer sheet is missing')", "LookupError: the answer sheet is missing"),
        ("__import__('time').sleep(600)", "did not return within 2 s"),
    ],
)
def test_a_reward_function_that_raises_or_hangs_ends_the_run_with_the_reason(train, tmp_path, body, message):
    path = tmp_path / "reward.py"
    path.write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    {body}\n")
    done = train(f"reward.custom_reward_function.path={path}", "--reward-timeout", "2")
    assert done.status == 1, done.log
    assert message in done.err, done.err + done.log


def test_a_guarded_reward_function_returns_what_the_function_does():
    inner = {"path": "pkg://goldilocks.tasks.registry", "name": "compute_score", "reward_kwargs": {}}
    row = {"data_source": "goldilocks/arithmetic", "solution_str": "3", "ground_truth": "3", "extra_info": {}}
    result = asyncio.run(compute_score(guarded_function=inner, timeout_s=5.0, **row))
    assert result == {"score": 1.0, "acc": 1.0}


def test_doctor_finds_the_plugin_in_a_ray_worker(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "goldilocks.cli", "doctor", "--runs", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "live in a Ray worker" in done.stdout
