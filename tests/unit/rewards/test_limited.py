"""A reward function's time limit holds whatever the function does, and what it returns or raises arrives as it is."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from goldilocks.config.sections import RewardCalls
from goldilocks.rewards import RewardTimeout, judge
from goldilocks.rewards.calls import compute_score, guarded
from goldilocks.rewards.limited import Places

HASTY = 2.0  # the time limit of a call that hangs: beyond what a busy machine needs for one that does not
FUNCTION = """
import os, signal, sys, threading, time

class OfTwo(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")

def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0):
    match solution_str:
        case "first" | "second":  # each waits for the other
            with open(f"{__file__}.{solution_str}", "w"):
                while not all(os.path.exists(f"{__file__}.{name}") for name in ("first", "second")):
                    time.sleep(0.01)
        case "hang":
            threading.Event().wait()
        case "compute":
            print(7 ** 10**9)  # minutes in which no other thread of the process runs
        case "raise":
            raise LookupError("no such answer")
        case "raise of two":
            raise OfTwo("this", "that")
        case "exit":
            sys.exit(3)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            next(iter([]))
        case "lambda":
            return {"score": 1.0, "why": lambda: None}
    return {"score": len(solution_str) + bonus, "process": os.getpid()}
"""


@pytest.fixture
def scored(tmp_path: Path) -> Callable[..., Any]:
    path = tmp_path / "reward.py"
    path.write_text(FUNCTION)
    own = {"path": str(path), "name": "compute_score", "reward_kwargs": {"bonus": 10}}

    def score(answer: str, timeout_s: float = 60.0, **calls: Any) -> Any:
        packed = guarded(own, RewardCalls(**calls), timeout_s)["reward_kwargs"]
        return compute_score(**packed, data_source="d", solution_str=answer, ground_truth="", extra_info={})

    return score


def outcomes(*calls: Any) -> list[Any]:
    async def main() -> list[Any]:
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(main())


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_results_and_errors_are_the_functions_own(scored: Callable[..., Any]) -> None:
    short, error, long = outcomes(scored("a"), scored("raise"), scored("abc"))
    assert (short["score"], long["score"]) == (11, 13)
    assert isinstance(error, LookupError)
    assert str(error) == "no such answer"
    assert "in compute_score" in error.__notes__[0]  # the traceback of its process


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("raise of two", "OfTwo: this and that"),
        ("exit", r"the reward function raised SystemExit\(3\)"),
        ("die", "the process of a reward function ended with -9"),
        ("stop", "StopIteration"),
        ("lambda", r"the result \{'score': 1\.0, 'why': <function .* cannot be sent: "),
    ],
)
async def test_what_cannot_be_sent_from_a_process_is_said_in_words_and_the_next_call_is_well(
    scored: Callable[..., Any], answer: str, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        await scored(answer, concurrency=1)
    assert (await scored("a", concurrency=1))["score"] == 11


@pytest.mark.parametrize("answer", ["hang", "compute"])
async def test_a_call_that_takes_too_long_is_ended_with_its_process_and_another_takes_its_place(
    scored: Callable[..., Any], answer: str
) -> None:
    limits: dict[str, Any] = {"timeout_s": HASTY, "concurrency": 1}
    before = (await scored("a", **limits))["process"]
    with pytest.raises(RewardTimeout, match=r"compute_score of .*reward\.py did not return within 2 s"):
        await scored(answer, **limits)
    assert (await scored("a", **limits))["process"] != before != os.getpid()
    assert is_gone(before)


def test_a_call_that_computes_takes_no_time_from_the_others(scored: Callable[..., Any]) -> None:
    first, *others = outcomes(scored("compute", HASTY), *(scored("a" * length) for length in range(1, 60)))
    assert isinstance(first, RewardTimeout)
    assert [one["score"] for one in others] == [10 + length for length in range(1, 60)]


def test_a_call_that_has_waited_has_another_process(scored: Callable[..., Any]) -> None:
    first, second = outcomes(scored("first"), scored("second"))
    assert (first["score"], second["score"]) == (15, 16)
    assert first["process"] != second["process"]


def test_the_factorial_in_an_answer_to_gsm8k_does_not_outlast_its_time() -> None:
    own = {"path": "pkg://goldilocks.tasks.registry", "name": "compute_score"}
    row = {"data_source": "openai/gsm8k", "ground_truth": "42", "extra_info": {}}
    limited, patient = (guarded(own, timeout_s=limit)["reward_kwargs"] for limit in (HASTY, 60.0))
    late = compute_score(**limited, **row, solution_str="#### $9999999!$")
    found = outcomes(late, compute_score(**patient, **row, solution_str="#### 42!"))
    assert isinstance(found[0], RewardTimeout)
    assert found[1] == {"score": 1.0, "acc": 1.0}


def test_what_only_compares_texts_is_graded_at_once_and_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    packed = guarded({"path": "pkg://goldilocks.tasks.registry", "name": "compute_score"})["reward_kwargs"]
    row = {"data_source": "goldilocks/arithmetic", "solution_str": "3", "ground_truth": "3", "extra_info": {}}
    assert outcomes(compute_score(**packed, **row)) == [{"score": 1.0, "acc": 1.0}]


def test_a_coroutine_functions_own_timeout_is_its_error_and_no_time_limit() -> None:
    async def ask() -> float:
        try:
            raise ConnectionError("closed")
        except ConnectionError as error:
            raise TimeoutError("the judge closed the connection after 2 s") from error

    async def slow() -> float:
        await asyncio.sleep(3600)
        return 1.0

    own, ours = outcomes(judge(ask)._reward(), judge(slow, timeout=0.05)._reward())
    assert isinstance(own, TimeoutError)
    assert str(own) == "the judge closed the connection after 2 s"
    assert isinstance(own.__cause__, ConnectionError)
    assert isinstance(ours, RewardTimeout)


def test_a_closure_has_a_thread_and_that_its_limit_is_weaker_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    judged, begun = threading.Event(), []

    def closure(completion: str, **_: Any) -> float:
        begun.append(completion)
        return float(completion == "right" or judged.wait())

    reward = judge(closure, timeout=HASTY)
    try:
        with caplog.at_level(logging.WARNING):
            assert asyncio.run(reward(["right", "hang", "right"])) == [1.0, None, 1.0]
    finally:
        judged.set()
    assert sorted(begun) == ["hang", "right", "right"]
    assert caplog.text.count("the reward closure runs in a thread: other processes cannot import it") == 1
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "reward")


def says_where(completion: Any, **_: Any) -> float:
    return float(os.getpid())


def test_an_answer_that_cannot_be_sent_is_graded_in_a_thread(caplog: pytest.LogCaptureFixture) -> None:
    reward = judge(says_where)
    with caplog.at_level(logging.WARNING):
        sent, kept = asyncio.run(reward(["text", threading.Lock()]))
    assert sent != os.getpid() == kept
    assert "says_where runs in a thread: its arguments cannot be sent to another process" in caplog.text


def test_a_process_ends_with_the_one_that_started_it_even_in_the_midst_of_a_call(tmp_path: Path) -> None:
    writes = "open(__file__ + '.pid', 'w').write(str(os.getpid()))"
    function, pid = tmp_path / "reward.py", tmp_path / "reward.py.pid"
    function.write_text(f"import os\n\ndef compute_score(**_):\n    {writes}\n    7 ** 10**9\n")
    script = "import asyncio, sys\nfrom goldilocks.rewards.calls import compute_score, guarded\n"
    script += "own = {'path': sys.argv[1], 'name': 'compute_score'}\n"
    script += "asyncio.run(compute_score(**guarded(own)['reward_kwargs']))\n"
    parent = subprocess.Popen([sys.executable, "-c", script, str(function)])
    try:
        while not (text := pid.read_text() if pid.exists() else ""):
            assert parent.poll() is None
            time.sleep(0.05)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 60
    while not is_gone(int(text)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_processes_end_with_the_event_loop_that_asked_them(scored: Callable[..., Any]) -> None:
    (first,) = outcomes(scored("a"))
    (second,) = outcomes(scored("a"))
    assert first["process"] != second["process"]
    assert is_gone(first["process"])


def test_a_function_that_is_not_there_is_named() -> None:
    with pytest.raises(AttributeError, match="no_such"):
        asyncio.run(Places(1, 1).start("pkg://goldilocks.tasks.registry", "no_such"))
