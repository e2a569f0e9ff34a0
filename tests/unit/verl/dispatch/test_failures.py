"""Of the errors of a run's processes, the trainer names the one that came first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import transfer_queue
from transfer_queue import KVBatchMeta
from verl_world import Queue

from goldilocks.rewards import RewardFailed
from goldilocks.verl.dispatch import failures


class Processes:
    """Processes that fail at given times; what they tell is in the queue of this test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self._patch = monkeypatch
        Queue(monkeypatch)
        monkeypatch.setattr(failures.time, "time", lambda: self.now)
        self.process("driver")

    def process(self, node: str) -> None:
        """Go on as a process of another node, which has told no error yet."""
        self._patch.setattr(failures.platform, "node", lambda: node)
        self._patch.setattr(failures, "_published", False)

    def fail(self, at: float, error: BaseException) -> None:
        self.now = at
        asyncio.run(failures.publish(error))


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(monkeypatch)


@pytest.mark.parametrize("later", [None, "a", "c"], ids=["the same", "before", "behind"])
def test_the_earliest_error_is_named_whichever_process_has_it(processes: Processes, later: str | None) -> None:
    processes.process("b")
    processes.fail(1.0, LookupError("the first"))
    if later is not None:
        processes.process(later)
    processes.fail(2.0, KeyError("a later one"))
    assert failures.published_error() == "LookupError: the first"


def test_an_error_that_was_got_over_is_not_named(processes: Processes) -> None:
    processes.process("a")
    processes.fail(1.0, TimeoutError("long ago"))
    processes.process("b")
    processes.fail(2.0, TimeoutError("as long ago"))
    failures.succeeded()
    processes.fail(5.0, LookupError("the first"))
    processes.fail(6.0, KeyError("a later one"))
    assert failures.published_error(since=4.0) == "LookupError: the first"
    assert failures.published_error(since=9.0) == "TimeoutError: long ago"


def batch(*keys: str) -> KVBatchMeta:
    return KVBatchMeta(partition_id="train", keys=list(keys), tags=[{} for _ in keys])


def test_a_batch_without_rollouts_names_what_came_since_the_last_one_with_some(processes: Processes) -> None:
    batches = [batch("row"), batch()]
    sample = failures.name_first_error(lambda self: (batches.pop(0), {}))
    processes.fail(1.0, TimeoutError("long ago"))
    failures.succeeded()
    processes.now = 2.0
    assert sample(None)[0].keys == ["row"]
    processes.process("another")
    processes.fail(3.0, LookupError("the first"))
    with pytest.raises(RuntimeError, match="no rollout succeeded; the first to fail said: LookupError: the first"):
        sample(None)


def test_a_prompt_without_errors_is_a_success(processes: Processes) -> None:
    found: list[list[BaseException]] = [[TimeoutError("one")], [], [LookupError("two")]]

    async def original(tasks: list[Any]) -> list[BaseException]:
        return found.pop(0)

    settle = failures.publish_first_error(original)
    for _ in range(3):
        asyncio.run(settle([]))
    assert failures.published_error() == "LookupError: two"


def test_a_reward_that_must_not_fail_ends_a_validation_whose_other_rollouts_succeed(processes: Processes) -> None:
    async def original(tasks: list[Any]) -> list[BaseException]:
        return [LookupError("another"), RewardFailed("the judge is busy")]

    processes.fail(1.0, TimeoutError("an earlier one, which does not end the run"))
    sample = failures.name_first_error(lambda self: (batch("row"), {}))
    assert sample(None)[0].keys == ["row"]
    asyncio.run(failures.publish_first_error(original)([]))
    with pytest.raises(RuntimeError, match=r"goldilocks\.rewards\.on_failure=error: RewardFailed: the judge is busy"):
        sample(None)


def test_where_no_process_said_why_the_advice_of_verl_stays(processes: Processes) -> None:
    advice = "terminal groups with no materializable trajectories. Enable sync_refill_failed_groups"

    def raises(_buffer: Any) -> Any:
        raise RuntimeError(advice)

    sample = failures.name_first_error(raises)
    with pytest.raises(RuntimeError, match=f"^{advice}$"):
        sample(None)
    with pytest.raises(RuntimeError, match=r"no rollout succeeded; .* nothing: its worker's log has the reason"):
        failures.name_first_error(lambda self: (batch(), {}))(None)
    processes.fail(1.0, LookupError("the first"))
    with pytest.raises(RuntimeError, match="no rollout succeeded; the first to fail said: LookupError: the first"):
        sample(None)


def test_an_error_that_cannot_be_put_is_returned_and_logged_and_a_later_one_is_put(
    processes: Processes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = LookupError("the rollout's own")

    async def original(tasks: list[Any]) -> list[BaseException]:
        return [error]

    async def refuses(**_: Any) -> None:
        raise ConnectionError("no queue")

    settle = failures.publish_first_error(original)
    with monkeypatch.context() as broken:
        broken.setattr(transfer_queue, "async_kv_put", refuses)
        assert asyncio.run(settle([])) == [error]
    assert "LookupError: the rollout's own" in caplog.text
    assert "ConnectionError: no queue" in caplog.text
    assert failures.published_error() is None
    asyncio.run(settle([]))
    assert failures.published_error() == "LookupError: the rollout's own"
