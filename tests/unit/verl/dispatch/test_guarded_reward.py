"""A reward function that hangs fails its call; the others go on, in threads that are used again."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from goldilocks.rewards import RewardCalls
from goldilocks.verl.dispatch.guarded_reward import called, compute_reward, compute_score, guard_if_asked, guarded

PATIENT, HASTY = 60.0, 0.2  # time limits: beyond what a busy machine needs, and of a call that hangs
FUNCTION = """
import threading

def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0):
    if solution_str == "hang":
        threading.Event().wait(600)
    if solution_str == "raise":
        raise LookupError("no such answer")
    return {"score": len(solution_str) + bonus, "thread": threading.get_ident()}
"""


@pytest.fixture
def function(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "reward.py"
    path.write_text(FUNCTION)
    config = guarded({"path": str(path), "name": "compute_score", "reward_kwargs": {"bonus": 10}})
    return dict(config["reward_kwargs"])


async def score(function: dict[str, Any], answer: str, timeout_s: float = PATIENT) -> Any:
    limited = {**function, "timeout_s": timeout_s}
    return await compute_score(data_source="d", solution_str=answer, ground_truth="", extra_info={}, **limited)


def test_results_and_errors_are_the_functions_own(function: dict[str, Any]) -> None:
    async def main() -> list[Any]:
        return await asyncio.gather(*(score(function, text) for text in ("a", "raise", "abc")), return_exceptions=True)

    short, error, long = asyncio.run(main())
    assert (short["score"], long["score"]) == (11, 13)
    assert isinstance(error, LookupError)


def _threads() -> int:
    return sum(thread.name == "reward" for thread in threading.enumerate())


def test_calls_one_after_another_start_one_thread_at_most(function: dict[str, Any]) -> None:
    async def main() -> list[int]:
        return [(await score(function, "a"))["score"] for _ in range(20)]

    before = _threads()
    assert asyncio.run(main()) == [11] * 20
    assert _threads() <= before + 1


def test_a_call_that_hangs_is_named_and_its_thread_is_not_used_again(function: dict[str, Any]) -> None:
    async def main() -> list[Any]:
        with pytest.raises(RuntimeError, match=r"compute_score of .*reward\.py did not return within 0\.2 s"):
            await score(function, "hang", HASTY)
        return await asyncio.gather(*(score(function, "a" * length) for length in range(1, 60)))

    assert [one["score"] for one in asyncio.run(main())] == [10 + length for length in range(1, 60)]
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "reward")


def test_a_section_of_rewards_is_called_by_verl_as_one_function(tmp_path: Path) -> None:
    path = tmp_path / "reward.py"
    path.write_text(FUNCTION)
    functions = {"length": {"weight": 2.0}, "bonus": {"path": str(path), "reward_kwargs": {"bonus": 10}, "weight": 0.5}}
    config = OmegaConf.create(
        {
            "reward": {"custom_reward_function": {"path": str(path), "name": "compute_score"}, "num_workers": 1},
            "actor_rollout_ref": {"rollout": {"agent": {"num_workers": 2}}},
            "goldilocks": {"rewards": {"functions": functions, "concurrency": 5, "retries": 1, "backoff": 0.0}},
        }
    )
    guard_if_asked(config)
    guard_if_asked(config)  # a run that goes on has it already
    reward = config.reward.custom_reward_function
    assert (reward.name, reward.reward_kwargs.calls.concurrency) == ("compute_reward", 2)  # of each worker
    arguments = {"data_source": "d", "solution_str": "abc", "ground_truth": "", "extra_info": {}}
    found = asyncio.run(compute_reward(**reward.reward_kwargs, **arguments))
    assert (found["length"], found["bonus"], found["score"]) == (3, 13, 2 * 3 + 0.5 * 13)
    with pytest.raises(LookupError):
        asyncio.run(compute_reward(**reward.reward_kwargs, **{**arguments, "solution_str": "raise"}))


def test_fewer_calls_at_a_time_than_workers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"goldilocks\.rewards\.concurrency=3 is not accepted: 8 or more"):
        called({"path": "reward.py", "name": "compute_score"}, RewardCalls(concurrency=3), workers=8)
