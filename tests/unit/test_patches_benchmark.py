"""``benchmarks/patches.py``: each step without a speed-up is next to one with all, and is compared with such steps."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import patches
import pytest
import switched_patches as switches


def steps(*found: tuple[list[str], float, int]) -> list[Any]:
    rest = {"parts": {}, "written": 5, "trained": 4, "asked": []}
    lines = [{"off": off, "seconds": seconds, "peak": peak} | rest for off, seconds, peak in found]
    return [patches.Step.of(json.dumps(line)) for line in lines]


def test_every_case_is_next_to_a_step_with_all() -> None:
    cases = [patches.switched_off(case) for case in patches.CASES]
    plan = patches.schedule(cases, rounds=2, seed=0)[len(patches.WARM_UP) :]
    assert sorted(step for step in plan if step) == sorted(cases * 2)
    assert all([] in (plan[place - 1], plan[place + 1]) for place, step in enumerate(plan) if step)


def test_a_step_is_compared_with_the_steps_with_all_before_and_after_it() -> None:
    found = steps(([], 1.0, 10), (["messages"], 3.0, 30), (["log-probs"], 4.0, 20), ([], 2.0, 10))
    assert patches.ratios(found, "messages", "seconds") == [2.0]
    assert patches.ratios(found, "log-probs", "peak") == [2.0]


def test_what_no_process_asked_for_is_named() -> None:
    assert patches.table(steps(([], 1.0, 1), (["messages"], 1.0, 1)))[-1].endswith("messages   not asked for: messages")


async def test_a_worker_finds_the_switches_of_what_is_no_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

    from goldilocks.verl.dispatch import client

    class Server:
        class generate:
            @staticmethod
            async def remote(request_id: str, **asked: Any) -> Any:
                return asked["prompt_ids"]

    base = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    monkeypatch.setattr(base, "__init__", lambda self: None)
    monkeypatch.setattr(client, "exchanged", client.exchanged)  # given back at the end
    (tmp_path / "board").write_bytes(bytes(switches.Board.SIZE))
    board = switches.Board(str(tmp_path / "board"))
    switches._switch_in_workers(board)
    ours = type("Worker", (base,), {})()
    ours.single_turn = made = SimpleNamespace()
    assert ours.single_turn is made
    board.set([switches.SINGLE_TURN, switches.MESSAGES])
    assert ours.single_turn is None
    answers = [one async for part in client.exchanged(Server, [("a", [1], {}), ("b", [2], {})]) for one in part]
    assert sorted(answers) == [("a", [1]), ("b", [2])]
    assert board.asked == sorted([switches.SINGLE_TURN, switches.MESSAGES], key=switches.NAMES.index)
