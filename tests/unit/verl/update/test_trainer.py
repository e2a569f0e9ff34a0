"""The V1 trainer around its gate: rows have log-probs before they are judged, and servers are woken for a refill."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders import settings, source
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl_world import Queue

from goldilocks.drive.backend import Rounds, places
from goldilocks.drive.driver import Driver
from goldilocks.types import Event, Paused, Request, Rollout
from goldilocks.verl.store import QueueRows, batch_of
from goldilocks.verl.update.gates import build_gate
from goldilocks.verl.update.trainer import CollectorTrainer

TOKENS, PADDING = 3, "pad_0_0"


class Verl:
    """What verl's trainer does with a batch, as far as a gate is concerned; ``calls`` is what was done."""

    calls: list[str]
    queue: Queue
    logged: dict[str, Any]

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

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        return batch

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> None:
        self.logged = dict(metrics)

    def on_sample_end(self) -> None:
        self.calls.append("sleep")

    def update_weights(self, version: int) -> None:
        self.calls.append(f"wake with policy {version}")


class Trainer(CollectorTrainer, Verl):  # type: ignore[misc]
    def __init__(self, queue: Queue, *overrides: str) -> None:
        self.queue, self.calls = queue, []
        self.settings = settings("batch_filter.enable=true", *overrides, batch=2)
        self.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"temperature": 1.0}}, "trainer": {}})
        self.one_pass, self.checkpoint_manager = SimpleNamespace(own_log_probs=False), self
        self.timing_raw, self.global_steps = {}, 1
        self.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 1]})
        self.collector = self.settings.collector(source(40))
        self.rows = QueueRows(list)
        gate = build_gate(self.settings, "kl", lambda: 0.0, lambda: 0, self._prepare)
        backend = Rounds(self._answers)
        backend.refilling = self._refilling  # type: ignore[method-assign]
        self.driver = Driver(self.collector, backend, self.rows, gate)

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


def test_replacements_have_log_probs_before_they_are_judged_and_the_batch_is_full_of_what_passed(queue: Queue) -> None:
    trainer = Trainer(queue)
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


def filled_up(queue: Queue, *keys: str) -> tuple[set[str], dict[str, dict[str, torch.Tensor]]]:
    """Take a batch that dropped groups fill up; return these, and the rows once they have advantages."""
    keys = ("max_num_gen_batches=1", "on_exhausted=backfill", "enable=true", "metric=reward", *keys)
    trainer = Trainer(queue, "batch_filter.enable=false", *(f"algorithm.filter_groups.{key}" for key in keys))
    trainer.config.algorithm = {"rollout_correction": None}
    batch = batch_of(trainer.driver.take())
    for key in batch.keys:
        queue.rows[key]["advantages"] = torch.ones(TOKENS)
    trainer._compute_advantage(batch, {})
    return trainer.collector.backfilled, {key: queue.rows[key] for key in batch.keys}


def test_rows_that_only_fill_a_batch_up_have_no_loss(queue: Queue) -> None:
    backfilled, rows = filled_up(queue)
    assert backfilled == {"g0"}
    masks = {key: row["response_mask"].sum().item() for key, row in rows.items()}
    assert masks == {key: 0 if key.startswith("g0") else TOKENS for key in rows}


def test_a_batch_that_only_fills_up_has_advantages_of_zero(queue: Queue) -> None:
    """No token would be left if all were masked, and verl's losses divide by their number."""
    backfilled, rows = filled_up(queue, "min_std=10")
    assert {key.split("_")[0] for key in rows} == backfilled
    assert all(row["response_mask"].all() and not row["advantages"].any() for row in rows.values())


def test_what_a_save_takes_in_is_in_the_metrics_of_its_step(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The answer of a rollout was whole when the batch was full; its reward came during the update."""
    partial = ("algorithm.filter_groups.on_full=partial", "data.gen_batch_size=3")
    trainer = Trainer(queue, "batch_filter.enable=false", *partial)
    rest: list[Event] = []
    answers, backend = trainer._answers, trainer.driver.backend

    def but_the_last(requests: Sequence[Request]) -> Iterator[Event]:
        for event in answers(requests):
            late = event.uid == "g2" and event.index == 3
            rest.extend([event] if late else [])
            yield Paused(event.uid, event.index, TOKENS) if late else event

    backend._generate = but_the_last  # type: ignore[attr-defined]
    monkeypatch.setattr(backend, "up_to_saved_moment", lambda: rest)
    batch = batch_of(trainer.driver.batch())
    trainer.driver.save(tmp_path)
    trainer.replay_buffer = SimpleNamespace(backend=SimpleNamespace(rows=trainer.rows))
    trainer._compute_metrics(batch, {})
    assert trainer.logged["train/groups_judged"] == 3


def test_one_rank_gets_the_batch_that_verl_would_give_it() -> None:
    def balanced(balance: Any) -> tuple[KVBatchMeta, dict[str, float]]:
        keys = [f"g{row}_0_0" for row in range(5)]
        batch = KVBatchMeta(keys=keys, tags=[{"seq_len": 3 + row * row % 4} for row in range(5)], partition_id="train")
        workers, tokenizer = SimpleNamespace(_dispatch_info={"actor": [0]}), SimpleNamespace(eos_token_id=0)
        trainer = SimpleNamespace(_ranks=1, actor_rollout_wg=workers, tokenizer=tokenizer)
        trainer._get_required_batch_multiple = lambda ranks: ranks
        metrics: dict[str, float] = {}
        return balance(trainer, batch, metrics), metrics

    (ours, said), (verls, logged) = balanced(CollectorTrainer._balance_batch), balanced(PPOTrainer._balance_batch)
    assert ours.keys == verls.keys
    assert said == logged
