"""Rows that are trained again outlive their first training, and keep the log-probs of the policy that wrote them."""

from __future__ import annotations

import pytest
import torch
from builders import fill, plain_collector
from transfer_queue import KVBatchMeta
from verl_world import Queue, UpdatedBatches

from goldilocks.core import Collector, Replay
from goldilocks.core.allocators import Fixed
from goldilocks.types import Group, Request, Rollout
from goldilocks.verl.store.behaviour import use_behaviour_log_probs
from goldilocks.verl.store.replayed_rows import ReplayedRows
from goldilocks.verl.store.rows import batch_of

WRITTEN, NOW = -1.0, -3.0  # log-probs: by the policy that wrote a row, and by the one that is trained
N, GROUPS = 2, 4


class Trainer(ReplayedRows, UpdatedBatches):  # type: ignore[misc]
    def end_step(self, batch: KVBatchMeta) -> list[str]:
        """End a step as verl's ``fit`` does; return the keys that it clears."""
        self._compute_metrics(batch, {})
        if self.config.trainer["rollout_data_dir"]:
            self._log_rollout_data(batch, {}, "dumps")
        return batch.keys


def collector() -> Collector:
    return plain_collector(40, allocator=Fixed(N), target_groups=GROUPS, replay=Replay(groups=2, max_age=2))


def collected(subject: Collector, queue: Queue) -> tuple[Group, ...]:
    """Collect a batch; groups with an even number have one right answer of two, the others none."""

    def stored(request: Request, index: int) -> Rollout:
        key = f"{request.uid}_{index}_0"
        queue.add(key, subject.step, 3 + index, step=subject.step + 1, rollout_log_probs=WRITTEN)
        reward = float(index == 0 and int(request.uid[1:]) % 2 == 0)
        return Rollout(request.uid, index, reward, 3, version=subject.step, payload=[[key, queue.tags[key]]])

    fill(subject, stored)
    return subject.take()


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    return Queue(monkeypatch)


@pytest.mark.parametrize("dumps", [True, False])
def test_rows_that_may_be_trained_again_are_not_cleared_and_all_others_are(queue: Queue, dumps: bool) -> None:
    trainer = Trainer(collector(), dumps)
    batch = batch_of(collected(trainer.collector, queue))
    batch.keys, batch.tags = [*batch.keys, "pad0_0_0"], [*batch.tags, {"is_padding": True}]
    informative = [f"g{number}_{index}_0" for number in (0, 2) for index in range(N)]
    assert trainer.end_step(batch) == ["g1_0_0", "g1_1_0", "g3_0_0", "g3_1_0", "pad0_0_0"]
    assert set(informative) < set(trainer.measured), "metrics are of the whole batch"

    again = batch_of(collected(trainer.collector, queue))
    assert again.keys[-4:] == informative
    assert trainer.end_step(again)[-4:] == informative, "used once, they are cleared with their batch"


def test_a_rollout_is_dumped_once(queue: Queue) -> None:
    trainer = Trainer(collector(), dumps=True)
    dumped: list[str] = []
    for _ in range(4):
        trainer.end_step(batch_of(collected(trainer.collector, queue)))
        dumped += trainer.dumped
    assert len(dumped) == len(set(dumped)) == 4 * GROUPS * N


def test_rows_trained_again_keep_the_log_probs_of_the_policy_that_wrote_them(queue: Queue) -> None:
    subject = collector()
    for policy in range(3):
        batch = batch_of(collected(subject, queue))
        for key in batch.keys:  # verl recomputes them for every row of a batch
            queue.rows[key]["old_log_probs"] = torch.full_like(queue.rows[key]["rollout_log_probs"], NOW)
        values = use_behaviour_log_probs(batch, policy, None)
        old = {key: float(queue.rows[key]["old_log_probs"][0]) for key in batch.keys}
        again = {key for group in subject.in_hand if group.replays for key in keys(group)}
        assert old == {key: WRITTEN if key in again else NOW for key in batch.keys}
        assert values["train/stale_rows"] == len(again) == subject.metrics()["replay/rollouts"]
        assert len(again) == (0 if policy == 0 else 4)


def keys(group: Group) -> list[str]:
    return [key for rollout in group.trained for key, _ in rollout.payload]
