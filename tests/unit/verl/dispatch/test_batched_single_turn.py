"""Rollouts that are made many at a time are those that verl's loop makes one by one: rows, rewards, events, charges."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transfer_queue
from ray.exceptions import RayTaskError
from verl.experimental.agent_loop import agent_loop
from verl_world import ABORTED, LIMIT, Queue, Server, VllmServer, Worker, comparable, prompt, written

from goldilocks.drive.driver import ENDS_THE_RUN
from goldilocks.engine.engine import Generation
from goldilocks.rewards import RewardFailed, spent
from goldilocks.tasks.tiny_model import character_tokenizer
from goldilocks.types import Failure, Rollout
from goldilocks.verl.dispatch.failures import published_error
from goldilocks.verl.dispatch.single_turn import AGENT

pytestmark = pytest.mark.usefixtures("queue")

TIMES = ("generate_sequences", "compute_score")  # of the metrics of a row


def drawn(request_id: str, prompt_ids: list[int], seed: int) -> Generation:
    """Tokens and log-probs that depend on prompt and seed; some are longer than the limit, some are empty."""
    chance = random.Random(f"{prompt_ids}{seed}")
    length = chance.choice([0, 1, 2, 3, LIMIT, LIMIT + 3])
    log_probs = [-chance.random() for _ in range(length)]
    tokens = [chance.randrange(5, 15) for _ in range(length - 1)] + [1] * (length > 0)
    return Generation(request_id, tokens, log_probs, [log_prob / 2 for log_prob in log_probs], "stop")


def run(prompts: list[dict[str, Any]], *servers: Server, whole: bool, **options: Any) -> list[Rollout | Failure]:
    async def main() -> list[Rollout | Failure]:
        worker = Worker(*servers, whole=whole, **options)
        await worker.start([dict(one) for one in prompts])
        return await worker.finish()

    return asyncio.run(main())


def without_times(queue: Queue) -> dict[str, dict[str, Any]]:
    """Return the rows without times."""
    rows = {}
    for key, row in queue.rows.items():
        metrics = {name: value for name, value in row["metrics"].items() if name not in TIMES}
        assert set(row["metrics"]) == {*metrics, *TIMES}
        rows[key] = {name: comparable(value) for name, value in {**row, "metrics": metrics}.items()}
    return rows


@pytest.mark.parametrize(("kind", "servers"), [(Server, 1), (Server, 2), (VllmServer, 1)])
def test_rows_and_events_are_those_of_verl(kind: type[Server], servers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt(index, n=4, first=index % 3) for index in range(6)]
    by_verl = Queue(monkeypatch)
    expected = run(prompts, *(kind(drawn) for _ in range(servers)), whole=False)
    ours = Queue(monkeypatch)
    found = run(prompts, *(kind(drawn) for _ in range(servers)), whole=True)
    assert found == expected
    assert {type(event) for event in found} == {Rollout, Failure}  # an empty answer is no rollout
    assert without_times(ours) == without_times(by_verl)
    assert ours.tags == by_verl.tags
    assert len(ours.rows) > 12


@pytest.mark.parametrize("whole", [True, False])
def test_an_answer_is_truncated_unless_its_last_allowed_token_ends_it(whole: bool) -> None:
    end = character_tokenizer().eos_token_id
    for tokens, truncated in (([5] * LIMIT, True), ([5] * (LIMIT - 1) + [end], False), ([5, 5], False)):
        (rollout,) = run([prompt(1, n=1)], Server(lambda name, *_, now=tokens: written(name, now)), whole=whole)
        assert isinstance(rollout, Rollout)
        assert (rollout.tokens, rollout.truncated) == (len(tokens), truncated)


def test_rows_have_their_own_log_probs_where_some_answers_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def some(request_id: str, prompt_ids: list[int], seed: int) -> Generation:
        made = drawn(request_id, prompt_ids, seed)
        return replace(made, log_probs=[]) if seed % 2 else made

    prompts = [prompt(index, n=4) for index in range(6)]
    by_verl = Queue(monkeypatch)
    run(prompts, Server(some), whole=False)
    ours = Queue(monkeypatch)
    run(prompts, Server(some), whole=True)
    assert len({"rollout_log_probs" in row for row in ours.rows.values()}) == 2
    assert without_times(ours) == without_times(by_verl)


@pytest.mark.parametrize("kind", [Server, VllmServer])
def test_turns_are_one_message_to_each_server_and_what_ends_together_one_put(kind: type[Server], queue: Queue) -> None:
    servers = [kind(drawn), kind(drawn)]
    run([prompt(index, n=8) for index in range(4)], *servers, whole=True)
    assert [server.messages for server in servers] == [[16], [16]]
    assert len(queue.puts) <= 2


BUSY = """
import itertools
calls = itertools.count(1)

def compute_score(data_source, solution_str, ground_truth, extra_info=None, patience=1):
    if next(calls) % 2 < patience:  # every second call of a process
        raise ConnectionError("the judge is busy")
    return 0.5
"""


@pytest.mark.parametrize("whole", [True, False])
async def test_several_rewards_are_the_rollouts_metrics_and_the_worker_reports_their_calls(
    whole: bool, tmp_path: Path
) -> None:
    spent.read()  # another test's
    (tmp_path / "judge.py").write_text(BUSY)
    functions = {"answer": {}, "judge": {"path": str(tmp_path / "judge.py"), "weight": 0.1}}
    rewards = {"functions": functions, "retries": 9, "backoff": 0.0, "concurrency": 2}
    worker = Worker(Server(drawn), whole=whole, rewards=rewards)
    await worker.start([prompt(1, n=8)])
    events, report = await worker.finish(), await worker.drained(0.0)
    rollouts = [event for event in events if isinstance(event, Rollout)]
    assert {one.metrics["judge"] for one in rollouts} == {0.5}
    assert all(one.reward == pytest.approx(one.metrics["answer"] + 0.05) for one in rollouts)
    assert report.rewards["calls"] == 2 * len(rollouts) + report.rewards["retries"] > 2 * len(rollouts)


def test_a_reward_that_must_not_fail_is_reported_as_what_ends_the_run(queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(BUSY)
    functions = {"judge": {"path": str(tmp_path / "judge.py"), "reward_kwargs": {"patience": 9}}}
    events = run([prompt(1, n=4)], Server(drawn), whole=True, rewards={"functions": functions, "on_failure": "error"})
    assert {event.reason for event in events if isinstance(event, Failure)} >= {ENDS_THE_RUN}
    assert not [event for event in events if isinstance(event, Rollout)]
    assert queue.rows == {}


async def test_a_reward_that_failed_in_a_process_of_rays_ends_the_run_too() -> None:
    raised = RayTaskError("compute_score", "Traceback", RewardFailed("the judge is busy")).as_instanceof_cause()
    worker = Worker(Server(drawn), whole=False)
    await worker.report_error(worker.llm_client.begin("p", 0), raised)
    assert [event.reason for event in await worker.events()] == [ENDS_THE_RUN]


def test_other_agent_loops_are_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(drawn)
    registry = agent_loop._agent_loop_registry
    monkeypatch.setitem(registry, "own", registry[AGENT])
    told = run([prompt(0, n=3, agent_name="own"), prompt(1, n=2)], server, whole=True)
    assert (server.messages, len(server.prompts)) == ([2], 5)
    assert len(told) == 5


@pytest.mark.parametrize("whole", [True, False])
async def test_cancelled_sessions_are_aborted_and_charged_to_their_step_and_the_drain_waits(
    whole: bool, queue: Queue
) -> None:
    server = Server()
    worker = Worker(server, whole=whole)
    await worker.start([prompt(0, n=2), prompt(1, n=1)])
    await server.holds(3)
    drained = asyncio.create_task(worker.drained(within=60))
    await worker.cancel(["g0"])
    await asyncio.sleep(0.01)
    assert not drained.done()  # one is still at the server
    server.answer(next(iter(server.held)), [7, 8, 1])
    assert (await drained)[:4] == (0, 2, 2, 2 * len(ABORTED))
    charged = (await worker.so_far(False)).events
    *cancelled, kept = sorted([*charged, *await worker.finish()], key=lambda event: (event.uid, event.index))
    assert all(event in charged for event in cancelled)
    assert cancelled == [Failure("g0", index, "cancelled", len(ABORTED)) for index in range(2)]
    assert (kept.uid, kept.tokens) == ("g1", 3)
    assert list(queue.rows) == ["g1_0_0"]


async def test_a_group_that_is_cancelled_before_it_is_sent_costs_nothing() -> None:
    server = Server(drawn)
    worker = Worker(server, whole=True)
    worker.llm_client.begin("g0", 9)  # a sibling that runs: else nobody knows the group
    await worker.start([prompt(0, n=2)])
    await worker.cancel(["g0"])
    assert await worker.finish() == [Failure("g0", 0, "cancelled", 0), Failure("g0", 1, "cancelled", 0)]
    assert server.messages == []


def test_a_refused_request_fails_alone() -> None:

    def refused(request_id: str, prompt_ids: list[int], seed: int) -> Generation:
        if len(prompt_ids) > 6:
            raise ValueError("a prompt of 8 tokens leaves no room")
        return written(request_id, [7, 1])

    short, long = run([prompt(3, n=1), prompt(44, n=1)], Server(refused), whole=True)
    assert isinstance(short, Rollout)
    assert long == Failure("g44", 0, "ValueError", 0)


def test_without_a_server_every_rollout_fails_with_the_balancers_words() -> None:
    assert run([prompt(0, n=2)], whole=True) == [Failure("g0", index, "RuntimeError", 0) for index in range(2)]


def test_a_prompt_that_cannot_be_rendered_fails_alone() -> None:
    broken = prompt(1, n=2, raw_prompt=None)
    good, *bad = run([prompt(0, n=1), broken], Server(lambda one, ids, seed: written(one, [7])), whole=True)
    assert isinstance(good, Rollout)
    assert [(event.uid, event.index, event.tokens) for event in bad] == [("g1", 0, 0), ("g1", 1, 0)]


@pytest.mark.parametrize("whole", [True, False])
def test_a_rollout_whose_reward_function_raises_is_charged_all_its_tokens_and_its_siblings_are_kept(
    whole: bool, queue: Queue, tmp_path: Any
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if extra_info['index'] == 1:\n"
        "        raise LookupError('the answer sheet is missing')\n"
        "    return {'score': 1.0, 'acc': True}\n"
    )
    server = Server(lambda one, ids, seed: written(one, [7] * 500))
    good, bad = run([prompt(0, n=1), prompt(1, n=1)], server, whole=whole, reward=str(reward))
    assert (good.reward, good.metrics) == (1.0, {"score": 1.0, "acc": 1.0})
    assert bad == Failure("g1", 0, "LookupError", 500)
    assert "the answer sheet is missing" in str(published_error())
    assert list(queue.rows) == ["g0_0_0"]


def test_a_queue_that_fails_fails_the_rollouts_it_did_not_store(monkeypatch: pytest.MonkeyPatch) -> None:

    async def full(**_: Any) -> None:
        raise OSError("storage capacity exceeded")

    monkeypatch.setattr(transfer_queue, "async_kv_batch_put", full)
    told = run([prompt(0, n=1)], Server(lambda one, ids, seed: written(one, [7])), whole=True)
    assert told == [Failure("g0", 0, "OSError", 1)]
