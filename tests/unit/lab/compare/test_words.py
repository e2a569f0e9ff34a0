"""What the command line may say, and what it may not."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet as pq
import pytest
import yaml
from run_files import write_task
from unit.lab.compare.arms import study

from goldilocks.cli import main
from goldilocks.lab.compare.arm import EqualCost, parse_grid
from goldilocks.lab.compare.study import recipe_digest

ENOUGH = ["--budget", "rollouts=64", "--seeds", "1"]
ON_FULL = "algorithm.filter_groups.on_full"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size=4"


@pytest.fixture(autouse=True)
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOLDILOCKS_TASK", str(write_task(tmp_path / "arithmetic")))


@pytest.mark.parametrize(
    ("word", "cost"),
    [
        ("rollouts=20000", EqualCost("rollouts", 20000)),
        ("tokens=1_000_000", EqualCost("tokens", 1_000_000)),
        ("seconds=2.5", EqualCost("seconds", 2.5)),
    ],
)
def test_a_budget_is_a_cost_and_an_amount(word, cost):
    assert EqualCost.parse(word, "--budget") == cost


@pytest.mark.parametrize(
    "word", ["rollouts=abc", "foo=3", "rollouts", "rollouts=0", "tokens=-5", "seconds=inf", "seconds=nan", "=3", ""]
)
def test_other_budgets_are_refused_in_one_line(word, refused, tmp_path):
    error = refused(["compare", "grpo", "--budget", word, "--seeds", "1", "--out", str(tmp_path / "out")])
    assert (
        error == f"goldilocks: --budget={word!r} is not accepted: rollouts=N, tokens=N or seconds=N, with N above 0\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*ENOUGH], "which recipes?"),
        (["gropo", *ENOUGH], "did you mean 'grpo'?"),
        (["grpo", "grpo", *ENOUGH], "'grpo' is named twice"),
        (["grpo", *ENOUGH, "--budget", "tokens=9"], "--budget='rollouts=64 and tokens=9' is not accepted: one"),
        (["grpo", "--budget", "rollouts=64", "--seeds", "0"], "--seeds=0 is not accepted"),
        (["grpo", *ENOUGH, "--tune-budget", "tokens=9"], "--tune-budget='tokens=9' is not accepted: rollouts=N"),
        (["grpo", *ENOUGH, "--stall-timeout", "0"], "--stall-timeout=0.0 is not accepted: seconds above 0"),
        (["grpo", *ENOUGH, "--tune-seeds", "0"], "--tune-seeds=0 is not accepted: 1 or more"),
        (["grpo", *ENOUGH, "--tune", "dapo"], "recipes stand before the options"),
        (["grpo", *ENOUGH, "--tune", "a=1,2", "a=3"], "all values of a at once"),
        (["grpo", *ENOUGH, "--tune", "a=1,2,1"], "--tune='a=1,2,1' is not accepted: each value once"),
        (["grpo", *ENOUGH, "--tune", "data.seed="], "--tune='data.seed=' is not accepted: key=value,value"),
        (["grpo", *ENOUGH, "--tune", "groups_per_update=2,many"], "groups_per_update='many' is not accepted"),
        (["grpo", *ENOUGH, "--tune", "groups_per_update=2", MINI], "nothing beside --tune groups_per_update"),
        (["grpo", *ENOUGH, "--against", "dapo"], "--against='dapo' is not accepted: recipes of the study: grpo"),
        (["grpo", *ENOUGH, "--tune", "a=[1,2"], "--tune='a=[1,2' is not accepted"),
        (["grpo", "--budget", "seconds=9", "--seeds", "1", "--parallel", "2"], "--parallel=2 is not accepted: 1 with"),
        (["grpo", *ENOUGH, "data.seed=3"], "goldilocks compare sets data.seed itself"),
        (["grpo", *ENOUGH, "goldilocks.budget.tokens=3"], "sets goldilocks.budget.tokens itself"),
        (["grpo", *ENOUGH, "goldilocks.study=False"], "sets goldilocks.study itself"),
        (["grpo", *ENOUGH, "--tune", "data.seed=3,4"], "sets data.seed itself"),
        (["grpo", *ENOUGH, "--tune", "data.train_batch=3,4"], "unknown key 'data.train_batch'"),
        (["grpo", *ENOUGH, "trainer.use_v1=False"], "needs trainer.use_v1=True"),
        (["grpo", *ENOUGH, "goldilocks.selector=tompson"], "did you mean 'thompson'?"),
        (["grpo", "dapo", *ENOUGH, "trainer=trl", "data.truncation=left"], "truncation='left' is not accepted: 'error"),
        (
            ["grpo", *ENOUGH, "trainer=trl", "--tune", f"{ON_FULL}=finish,partial"],
            f"{ON_FULL}='partial' is not accepted",
        ),
        (["grpo", *ENOUGH, "data.val_files=/no/such.parquet"], "data.val_files='/no/such.parquet' is not accepted"),
        (["grpo", *ENOUGH, "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"], "needs a number of steps"),
    ],
)
def test_bad_words_are_one_line_and_nothing_is_made(words, message, refused, tmp_path):
    assert message in refused(["compare", *words, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_a_folder_with_another_study_is_refused_and_the_difference_named(refused, tmp_path: Path):
    (tmp_path / "study.json").write_text(json.dumps({"recipes": {"grpo": recipe_digest("grpo")}, "tune_seeds": 3}))
    error = refused(["compare", "grpo", *ENOUGH, "--out", str(tmp_path)])
    assert "has another study: cost is null, not" in error
    assert "tune_seeds is 3, not 1" in error
    assert "recipes" not in error


def test_a_grid_is_every_combination_in_the_order_given():
    grid = parse_grid(["a.lr=1e-4,3e-4", "b=[1,2],[3]", "c=7"])
    assert [tuple(one.values()) for one in study(grid=grid).combinations] == [
        ("0.0001", "[1,2]", "7"),
        ("0.0001", "[3]", "7"),
        ("0.0003", "[1,2]", "7"),
        ("0.0003", "[3]", "7"),
    ]
    assert study().combinations == [{}]
    assert parse_grid(["b=${data.train_batch_size}"]) == {"b": ("${data.train_batch_size}",)}


def test_an_arm_that_is_silent_for_longer_than_the_option_says_is_ended(capsys, tmp_path, monkeypatch):
    """In the place of Python stands a program that says nothing and does not end by itself."""
    run_in_place_of_python("exec sleep 600\n", tmp_path, monkeypatch)
    out = tmp_path / "out"
    assert main(["compare", "grpo", *ENOUGH, "--stall-timeout", "0.001", "--out", str(out)]) == 1
    assert "arm grpo-seed1 failed: no sign of life for 0.001 s" in capsys.readouterr().err


def test_brackets_in_a_failure_are_no_markup_and_the_other_arms_still_run(capsys, tmp_path, monkeypatch):
    run_in_place_of_python(FAILS, tmp_path, monkeypatch)
    assert main(["compare", "grpo", "dapo", *ENOUGH, "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr()
    for recipe in ("grpo", "dapo"):
        assert f"arm {recipe}-seed1 failed: the template has no '[/INST]' token" in said.out
    assert "0 of 2 arms are done" in said.err


def test_tuning_trains_and_validates_on_training_problems_and_never_on_those_that_are_reported(tmp_path, monkeypatch):
    problems = [*range(200), *range(50)]  # some of them twice
    for split, numbers in (("train", problems), ("val", range(1000, 1030))):
        prompts = [[{"role": "user", "content": f"{number} + 1"}] for number in numbers]
        pq.write_table(pyarrow.table({"prompt": prompts}), tmp_path / f"arithmetic/data/{split}.parquet")
    run_in_place_of_python(FAILS, tmp_path, monkeypatch)
    out = tmp_path / "out"
    words = ["--tune", "actor_rollout_ref.actor.optim.lr=1e-4,1e-3", "--out", str(out)]
    assert main(["compare", "grpo", *ENOUGH, *words]) == 1

    def read(key: str) -> set[str]:
        file = yaml.safe_load((out / "tune-grpo-1-seed1000/config.yaml").read_text())["data"][key]
        return {prompt[0]["content"] for prompt in pq.read_table(file)["prompt"].to_pylist()}

    trained, validated = read("train_files"), read("val_files")
    assert trained | validated == {f"{number} + 1" for number in problems}
    assert not trained & validated
    assert len(validated) == 25, "a tenth of the training problems, since there are more to report"


# Fails, and says so as the driver of a run does.
FAILS = """\
[ "$VERL_FILE_LOGGER_PATH" ] || exit 0
echo "the template has no '[/INST]' token" > "${VERL_FILE_LOGGER_PATH%/*}/reason"
exit 1
"""


def run_in_place_of_python(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}")
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr("goldilocks.launch.train.POLL_S", 0.002)
