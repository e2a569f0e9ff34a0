"""Checkpoints that were written before there was a driver: each trainer goes on from its own.

``checkpoints/`` was written by the three trainers' own code: two updates of two groups, then three groups of two
rollouts kept, one open, its two rollouts in flight.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import plain_collector
from omegaconf import OmegaConf
from verl_world import Queue

from goldilocks.core import Collector
from goldilocks.drive.backend import Rounds
from goldilocks.drive.driver import Driver
from goldilocks.drive.filter_gate import FilterGate
from goldilocks.filtering import PPOFilterConfig
from goldilocks.runs.costs import Budget
from goldilocks.trl.collection import Collection, Processes
from goldilocks.trl.on_disk import Saved
from goldilocks.trl.rows import CompletionGate, CompletionRows
from goldilocks.verl.compat.backend import GenerationBatches
from goldilocks.verl.compat.rows import ProtoRows
from goldilocks.verl.dispatch.backend import AgentLoops
from goldilocks.verl.driven import DriverCheckpoint
from goldilocks.verl.update.gates import BatchFilterGate

CHECKPOINTS = Path(__file__).parent / "checkpoints"
KEPT = ["g4", "g5", "g6"]
CONFIG = PPOFilterConfig(target_group_size=2)
KEPT_ON_DISK = {"del_local_ckpt_after_load": False}


def collector() -> Collector:
    return plain_collector(20, target_groups=2, gen_batch_size=4)


def check(driver: Driver) -> None:
    """The run goes on: what was kept waits, what was in flight is asked for again, and the meter has run."""
    own = driver.collector
    assert (own.step, own.prompts_issued, own.owed) == (2, 8, 2)
    assert [group.uid for group in own.kept] == KEPT
    assert own.in_flight == 0
    assert [(request.uid, request.n) for request in own.requests()] == [("g7", 2)]
    own.accounts.check()


def check_meter(driver: Driver) -> None:
    assert (driver.meter.seconds, driver.meter.share) == (7.5, 0.14)
    assert not driver.meter.validation_due()


def check_gate(gate: FilterGate, seeded: FilterGate) -> None:
    """The generator is the one that was saved, wherever this one stood."""
    assert torch.equal(
        torch.as_tensor(gate.state_dict()["generator"]), torch.as_tensor(seeded.state_dict()["generator"])
    )


def test_trl_goes_on_from_a_checkpoint_that_has_its_rows_in_the_state(tmp_path: Path) -> None:
    processes: Any = Processes(SimpleNamespace(num_processes=1, process_index=0))
    nothing: Any = None
    collection = Collection(nothing, CompletionRows(), processes, nothing, keeps=True, seed=1)
    gate = CompletionGate(CONFIG, 2, collection.rows)
    backend = Rounds(collection.events)
    budget = Budget(rollouts=100, validations=4)
    collection.driver = Driver(collector(), backend, collection.rows, gate, budget=budget)
    saved = Saved(collection, processes)
    assert saved.read(CHECKPOINTS / "trl" / "checkpoint-2", torch.device("cpu")) == (2, None)
    check_gate(gate, CompletionGate(CONFIG, 1, collection.rows))
    row = collection.rows["g5", 1]
    assert (row.rewards, row.prompt, row.completion) == ((1.0,), "question g5", "answer 1")
    assert row.tensors["completion_ids"].tolist() == [3, 4, 1]
    saved.write(tmp_path, 2, None)
    collection.rows.groups.clear()
    assert saved.read(tmp_path, torch.device("cpu")) == (2, None)
    assert sorted(collection.rows.groups) == KEPT
    check_meter(collection.driver)
    check(collection.driver)


def verl_trainer(name: str) -> Any:
    """The section of verl's config that takes up from these checkpoints."""
    folder = str(CHECKPOINTS / name)
    return OmegaConf.create(
        {
            "default_local_dir": folder,
            "resume_mode": "auto",
            "resume_from_path": None,
            "del_local_ckpt_after_load": False,
        }
    )


def test_v0_goes_on_from_a_checkpoint_that_calls_the_backend_a_manager() -> None:
    own, rows = collector(), ProtoRows()
    nothing: Any = None
    backend = GenerationBatches(nothing, own, rows, nothing, nothing)
    driver = Driver(own, backend, rows)
    DriverCheckpoint(verl_trainer("v0"), driver).take_up(2)
    assert backend.state_dict() == {"reward_keys": ["acc", "score"]}
    batch = rows.of_batch(own.kept, policy=2)
    assert batch.batch["responses"].tolist() == [[3, 4, index] for _ in KEPT for index in range(2)]
    assert batch.non_tensor_batch["acc"].tolist() == [0.0, 1.0] * 3
    check(driver)


def test_v1_goes_on_from_its_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue(monkeypatch)
    backend = AgentLoops(OmegaConf.create(), [], nullcontext)
    gate = BatchFilterGate(CONFIG, 2, lambda: 2, lambda groups: None)
    driver = Driver(collector(), backend, backend.rows, gate, budget=Budget(rollouts=100, validations=4))
    DriverCheckpoint(verl_trainer("v1"), driver).take_up(2)
    check_gate(gate, BatchFilterGate(CONFIG, 1, lambda: 2, lambda groups: None))
    assert sorted(queue.rows) == [f"{uid}_{index}_0" for uid in KEPT for index in range(2)]
    assert queue.rows["g5_1_0"]["rollout_log_probs"].tolist() == [-0.5] * 3
    check_meter(driver)
    (request,) = driver.collector.requests()
    assert (request.uid, request.n) == ("g7", 2)
    assert list(backend.rows.unfinished.give(request)) == [0]  # which goes on from what it was answered
