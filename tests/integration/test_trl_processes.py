"""TRL runs in processes of their own: two at a time under accelerate, and one that is killed and goes on.

Runs whose floats are compared to the last digit are each made in a fork of a process that has imported everything and
done nothing: in a process with a history torch may choose other kernels (``process_state``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import trl_world as world

from goldilocks.runs.checkpoints import last_whole

from .conftest import run_scripted

ENDED = 0
KILLED = -9
ADAPTIVE = {"enable": True, "max_n": 9, "rollouts_per_batch": 3, "stop": "contrast"}


def seen(out: Path, rank: int = 0) -> dict[str, Any]:
    return dict(json.loads((out / f"seen{rank}.json").read_text()))


JUDGED = {
    "sections": {"batch_filter": {"enable": True}},
    "per_device_train_batch_size": 8,
    "max_steps": 2,
    "save_strategy": "steps",
    "save_steps": 1,
    "eval_prompts": 5,  # four answers each, in batches of eight for both processes
    "eval_strategy": "steps",
    "eval_steps": 2,
    "per_device_eval_batch_size": 4,
}
DECIDED = {
    "sections": {"filter_groups": {"enable": True}, "adaptive_rollout": ADAPTIVE},
    "per_device_train_batch_size": 8,
    "num_iterations": 2,
    "max_steps": 4,
}

# Groups differ in size, so that one process and two fill their batches up with different numbers of silent rows.
SHARED = {
    "sections": {"filter_groups": {"enable": True}, "adaptive_rollout": ADAPTIVE, "engine_slots": 8},
    "gradient_accumulation_steps": 2,
    "loss_type": "dr_grpo",
    "optim": "sgd",
    "max_steps": 3,
}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs that the same two processes made."""
    folder = tmp_path_factory.mktemp("two_processes")
    runs = {"judged": JUDGED, "decided": DECIDED, "shared": {**SHARED, "per_device_train_batch_size": 4}}
    options = [{"out": str(folder / name), **chosen} for name, chosen in runs.items()]
    run_scripted("trl_script", folder, options, processes=2)
    return folder


def test_two_processes_judge_a_batch_and_write_one_checkpoint(two_processes: Path) -> None:
    out = two_processes / "judged"
    metrics = seen(out, 0)["metrics"]
    assert metrics == seen(out, 1)["metrics"]
    assert metrics["batch/total_groups_generated"] == 4 + metrics["train/groups_rejected"]
    whole = last_whole(out)
    assert whole == out / "checkpoint-2"
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= {file.name for file in whole.iterdir()}


def test_answers_that_fill_the_last_batch_of_a_validation_up_do_not_count(two_processes: Path) -> None:
    assert [seen(two_processes / "judged", rank)["answers"] for rank in (0, 1)] == [[20], [20]]


def test_two_processes_train_one_batch_that_the_first_decided(two_processes: Path) -> None:
    first, second = (seen(two_processes / "decided", rank) for rank in (0, 1))
    assert first["batch"] == second["batch"]
    assert len(first["batch"]) == 4
    assert first["weights"] == second["weights"]
    assert first["rows"] == second["rows"]
    assert sum(first["rows"]) * 2 >= sum(size for _, size, _ in first["batch"])
    assert first["metrics"] == second["metrics"]


def test_two_processes_train_what_one_trains(two_processes: Path, tmp_path: Path) -> None:
    alone = world.trainer(tmp_path, per_device_train_batch_size=8, **SHARED)
    alone.train()
    both = seen(two_processes / "shared")
    assert [uid for uid, *_ in both["batch"]] == [group.uid for group in alone.collection.batch.groups]
    assert both["losses"] == pytest.approx(world.losses(alone), rel=1e-3, abs=1e-6)
    assert both["weights"] == pytest.approx(world.weights(alone).double().sum().item(), abs=1e-5)
    assert min(map(abs, both["losses"])) > 1e-4


# The sizes of a run, and the step in which it is killed. In the second, a batch serves four updates, and the checkpoint
# falls between two of them.
CUT: dict[str, tuple[dict[str, int], int]] = {
    "whole batches": ({"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}, 5),
    "in the middle of a batch": (
        {
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 4,
            "num_iterations": 2,
        },
        7,
    ),
}


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs that were killed and went on, and of the same runs uncut, all forked from one process."""
    folder = tmp_path_factory.mktemp("cut")
    sections = {
        "filter_groups": {"enable": True, "max_carry_steps": 2},
        "adaptive_rollout": ADAPTIVE,
        "goldilocks": {"selector": "thompson"},
    }
    runs: list[dict[str, Any]] = []
    for name, (sizes, step) in CUT.items():
        common = {"sections": sections, "max_steps": 9, "save_strategy": "steps", "save_steps": 3, **sizes}
        whole, killed = str(folder / name / "whole"), str(folder / name / "killed")
        own = {"out": killed, "kill": step}, {"out": whole}, {"out": killed, "resume": True}
        runs += [{**common, **one} for one in own]
    said = run_scripted("trl_script", folder, runs)
    assert json.loads(said.splitlines()[-1]) == [KILLED, ENDED, ENDED] * len(CUT), said
    return folder


@pytest.mark.parametrize("name", CUT)
def test_a_run_that_was_killed_goes_on_exactly(name: str, cut: Path) -> None:
    assert seen(cut / name / "killed") == seen(cut / name / "whole")
