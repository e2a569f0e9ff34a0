"""``benchmarks/patches.py``: each step without a speed-up is next to one with all, and is compared with such steps."""

from __future__ import annotations

import argparse
import json
from typing import Any

import patches
import pytest


def steps(*found: tuple[list[str], float, int]) -> list[Any]:
    lines = [{"off": off, "seconds": seconds, "parts": {}, "peak": peak, "asked": []} for off, seconds, peak in found]
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
    table = patches.table(steps(([], 1.0, 1), (["messages"], 1.0, 1)))
    assert table[-1].endswith("messages   not asked for: messages")


def test_the_lengths_of_a_group_have_the_mean_that_was_asked_for() -> None:
    assert patches.lengths(argparse.Namespace(length=300, spread=0.0, n=8)) == [300] * 8
    spread = patches.lengths(argparse.Namespace(length=300, spread=0.75, n=8))
    assert (spread[0], spread[-1], sum(spread) / 8) == (75, 525, 300)


def test_a_name_that_is_no_switch_is_refused() -> None:
    with pytest.raises(SystemExit, match="quicker"):
        patches.switched_off("messages+quicker")
