"""The asynchronous trainer's parts: what is refused, which samples are not trained yet, what a worker may say."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("goldilocks.trl.async_trainer", exc_type=ImportError)  # an older TRL has another one

from run_files import json_lines
from trl.experimental.async_grpo import async_rollout_worker
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from goldilocks.core import ListSource
from goldilocks.core.accounts import Accounts
from goldilocks.core.limits import Budget
from goldilocks.drive import driver
from goldilocks.drive.backend import CANCELLED
from goldilocks.drive.driver import ENDS_THE_RUN
from goldilocks.rewards import RewardFailed, spent
from goldilocks.runs.checkpoints import FILE
from goldilocks.runs.costs import SECONDS
from goldilocks.testing import check_backend, check_rows
from goldilocks.trl import on_disk
from goldilocks.trl.async_rollouts import (
    Answer,
    AskedLoop,
    AskedRollouts,
    AskedWorker,
    Cancel,
    CollectedQueue,
    MicroBatches,
    RolloutAsk,
    RolloutSamples,
    SampleRows,
)
from goldilocks.trl.async_trainer import _asynchronous, _sizes, check
from goldilocks.trl.on_disk import BudgetCallback
from goldilocks.trl.rows import Sections
from goldilocks.types import Failure


def sample(reward: float, group: int = 0) -> RolloutSample:
    arrays = np.array([5, 6, 7]), np.array([0, 1, 1]), np.array([0.0, -0.5, -0.25], dtype=np.float32)
    metrics = {"reward": reward, "reward_std": 0.0, "rewards/right": reward}
    return RolloutSample([{"role": "user", "content": "1+1="}], [], *arrays, 0.0, 1, group, metrics)


class Echo:
    """A worker that answers at once; every third rollout fails."""

    def __init__(self) -> None:
        self.policies = {1: 0}
        self.rollout_buffer: queue.Queue[Answer] = queue.Queue()
        self._told = 0

    def tell(self, *asked: RolloutAsk | Cancel) -> None:
        for one in asked:
            if isinstance(one, RolloutAsk):
                self._told += 1
                failed = self._told % 3 == 0
                answer = Answer(one.place, error="no answer") if failed else Answer(one.place, (sample(1.0),), 1, 2)
                self.rollout_buffer.put(answer)

    def check_health(self, stale_after_s: float) -> None: ...


class Gone(Echo):
    def check_health(self, stale_after_s: float) -> None:
        raise RuntimeError("the worker is gone")


def backend(kind: type[Echo] = Echo) -> AskedRollouts:
    return AskedRollouts(kind(), SampleRows(), seed=1, stale_after_s=1.0)  # type: ignore[arg-type]


def test_every_rollout_is_told_of_once() -> None:
    check_backend(backend, source=ListSource([f"{one}+1=" for one in range(20)]))


def test_a_worker_that_is_gone_ends_the_wait() -> None:
    waiting = backend(Gone)
    waiting._in_flight.add(("g0", 0))
    with pytest.raises(RuntimeError, match="the worker is gone"):
        list(waiting.events(0.01))


def test_a_child_that_reads_no_more_does_not_keep_the_trainer_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_rollout_worker, "is_vllm_available", lambda: True)
    worker = AskedWorker()
    worker.tell(RolloutAsk(("g" * 2**20, 0), 0, 1))  # more than the pipe holds
    pipe = os.dup(worker._asked._reader.fileno())
    worker._asked.close()
    end = threading.Thread(target=worker._asked.join_thread, daemon=True)  # what Python does before it exits
    end.start()
    end.join(timeout=10)
    ended = not end.is_alive()
    with open(pipe, "rb") as rest:
        rest.read()  # lets the thread that writes end
    assert ended


class TwoTurns(AskedLoop):
    """A child's loop whose conversations stop in their second turn."""

    def __init__(self) -> None:
        self._tasks, self._places = {}, asyncio.Semaphore(1)
        self.rollout_buffer: queue.Queue[Answer] = queue.Queue()
        self.dataset, self.tools, self._standalone_tools = [{"prompt": "1+1="}], (), ()
        self._model_version_value = SimpleNamespace(value=1)
        self.second_turn = asyncio.Event()

    async def _generate_one(self, *_: Any, **__: Any) -> Any:
        await self._generate_one_turn([1])
        self.second_turn.set()
        await asyncio.Event().wait()


async def test_a_cancelled_rollout_has_cost_the_turns_that_it_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    async def turn(*_: Any) -> Any:
        return [5, 6, 7], [-0.1, -0.2, -0.3]

    monkeypatch.setattr(async_rollout_worker._AsyncRolloutLoop, "_generate_one_turn", turn)
    loop = TwoTurns()
    loop._take(RolloutAsk(("g0", 0), 0, 1))
    await loop.second_turn.wait()
    loop._take(Cancel(("g0",)))
    await asyncio.gather(*loop._tasks.values(), return_exceptions=True)
    assert backend()._event(loop.rollout_buffer.get_nowait()) == Failure("g0", 0, CANCELLED, 3)


class Refused(TwoTurns):
    async def _rolled_out(self, ask: RolloutAsk) -> Answer:
        raise RewardFailed("the judge is busy")


def answered(loop: TwoTurns) -> Answer:
    async def main() -> Answer:
        loop._take(RolloutAsk(("g0", 0), 0, 1))
        await asyncio.gather(*loop._tasks.values())
        return loop.rollout_buffer.get_nowait()

    return asyncio.run(main())


def test_a_reward_that_must_not_fail_ends_the_run_from_the_child_too() -> None:
    assert backend()._event(answered(Refused())) == Failure("g0", 0, ENDS_THE_RUN)
    assert backend()._event(Answer(("g0", 0), error="no answer")) == Failure("g0", 0, "error")


class Judged(TwoTurns):
    async def _rolled_out(self, ask: RolloutAsk) -> Answer:
        spent.add(calls=2, retries=1, cost=0.25)
        return Answer(ask.place, (sample(1.0),), 1, 2)


def test_what_reward_functions_cost_in_the_child_is_counted_by_the_trainer() -> None:
    spent.read()
    answer = answered(Judged())
    assert spent.read() == {}  # the child's
    one = backend()
    one._event(answer)
    assert one.rewards_spent() == {"calls": 2, "retries": 1, "cost": 0.25}


def test_samples_come_back_from_disk_as_they_were() -> None:
    def same(one: RolloutSamples, other: RolloutSamples) -> bool:
        ids = [np.array_equal(a.input_ids, b.input_ids) for a, b in zip(one, other, strict=True)]
        return all(ids) and [a.metrics for a in one] == [b.metrics for b in other]

    check_rows(SampleRows, [RolloutSamples([sample(1.0)]), RolloutSamples([sample(0.0), sample(0.5)])], same=same)


def test_the_wait_for_an_updates_samples_is_part_of_its_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(driver, "time", SimpleNamespace(monotonic=lambda: clock.now))
    meter = driver.Meter(Budget(), Accounts())
    budget = BudgetCallback(Budget(), meter, None)  # type: ignore[arg-type]
    state = SimpleNamespace(global_step=1)
    callbacks: list[Any] = [budget, on_disk.RunRecord(tmp_path, {}, budget.metrics, str)]
    budget.begin()
    for clock.now, event in ((30.0, "on_step_begin"), (60.0, "on_step_end")):
        for callback in callbacks:
            getattr(callback, event)(None, state, SimpleNamespace())
    assert meter.seconds == 60
    assert [one["data"] for one in json_lines(tmp_path / "metrics.jsonl")] == [{SECONDS: 60.0}]


class OneBatch:
    """A driver that has had its batch, and saves nothing of its own."""

    collector = SimpleNamespace(step=3, owed=0)

    def save(self, folder: Path) -> None:
        folder.mkdir()
        (folder / FILE).touch()

    def load(self, folder: Path) -> None: ...


def test_samples_that_were_handed_out_and_not_trained_are_saved(tmp_path: Path) -> None:
    """TRL collates micro-batches ahead of the one that it trains."""
    micro_batches = MicroBatches()
    one = CollectedQueue(OneBatch(), SampleRows(), micro_batches)  # type: ignore[arg-type]
    assert one.next_batch == 4  # the batch in hand was trained
    one._left.extend((3, sample(float(place), group=place // 2)) for place in range(8))
    handed = [one.get() for _ in range(6)]
    micro_batches.update([handed[0].group_id, handed[1].group_id, handed[2].group_id])
    micro_batches.update([handed[3].group_id, handed[4].group_id])
    one.trained_micro_batch()
    assert one.next_batch == 3
    one.save(tmp_path / "checkpoint")
    again = CollectedQueue(OneBatch(), SampleRows(), MicroBatches())  # type: ignore[arg-type]
    again.load(tmp_path / "checkpoint")
    assert [again.get().metrics["reward"] for _ in range(5)] == [3.0, 4.0, 5.0, 6.0, 7.0]


def test_groups_of_a_run_that_goes_on_are_numbered_without_gaps(tmp_path: Path) -> None:
    """TRL looks for the first number that was not trained."""
    one = CollectedQueue(OneBatch(), SampleRows(), MicroBatches())  # type: ignore[arg-type]
    one.load(tmp_path)  # a checkpoint of TRL's own trainer, with which a collector starts anew
    assert one.qsize() == 0
    one._left.extend((3, sample(1.0, group=group)) for group in (7, 7, 7, 9, 9))
    one.save(tmp_path / "checkpoint")
    one.load(tmp_path / "checkpoint")
    assert [one.get().group_id for _ in range(5)] == [0, 0, 0, 1, 1]
    assert one._groups == 2


def test_a_sample_over_the_token_budget_is_waited_for_by_nobody(tmp_path: Path) -> None:
    """TRL drops it in front of its micro-batches, with a warning and a count."""
    micro_batches = MicroBatches()
    one = CollectedQueue(OneBatch(), SampleRows(), micro_batches)  # type: ignore[arg-type]
    one.longest = 3  # tokens, as many as a sample has here
    one._left.extend([(3, replace(sample(0.0), input_ids=np.arange(4))), (3, sample(1.0)), (4, sample(2.0, group=1))])
    assert [one.get().metrics["reward"] for _ in range(3)] == [0.0, 1.0, 2.0]
    micro_batches.update([0])
    one.trained_micro_batch()
    assert one.next_batch == 4
    one.save(tmp_path / "checkpoint")
    one.load(tmp_path / "checkpoint")
    assert [number for number, _ in one._left] == [4]


@pytest.mark.parametrize(
    ("sections", "given", "message"),
    [
        ({"batch_filter": {"enable": True}}, {}, r"batch_filter\.enable=True is not accepted: False on TRL's async"),
        ({"goldilocks": {"rewards": {"retries": 3}}}, {}, r"goldilocks\.rewards=.* is not accepted: no key on TRL"),
        ({"goldilocks": {"on_stale_weights": "error"}}, {}, r"on_stale_weights='error' is not accepted: warn"),
        ({"goldilocks": {"validate_by": ["level"]}}, {}, r"goldilocks\.validate_by=\['level'\] is not accepted: none"),
        ({"filter_groups": {"on_full": "finish"}}, {}, r"filter_groups\.on_full='finish' is not accepted: partial"),
        ({"goldilocks": {}}, {"rollout_worker": 1}, r"rollout_worker=1 is not accepted: none with a section"),
        ({"goldilocks": {}}, {"environment_factory": 1}, r"environment_factory=1 is not accepted"),
    ],
)
def test_what_cannot_be_done_is_refused_before_a_model_is_loaded(
    sections: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check(Sections(**sections), given)


PLAIN = {
    "log_completions": False,
    "max_inflight_tasks": 8,
    "num_generations": 4,
    "queue_maxsize": 1024,
    "weight_sync_steps": 1,
}


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"log_completions": True}, "log_completions=True is not accepted: False on TRL's asynchronous trainer"),
        ({"queue_maxsize": 64}, "queue_maxsize=64 is not accepted: 1024, or left out, on TRL's asynchronous trainer"),
        ({"weight_sync_steps": 5}, "weight_sync_steps=5 is not accepted: at most 4, filter_groups.max_carry_steps"),
        ({"max_staleness": 0}, "max_staleness=0 is not accepted: 1 or more on TRL's asynchronous trainer"),
    ],
)
def test_arguments_of_trls_that_would_do_nothing_are_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _asynchronous(Sections(goldilocks={}), SimpleNamespace(**{"max_staleness": 4, **PLAIN, **chosen}))


def test_an_age_that_is_no_number_is_refused_by_its_key() -> None:
    with pytest.raises(ValueError, match=r"filter_groups\.max_carry_steps='2' is not accepted: a whole number"):
        _asynchronous(Sections(filter_groups={"max_carry_steps": "2"}), SimpleNamespace(**PLAIN, max_staleness=4))


def test_the_age_that_is_asked_for_counts_whatever_trls_is() -> None:
    made = _asynchronous(Sections(filter_groups={"max_carry_steps": 2}), SimpleNamespace(**PLAIN, max_staleness=0))
    assert made.filter_groups == {"max_carry_steps": 2, "on_full": "partial"}


def test_an_update_is_of_whole_groups() -> None:
    args = SimpleNamespace(per_device_train_batch_size=6, gradient_accumulation_steps=1, num_generations=4)
    with pytest.raises(ValueError, match="processes=6 is not accepted: a multiple of num_generations=4"):
        _sizes(args, 1)
