"""Of the errors of a run's processes, the trainer names the one that came first."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import transfer_queue

from goldilocks.verl import failures


class Table:
    """The keys and tags of verl's TransferQueue, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tags: dict[str, dict[str, dict[str, Any]]] = {}
        self._patch = monkeypatch
        self._now = 0.0
        monkeypatch.setattr(transfer_queue, "async_kv_put", self._put)
        monkeypatch.setattr(transfer_queue, "kv_list", lambda: self.tags)
        monkeypatch.setattr(failures.time, "time", lambda: self._now)
        self.process("driver")

    def process(self, node: str) -> None:
        """Go on as a process of another node, which has told no error yet."""
        self._patch.setattr(failures.platform, "node", lambda: node)
        self._patch.setattr(failures, "_told", False)

    def fail(self, at: float, error: BaseException) -> None:
        self._now = at
        asyncio.run(failures.publish(error))

    async def _put(self, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        self.tags.setdefault(partition_id, {})[key] = tag


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    return Table(monkeypatch)


def test_the_first_error_of_a_process_is_not_overwritten(table: Table) -> None:
    table.fail(1.0, LookupError("the first"))
    table.fail(2.0, KeyError("a later one"))
    assert failures.published_error() == "LookupError: the first"


def test_the_earliest_of_several_processes_is_named(table: Table) -> None:
    table.process("b")
    table.fail(1.0, LookupError("the first"))
    table.process("a")
    table.fail(2.0, KeyError("a later one"))
    assert failures.published_error() == "LookupError: the first"


def test_an_error_that_was_got_over_is_not_named(table: Table) -> None:
    table.process("a")
    table.fail(1.0, TimeoutError("long ago"))
    table.process("b")
    table.fail(2.0, TimeoutError("as long ago"))
    failures.succeeded()
    table.fail(5.0, LookupError("the first"))
    table.fail(6.0, KeyError("a later one"))
    assert failures.published_error(since=4.0) == "LookupError: the first"
    assert failures.published_error(since=9.0) == "TimeoutError: long ago"


def test_without_an_error_there_is_none(table: Table) -> None:
    assert failures.published_error() is None


class Batch:
    def __init__(self, *keys: str) -> None:
        self.keys = list(keys)


def test_a_batch_without_rollouts_names_what_came_since_the_last_one_with_some(table: Table) -> None:
    batches = [Batch("row"), Batch()]
    sample = failures.name_first_error(lambda self: (batches.pop(0), {}))
    table.fail(1.0, TimeoutError("long ago"))
    failures.succeeded()
    table._now = 2.0
    assert sample(None)[0].keys == ["row"]
    table.process("another")
    table.fail(3.0, LookupError("the first"))
    with pytest.raises(RuntimeError, match="no rollout succeeded; the first to fail said: LookupError: the first"):
        sample(None)


def test_a_prompt_without_errors_is_a_success(table: Table) -> None:
    found: list[list[BaseException]] = [[TimeoutError("one")], [], [LookupError("two")]]

    async def original(tasks: list[Any]) -> list[BaseException]:
        return found.pop(0)

    settle = failures.publish_first_error(original)
    for _ in range(3):
        asyncio.run(settle([]))
    assert failures.published_error() == "LookupError: two"
