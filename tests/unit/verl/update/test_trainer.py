"""The V1 trainer around its gate: rows have log-probs before they are judged, and servers are woken for a refill."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import settings, source
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base
from verl_world import Queue, short_rows

from goldilocks.drive.backend import Rounds, places
from goldilocks.drive.driver import Driver
from goldilocks.types import Request, Rollout
from goldilocks.verl.store.rows import QueueRows, Unfinished, batch_of
from goldilocks.verl.update.driver_queue import DriverQueue
from goldilocks.verl.update.gates import build_gate
from goldilocks.verl.update.held_batch import LONGEST
from goldilocks.verl.update.trainer import CollectorTrainer

TOKENS, PADDING = 3, "pad_0_0"


class Verl:
    """What verl's trainer does with a batch, as far as a gate is concerned; ``calls`` is what was done."""

    calls: list[str]
    queue: Queue

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """Pad to an even number of rows."""
        if len(batch.keys) % 2:
            self.queue.add(PADDING, 0, TOKENS)
            batch.keys, batch.tags = [*batch.keys, PADDING], [*batch.tags, {"is_padding": True}]
        return batch

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        self.calls.append(f"log-probs of {len(batch.keys)} rows")
        for key in batch.keys:
            self.queue.rows[key]["old_log_probs"] = torch.full((TOKENS,), -1.0)
        return batch

    def on_sample_end(self) -> None:
        self.calls.append("sleep")

    def update_weights(self, version: int) -> None:
        self.calls.append(f"wake with policy {version}")


class Trainer(CollectorTrainer, Verl):  # type: ignore[misc]
    def __init__(self, queue: Queue, *overrides: str) -> None:
        self.queue, self.calls = queue, []
        self.settings = settings("batch_filter.enable=true", *overrides, batch=2)
        self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"temperature": 1.0}}, "trainer": {}})
        self.one_pass, self.checkpoint_manager = OnePass(), self
        self.timing_raw, self.global_steps = {}, 1
        self.collector = self.settings.collector(source(40))
        self.rows = QueueRows(Unfinished(list))
        gate = build_gate(self.settings, lambda: None, lambda: 0, self._prepare)  # type: ignore[arg-type, return-value]
        backend = Answers(self._answers)
        backend.refilling = self._refilling  # type: ignore[method-assign]
        self._drive(Driver(self.collector, backend, self.rows, gate))

    def _answers(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        """Every second group has right and wrong answers; the batch filter refuses the others, which have none."""
        for request, index, _ in places(requests):
            key = f"{request.uid}_{index}_0"
            self.queue.add(key, 0, TOKENS)
            self.rows.put((request.uid, index), [[key, self.queue.tags[key]]])
            mixed = float(int(request.uid[1:]) % 2 and index % 2)
            self.queue.rows[key]["rm_scores"] *= mixed
            yield Rollout(request.uid, index, mixed, TOKENS, payload=[[key, self.queue.tags[key]]])

    def _tensors_only(self, batch: KVBatchMeta) -> AbstractContextManager[None]:
        return nullcontext()


class OnePass:
    own_log_probs = False


class Answers(Rounds):
    """Rounds, whose servers the trainer wakes."""


def test_replacements_have_log_probs_before_they_are_judged_and_the_batch_is_full_of_what_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = Trainer(Queue(monkeypatch))
    taken = batch_of(trainer.driver.take())
    assert [key.split("_")[0] for key in taken.keys[::4]] == ["g0", "g1"]
    final = trainer._compute_old_log_prob(trainer._balance_batch(taken, {}), {})
    assert sorted({key.split("_")[0] for key in final.keys}) == ["g1", "g3"]
    woken = ["wake with policy 0", "sleep"]
    refilled, surplus = [*woken, "log-probs of 4 rows"], ["log-probs of 4 rows"]  # two groups came, one after the other
    assert trainer.calls == ["log-probs of 8 rows", *refilled, *surplus]
    assert all("old_log_probs" in trainer.queue.rows[key] for key in final.keys)
    assert "gen" in trainer.timing_raw
    assert trainer.driver.metrics()["batch/total_groups_generated"] == 4
    assert {key.split("_")[0] for key in trainer.queue.rows} <= trainer.collector.alive, "what was refused is freed"


class Placing(CollectorTrainer):
    """As far as rows that come with reports are concerned: on two ranks, with two rows of eight tokens in the batch."""

    use_critic = use_reference_policy = False
    processor, parameter_sync_step, global_steps = None, 1, 4
    _ranks = 2

    def __init__(self, queue: Queue, *overrides: str) -> None:
        self.settings = settings(*overrides)
        self.config = OmegaConf.create(
            {"actor_rollout_ref": {"rollout": {"enable_rollout_routing_replay": False}}, "algorithm": {}}
        )
        self.one_pass = SimpleNamespace(own_log_probs=True)
        rows = QueueRows(Unfinished(list))
        self.replay_buffer = SimpleNamespace(backend=SimpleNamespace(rows=rows, with_rows=True))
        keys = ["g0_0_0", "g0_1_0"]
        rows.at_hand.add(short_rows(keys, [{"response_mask": torch.ones(8)}] * 2))
        tags = [{"seq_len": 8, "min_global_steps": 3} for _ in keys]
        for index, (key, tag) in enumerate(zip(keys, tags, strict=True)):
            rows.put(("g0", index), [[key, tag]])
        self.batch = KVBatchMeta(partition_id="train", keys=keys, tags=tags)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        return dp_size


def set_to(**attributes: Any) -> Callable[[Any], None]:
    return lambda trainer: vars(trainer).update(attributes)


def tags_have(**values: Any) -> Callable[[Any], None]:
    return lambda trainer: [tag.update(values) for tag in trainer.batch.tags]


@pytest.mark.parametrize(
    ("change", "stays", "next_come"),
    [
        (set_to(), True, True),
        (tags_have(min_global_steps=1), True, True),  # the update's own pass gives what an older policy did not write
        (set_to(_ranks=3), False, True),  # verl pads the batch with a copy of a row
        (tags_have(seq_len=LONGEST // 3), True, False),
        (tags_have(seq_len=LONGEST), False, False),
        (set_to(use_critic=True), False, False),
        (set_to(processor=object()), False, False),
        (set_to(use_reference_policy=True), True, False),
        (set_to(one_pass=SimpleNamespace(own_log_probs=False)), True, False),
        (lambda trainer: trainer.replay_buffer.backend.rows.at_hand.forget(["g0_1_0"]), False, True),
    ],
)
def test_rows_stay_at_hand_where_no_other_process_reads_them(
    change: Callable[[Any], None], stays: bool, next_come: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(monkeypatch)
    monkeypatch.setattr(trainer_base, "tq", DriverQueue())
    trainer = Placing(queue)
    change(trainer)
    trainer._place_rows(trainer.batch)
    assert (queue.rows == {}) is stays
    assert trainer.replay_buffer.backend.with_rows is next_come


@pytest.mark.parametrize("at_hand", [True, False])
@pytest.mark.parametrize("version", [1, 3])
@pytest.mark.parametrize("all_have", [True, False])
def test_a_batch_is_held_with_older_rows_if_all_rows_have_log_probs_of_the_engine(
    all_have: bool, version: int, at_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = Queue(monkeypatch)
    monkeypatch.setattr(trainer_base, "tq", DriverQueue())
    trainer = Placing(queue)
    tags_have(min_global_steps=version)(trainer)
    rows, keys = trainer.replay_buffer.backend.rows, trainer.batch.keys
    if all_have:
        rows.at_hand.add(short_rows(keys, [{"response_mask": torch.ones(8), "rollout_log_probs": torch.ones(8)}] * 2))
    if not at_hand:
        rows.to_queue(keys)
    is_held = all_have or version == 3
    assert (trainer._held(trainer.batch) is not None) is is_held
    assert bool(queue.rows) is not (at_hand and is_held), "what is not held is in the queue"


def test_rows_that_may_be_trained_again_do_not_come_with_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_base, "tq", DriverQueue())
    trainer = Placing(Queue(monkeypatch), "goldilocks.replay.groups=1")
    trainer._place_rows(trainer.batch)
    assert trainer.replay_buffer.backend.with_rows is False
