"""Tasks are found by name and by data source, and grading dispatches on the row."""

from __future__ import annotations

import inspect
import re

import pytest

from goldilocks.tasks.reasoning_gym import EVALUATING, ReasoningGym
from goldilocks.tasks.registry import compute_score, of_data_source, random_score


def test_the_row_chooses_the_grader_and_an_unknown_data_source_names_the_key_to_set():
    assert compute_score("goldilocks/arithmetic", "7", "7", {"difficulty": 1}) == {"score": 1.0, "acc": 1.0}
    assert compute_score("openai/gsm8k", "so #### 7", "7") == {"score": 1.0, "acc": 1.0}
    with pytest.raises(ValueError, match=r"reward\.custom_reward_function\.path"):
        of_data_source("someone/else")


def test_reasoning_gym_grades_the_very_problem_it_made():
    task = ReasoningGym("leg_counting")
    problems = task.problems("train", 5, seed=3)
    assert problems == ReasoningGym("leg_counting").problems("train", 5, seed=3)
    for problem in problems:
        assert compute_score(task.data_source, problem.answer, problem.answer, problem.extra)["acc"] == 1.0
        assert compute_score(task.data_source, "-1", problem.answer, problem.extra)["acc"] == 0.0


def test_reasoning_gym_splits_do_not_touch():
    task = ReasoningGym("basic_arithmetic")
    train = {problem.question for problem in task.problems("train", 50, seed=0)}
    assert not train & {problem.question for problem in task.problems("val", 10, seed=1)}


def test_no_generator_that_runs_an_answer_as_code_is_taken_and_an_unknown_one_is_answered_with_the_nearest():
    from reasoning_gym.factory import DATASETS

    runs_code = re.compile(r"(?<![\w.])(eval|exec|parse_expr|sympify)\(|sp\.(parse_expr|sympify)\(")
    found = {name for name, (kind, _) in DATASETS.items() if runs_code.search(inspect.getsource(kind.score_answer))}
    assert found <= EVALUATING
    with pytest.raises(ValueError, match="does not run the answer as code"):
        ReasoningGym("countdown")
    with pytest.raises(ValueError, match="did you mean 'leg_counting'"):
        ReasoningGym("leg_countin")


def test_a_mixture_has_each_generator_by_its_share_and_grades_each_by_its_own():
    task = ReasoningGym({"leg_counting": {"share": 3}, "chain_sum": {"max_terms": 3, "max_digits": 2}})
    problems = task.problems("train", 20, seed=0)
    assert [problem.extra["generator"] for problem in problems].count("leg_counting") == 15
    assert len({problem.question for problem in problems}) == 20
    many = ReasoningGym("basic_arithmetic+chain_sum+gcd+lcm+leg_counting+prime_factorization")
    assert len(many.problems("train", 9, seed=0)) == 9
    for problem in problems:
        answer = f"I think it is <answer>{problem.answer}</answer>"
        assert compute_score(task.data_source, answer, problem.answer, problem.extra)["acc"] == 1.0
        assert compute_score(task.data_source, "<answer>none</answer>", problem.answer, problem.extra)["acc"] == 0.0


def test_knobs_change_the_problems():
    easy, hard = (
        ReasoningGym({"chain_sum": {"min_terms": n, "max_terms": n}}).problems("train", 5, seed=0) for n in (2, 6)
    )
    assert max(len(p.question) for p in easy) < min(len(p.question) for p in hard)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_trms": 3}, r"generators\.chain_sum\.max_trms=3 is not accepted: a knob: .*max_terms"),
        ({"min_terms": 9, "max_terms": 2}, "generators.chain_sum"),
        ({"share": 0}, "a number above 0"),
        ({"share": "half"}, "generators.chain_sum.share='half' is not accepted: a number above 0"),
    ],
)
def test_wrong_knobs_are_named(knobs, message):
    with pytest.raises(ValueError, match=message):
        ReasoningGym({"chain_sum": knobs})


def test_random_rewards_leave_the_accuracy_true_and_fall_the_same_way_again():
    rows = [
        {"data_source": "goldilocks/arithmetic", "ground_truth": "4", "solution_str": " " * n + "4"} for n in range(64)
    ]
    scores = [random_score(**row) for row in rows]
    assert {score["acc"] for score in scores} == {1.0}
    assert {score["score"] for score in scores} == {0.0, 1.0}
    assert scores == [random_score(**row) for row in rows]
