"""Reward functions that take long and fail: tried again, so many at a time, summed, and paid for in the accounts."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from goldilocks.config.sections import RewardCalls, reward_calls
from goldilocks.rewards import RewardFailed, judge, spent
from goldilocks.rewards.calls import (
    VERLS_OWN,
    RewardCaller,
    compute_score,
    guard,
    guard_if_asked,
    guarded,
    weighted_sum,
)


@pytest.fixture(autouse=True)
def nothing_spent() -> None:
    spent.read()


def caller(function: Callable[..., Any], **calls: Any) -> RewardCaller:
    return RewardCaller("judge", function, (), RewardCalls(**{"backoff": 0.0, **calls}))


def several(functions: dict[str, tuple[Callable[..., Any], float]], **calls: Any) -> Any:
    parts = {name: (caller(function, **calls), weight) for name, (function, weight) in functions.items()}
    return partial(weighted_sum, parts)


def failing(times: int, result: Any) -> Callable[..., Any]:
    """A judge that raises so many times, then answers."""
    left = [times]

    def function(**_: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise ConnectionError("the judge is busy")
        return result

    return function


def test_a_judge_that_fails_is_asked_again_and_each_call_is_counted() -> None:
    assert asyncio.run(caller(failing(2, {"score": 0.7, "cost": 0.01}), retries=2)()) == {"score": 0.7, "cost": 0.01}
    counted = spent.read()
    assert counted.pop("seconds") > 0
    assert counted == {"calls": 3, "retries": 2, "cost": 0.01}
    assert spent.read() == {}


@pytest.mark.parametrize("result", [math.nan, None, "9/10", {"acc": 1.0}])
def test_a_result_without_a_finite_score_is_a_failure(result: Any) -> None:
    with pytest.raises(ValueError, match=r"the result of the reward judge=.* a finite number"):
        asyncio.run(caller(lambda: result, retries=1)())
    assert spent.read()["calls"] == 2


def test_without_the_section_a_score_that_is_not_finite_is_the_collectors_to_judge_and_nothing_is_counted() -> None:
    def without(result: Any) -> Any:
        return asyncio.run(RewardCaller("own", lambda: result, (), RewardCalls())())

    assert math.isnan(without(math.nan))
    with pytest.raises(ValueError, match=r"the result of the reward own=None is not accepted: a finite number"):
        without(None)
    assert spent.read() == {}


def test_what_becomes_of_the_last_failure_is_a_setting() -> None:
    with pytest.raises(ConnectionError):
        asyncio.run(caller(failing(2, 1.0), retries=1)())
    with pytest.raises(RewardFailed, match="failed 2 times, the last time with ConnectionError"):
        asyncio.run(caller(failing(2, 1.0), retries=1, on_failure="error")())
    assert asyncio.run(caller(failing(2, 1.0), retries=1, on_failure="zero")()) == 0.0
    assert spent.read()["failures"] == 3


def test_a_score_of_zero_has_nothing_of_another_answer() -> None:
    numbers = {"score": np.float32(0.4), "acc": np.bool_(True), "length": np.array(7), "tries": 2}
    results = iter([{**numbers, "why": "short", "parts": [1.0]}, None])
    call = caller(lambda: next(results), on_failure="zero")
    zero = [asyncio.run(call()), asyncio.run(call())][1]
    assert zero == {**dict.fromkeys(numbers, 0.0), "why": None, "parts": None}
    assert {type(zero[name]) for name in numbers} == {float}


async def test_no_more_calls_than_allowed_are_in_flight_and_waiting_is_not_a_calls_time() -> None:
    running, most = 0, 0

    async def slow() -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        for _ in range(5):
            await asyncio.sleep(0)
        running -= 1
        return 1.0

    call = caller(slow, concurrency=3)
    assert await asyncio.gather(*(call() for _ in range(20))) == [1.0] * 20
    assert most == 3


async def test_plain_functions_that_wait_for_each_other_run_at_the_same_time() -> None:
    meeting = threading.Barrier(8)

    def waits() -> float:
        return float(meeting.wait(60.0) >= 0)

    call = caller(waits, concurrency=8)
    assert await asyncio.gather(*(call() for _ in range(16))) == [1.0] * 16


async def test_a_call_that_waits_for_its_next_try_holds_no_place() -> None:
    async def one_fails(fails: bool) -> float:
        if fails:
            raise ConnectionError
        return 1.0

    call = caller(one_fails, concurrency=1, retries=1, backoff=3600.0)
    waiting = asyncio.create_task(call(fails=True))
    while "retries" not in spent.read():
        await asyncio.sleep(0)
    assert await call(fails=False) == 1.0
    waiting.cancel()


def test_several_rewards_are_their_weighted_sum_and_each_keeps_its_name() -> None:
    call = several({"answer": (lambda: {"score": 1.0, "acc": 1.0}, 1.0), "brevity": (lambda: -0.5, 0.2)})
    assert asyncio.run(call()) == {"answer": 1.0, "brevity": -0.5, "acc": 1.0, "score": pytest.approx(0.9)}


def test_of_several_rewards_one_that_fails_is_zero_or_fails_the_answer() -> None:
    functions = {"answer": (lambda: 1.0, 1.0), "judge": (failing(9, 1.0), 0.5)}
    assert asyncio.run(several(functions, on_failure="zero")()) == {"answer": 1.0, "judge": 0.0, "score": 1.0}
    with pytest.raises(ConnectionError):
        asyncio.run(several(functions)())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"retries": "3"}, r"goldilocks\.rewards\.retries='3' is not accepted: a whole number"),
        ({"concurrency": 1.5}, r"goldilocks\.rewards\.concurrency=1\.5 is not accepted: a whole number"),
        ({"retries": -1}, r"goldilocks\.rewards\.retries=-1 is not accepted: 0 or more"),
        ({"concurrency": 0}, r"goldilocks\.rewards\.concurrency=0 is not accepted: 1 or more"),
        ({"timeout": 0.0}, r"goldilocks\.rewards\.timeout=0\.0 is not accepted: above 0"),
        ({"on_failure": "skip"}, r"goldilocks\.rewards\.on_failure='skip' .* fail, zero, error"),
        ({"functions": {"score": {}}}, r"functions='score' is not accepted: another name"),
        ({"functions": {"a": {"wieght": 2}}}, r"functions\.a\.wieght is not a key \(did you mean 'weight'\?\)"),
        ({"functions": {"a": {"weight": "2"}}}, r"functions\.a\.weight='2' is not accepted: a number"),
        ({"functions": {"a": {"weight": math.inf}}}, r"functions\.a\.weight=inf is not accepted: a finite number"),
    ],
)
def test_bad_keys_are_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reward_calls({"goldilocks": {"rewards": given}})


def test_trl_is_given_a_function_of_whole_batches() -> None:
    async def ask(completion: str, answer: str, **_: Any) -> float:
        if completion == "?":
            raise ConnectionError
        return float(completion == answer)

    reward = judge(ask, retries=1, backoff=0.0)
    found = asyncio.run(reward(["3", "4", "?"], answer=["3", "5", "6"], trainer_state=object()))
    assert (reward.__name__, found) == ("ask", [1.0, 0.0, None])
    assert spent.read()["calls"] == 4


def test_judge_names_a_key_that_is_none_and_fewer_calls_at_a_time_than_workers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"goldilocks\.rewards\.retry is not a key \(did you mean 'retries'\?\)"):
        judge(len, retry=3)
    with pytest.raises(ValueError, match=r"goldilocks\.rewards\.concurrency=3 is not accepted: 8 or more"):
        guarded({"path": "reward.py", "name": "compute_score"}, RewardCalls(concurrency=3), workers=8)


class AskingObject:
    async def __call__(self, completion: str, answer: Any, **_: Any) -> float:
        return float(completion == answer)


@pytest.mark.parametrize("function", [AskingObject(), partial(AskingObject())])
def test_an_object_may_be_called_as_a_coroutine_function_and_a_column_be_an_array(function: Any) -> None:
    assert asyncio.run(judge(function)(["3", "4"], answer=np.array(["3", "5"]), step=np.array(7))) == [1.0, 0.0]


def test_a_spawned_process_can_be_sent_a_judge() -> None:
    sent = judge(AskingObject(), retries=1)
    assert asyncio.run(sent(["3"], answer=["3"])) == [1.0]  # its event loop does not go along
    reward = pickle.loads(pickle.dumps(sent))
    assert reward.__name__ == "AskingObject"
    assert inspect.iscoroutinefunction(reward)
    assert asyncio.run(reward(["3", "4"], answer=["3", "5"])) == [1.0, 0.0]


SCRIPT = """
import asyncio, multiprocessing
from goldilocks.rewards import judge

def grade(completion, answer):
    return float(completion == answer)

def in_child(reward):
    print(asyncio.run(reward(["3", "4"], answer=["3", "5"])))

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=in_child, args=[judge(grade)])
    child.start()
    child.join()
"""


def test_a_script_sends_a_judge_of_its_own_function_to_a_spawned_process(tmp_path: Path) -> None:
    """There the script is a module that no third process can import."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, tmp_path / "train.py"], capture_output=True, text=True, check=False)
    assert done.stdout == "[1.0, 0.0]\n", done.stderr


LENGTH = """
def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0):
    if solution_str == "raise":
        raise LookupError("no such answer")
    return len(solution_str) + bonus
"""


def test_a_section_of_rewards_is_called_by_verl_as_one_function(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(LENGTH)
    functions = {"length": {"weight": 2.0}, "bonus": {"path": str(path), "reward_kwargs": {"bonus": 10}, "weight": 0.5}}
    config = OmegaConf.create(
        {
            "reward": {"custom_reward_function": {"path": str(path), "name": "compute_score"}, "num_workers": 1},
            "actor_rollout_ref": {"rollout": {"agent": {"num_workers": 2}}},
            "goldilocks": {"rewards": {"functions": functions, "concurrency": 5, "retries": 1, "backoff": 0.0}},
        }
    )
    guard_if_asked(config)
    reward = OmegaConf.to_container(config.reward.custom_reward_function)
    assert isinstance(reward, dict)
    assert json.loads(reward["reward_kwargs"]["packed"])[1]["concurrency"] == 2  # of each worker
    guard_if_asked(config)  # a run that goes on has it already
    assert config.reward.custom_reward_function == reward
    arguments = {"data_source": "d", "solution_str": "abc", "ground_truth": "", "extra_info": {}}
    found = asyncio.run(compute_score(**reward["reward_kwargs"], **arguments))
    assert found == {"length": 3, "bonus": 13, "score": 2 * 3 + 0.5 * 13}
    with pytest.raises(LookupError):
        asyncio.run(compute_score(**reward["reward_kwargs"], **{**arguments, "solution_str": "raise"}))
    assert spent.read()["calls"] == 2 + 4


@pytest.mark.parametrize(
    ("path", "is_guarded"), [("pkg://goldilocks.tasks.registry", True), ("reward.py", False), (None, False)]
)
def test_on_verls_own_command_line_only_our_tasks_have_a_limit_unasked(path: str | None, is_guarded: bool) -> None:
    reward = {"custom_reward_function": {"path": path, "name": "compute_score"}, "num_workers": 1}
    agents = {"rollout": {"agent": {"num_workers": 1}}}
    config = OmegaConf.create({"reward": reward, "actor_rollout_ref": agents, "goldilocks": {}})
    guard_if_asked(config)
    assert (config.reward.custom_reward_function.path != path) is is_guarded


@pytest.mark.parametrize(("calls", "is_guarded"), [({}, False), ({"timeout": 20.0}, True)])
def test_verls_default_grader_has_a_limit_only_where_a_key_of_the_section_is_set(
    calls: dict[str, Any], is_guarded: bool
) -> None:
    reward = {"custom_reward_function": {"path": None, "name": "compute_score"}, "num_workers": 1}
    agents = {"rollout": {"agent": {"num_workers": 1}}}
    config = OmegaConf.create({"reward": reward, "actor_rollout_ref": agents, "goldilocks": {"rewards": calls}})
    guard(config)
    packed = (config.reward.custom_reward_function.get("reward_kwargs") or {}).get("packed", "[null]")
    assert json.loads(packed)[0] == (VERLS_OWN if is_guarded else None)
