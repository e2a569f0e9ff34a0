"""verl's reward function under TRL: one grade for each answer, whatever it returns, within its time."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from goldilocks.config.sections import reward_calls
from goldilocks.launch.on_trl import Grader
from goldilocks.rewards.calls import guarded

FUNCTION = """
import numpy as np
import threading

def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0):
    with open(__file__ + ".calls", "a") as calls:
        calls.write(solution_str + " ")
    right = float(solution_str == ground_truth)
    if solution_str == "hang":
        threading.Event().wait(30)
    if solution_str == "number":
        return 0.5
    if solution_str == "no acc":
        return {"score": right + bonus, "format": np.float32(0.25), "said": "well"}
    if solution_str == "no score":
        return {"acc": 1.0}
    return {"score": right + bonus, "acc": right}
"""


def grader(tmp_path: Path, timeout_s: float | None = None) -> Grader:
    file = tmp_path / "reward.py"
    file.write_text(FUNCTION)
    section: dict[str, Any] = {"path": str(file), "name": "compute_score", "reward_kwargs": {"bonus": 10}}
    return Grader(OmegaConf.create(section if timeout_s is None else guarded(section, timeout_s=timeout_s)))


def graded(of: Grader, answers: list[str], *names: str) -> list[list[float | None]]:
    """Ask for each value, as TRL asks its reward functions: with the same lists."""
    completions = [[{"role": "assistant", "content": answer}] for answer in answers]
    columns = {"data_source": ["d"] * len(answers), "reward_model": [{"ground_truth": "2"}] * len(answers)}
    return [of.value(name)(completions=completions, **columns) for name in names]


@pytest.mark.parametrize("timeout_s", [None, 20.0], ids=["plain", "guarded"])
def test_every_answer_is_graded_once(timeout_s: float | None, tmp_path: Path) -> None:
    of = grader(tmp_path, timeout_s)
    assert graded(of, ["2", "3"], "score", "acc") == [[11.0, 10.0], [1.0, 0.0]]
    assert graded(of, ["2", "3"], "score") == [[11.0, 10.0]]  # another batch, though its answers are the same
    assert sorted((tmp_path / "reward.py.calls").read_text().split()) == ["2", "2", "3", "3"]


def test_a_value_that_the_function_did_not_return_does_not_apply(tmp_path: Path) -> None:
    found = graded(grader(tmp_path), ["no acc", "number", "2"], "score", "acc", "format", "said")
    assert found == [[10.0, 0.5, 11.0], [None, 0.5, 1.0], [0.25, None, None], [None, None, None]]


def test_a_score_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"reward\.py=\{'acc': 1\.0\} is not accepted: a finite number, .* 'score'"):
        graded(grader(tmp_path), ["no score"], "score")


def test_an_answer_that_takes_too_long_to_grade_has_no_reward_and_the_others_have_theirs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        scores, accuracies = graded(grader(tmp_path, timeout_s=3.0), ["hang", *["2"] * 100], "score", "acc")
    assert scores == [None, *[11.0] * 100]
    assert accuracies == [None, *[1.0] * 100]
    assert caplog.text.count("did not return within 3 s") == 1


def test_without_a_function_of_the_users_own_answers_are_graded_by_verls() -> None:
    of = Grader(OmegaConf.create({"path": None, "name": "compute_score"}))
    columns = {"data_source": ["openai/gsm8k"] * 2, "reward_model": [{"ground_truth": "4"}] * 2}
    assert of.value("score")(completions=["#### 4", "#### 5"], **columns) == [1.0, 0.0]


def test_with_a_section_of_rewards_an_error_fails_its_answer_and_each_part_has_a_value(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(FUNCTION)
    own = {"path": str(file), "name": "compute_score"}
    functions = {"answer": {}, "bonus": {**own, "weight": 0.1, "reward_kwargs": {"bonus": 10}}}
    calls = reward_calls({"goldilocks": {"rewards": {"functions": functions}}})
    found = graded(Grader(OmegaConf.create(guarded(own, calls))), ["2", "no score"], "score", "answer", "bonus")
    assert found == [[pytest.approx(2.1), None], [1.0, None], [11.0, None]]
