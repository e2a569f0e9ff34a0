"""The trainer beside servers that never stop: it finds rows of the newest weights where its batch has none."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from builders import plain_collector
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl_world import Queue

from goldilocks.core import Surplus
from goldilocks.drive.driver import Driver
from goldilocks.losses.log_probs import WeightsGuard
from goldilocks.types import Rollout
from goldilocks.verl.dispatch.backend import NeverPausing
from goldilocks.verl.update.async_trainer import GoldilocksAsyncTrainer
from goldilocks.verl.update.log_probs import OnePass


class Servers:
    """In the place of ``StreamingManager``: they have ended the second half of a group since the batch was taken."""

    def __init__(self, ended: list[Rollout]) -> None:
        self._ended = ended

    def so_far(self, *, with_answers: bool) -> tuple[list[Rollout], list[Any]]:
        assert not with_answers, "only a checkpoint needs them"
        ended, self._ended = self._ended, []
        return ended, []


class Trainer(GoldilocksAsyncTrainer):
    """Before its second update; a row that the trainer computes has log-probs of -1."""

    _ranks = 1
    global_steps = 2
    processor = None

    def __init__(self, queue: Queue, rollouts: list[Rollout], guard: WeightsGuard, micro_batch: Any = None) -> None:
        """``micro_batch``: how many rows a rank computes at a time; None: as many as have so many tokens."""
        sizes = {"log_prob_micro_batch_size_per_gpu": micro_batch, "seed": 0}
        parts = {"actor": {"use_dynamic_bsz": micro_batch is None}, "rollout": sizes}
        self.config = OmegaConf.create({"data": {"seed": 1}, "actor_rollout_ref": parts})
        self.computed = 0
        backend = NeverPausing(self.config, [{}], nullcontext)
        backend.manager = Servers(rollouts)  # type: ignore[assignment]
        self.queue, self.weights_guard, self.one_pass = queue, guard, OnePass(True, True)
        self.replay_buffer = type("Buffer", (), {"backend": backend})()
        collector = plain_collector(4, target_groups=1, surplus=Surplus(4, "partial"))
        collector.requests()
        self.collector, self.driver = collector, Driver(collector, backend, backend.rows)

    def _log_probs(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        self.computed = len(batch.keys)
        for key in batch.keys:
            row = self.queue.rows[key]
            row["old_log_probs"] = torch.full_like(row["rollout_log_probs"], -1.0)
        return batch


def rollout(queue: Queue, index: int, version: int, log_prob: float) -> Rollout:
    key = f"g0_{index}_0"
    queue.add(key, version, 3, rollout_log_probs=log_prob)
    return Rollout("g0", index, 1.0, 3, version=version, payload=[[key, queue.tags[key]]])


def carried(queue: Queue) -> KVBatchMeta:
    """Return a batch in which every row is of the policy before."""
    queue.add("g9_0_0", 0, 3, rollout_log_probs=-1.0, old_log_probs=-3.0)
    return KVBatchMeta(partition_id="train", keys=["g9_0_0"], tags=[queue.tags["g9_0_0"]])


def test_a_batch_without_fresh_rows_is_measured_by_rows_that_came_since(queue: Queue) -> None:
    rollouts = [rollout(queue, 0, 0, -7.0), rollout(queue, 1, 1, -1.25)]
    trainer = Trainer(queue, rollouts, WeightsGuard("warn", exact=True))
    assert trainer._gap_before_update(carried(queue), None) == pytest.approx(0.25)
    assert trainer.collector.accounts.generated_rollouts == 2
    assert "old_log_probs" not in queue.rows["g0_1_0"]


@pytest.mark.parametrize(("micro_batch", "computed"), [(None, 3), (2, 2), (4, 0)])
def test_waiting_rows_are_computed_in_whole_micro_batches(queue: Queue, micro_batch: int | None, computed: int) -> None:
    rollouts = [rollout(queue, index, 1, -1.25) for index in range(3)]
    trainer = Trainer(queue, rollouts, WeightsGuard("warn", exact=True), micro_batch)
    assert trainer._gap_before_update(carried(queue), None) == (pytest.approx(0.25) if computed else None)
    assert trainer.computed == computed


@pytest.mark.parametrize("correction", [{"bypass_mode": True}, None])
def test_where_a_gap_means_nothing_no_row_is_computed(queue: Queue, correction: Any) -> None:
    guard = WeightsGuard("warn", exact=True, judges=correction is not None)
    trainer = Trainer(queue, [rollout(queue, 0, 1, -1.5)], guard)
    assert trainer._gap_before_update(carried(queue), correction) is None
    assert trainer.collector.accounts.generated_rollouts == 0
