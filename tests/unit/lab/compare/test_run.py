"""A study arm by arm, interrupted and gone on with; the function that runs an arm is given."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_files import logged
from unit.lab.compare.arms import of_arm, study
from unit.lab.report.run_directories import write_run

from goldilocks.lab.compare.arm import SEEDS, Arm, EqualCost
from goldilocks.lab.compare.command import ArmFailed, Turn, run_study
from goldilocks.lab.compare.show import notes
from goldilocks.lab.compare.study import (
    TUNING_SEED,
    Result,
    Results,
    Study,
    StudyFolder,
    origin_here,
    read_result,
    recipe_digest,
)
from goldilocks.lab.compare.table import make_table

GRID = {"lr": ("1", "2")}
TUNED = {"grid": GRID, "tune_cost": EqualCost("rollouts", 300)}


class Runner:
    """Runs an arm at once: its accuracy is a function of the arm. ``interrupted_at``: the number of an arm."""

    def __init__(self, interrupted_at: int | None = None) -> None:
        self.ran: list[str] = []
        self.turns: list[Turn] = []
        self._interrupted_at = interrupted_at

    def __call__(self, arm: Arm, turn: Turn) -> Result:
        if turn.number == self._interrupted_at:
            raise KeyboardInterrupt
        self.ran.append(arm.name)
        self.turns.append(turn)
        best = {"grpo": "1", "dapo": "2"}[arm.recipe] == arm.settings.get("lr")
        return of_arm(arm, final=0.5 + 0.2 * best + arm.seed / 10_000)


def run(path: Path, settings: Study, runner: Callable[[Arm, Turn], Result]) -> Results:
    with StudyFolder.open(path, settings) as folder:
        return run_study(settings, folder, runner)


def test_a_seed_of_every_recipe_comes_before_the_next_seed_and_more_seeds_add_arms_to_a_study_that_has_ended(tmp_path):
    runner, more = Runner(), Runner()
    run(tmp_path, study(seeds=2), runner)
    assert runner.ran == ["grpo-seed1", "dapo-seed1", "grpo-seed2", "dapo-seed2"]
    assert [(turn.number, turn.of) for turn in runner.turns] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    run(tmp_path, study(seeds=3), more)
    assert more.ran == ["grpo-seed3", "dapo-seed3"]


def test_every_recipe_is_tuned_alike_and_its_own_best_is_reported(tmp_path):
    runner = Runner()
    results = run(tmp_path, study(seeds=2, **TUNED), runner)
    combinations = ["tune-grpo-1", "tune-dapo-1", "tune-grpo-2", "tune-dapo-2"]
    assert runner.ran[:4] == [f"{name}-seed{TUNING_SEED}" for name in combinations]
    assert {one.seed for one in results.tuned} == {TUNING_SEED}
    assert {one.rollouts for one in results.tuned} == {308}
    assert {(one.recipe, one.settings["lr"]) for one in results.reported} == {("grpo", "1"), ("dapo", "2")}
    assert {one.seed for one in results.reported} == {1, 2}


def test_with_several_tuning_seeds_the_best_mean_is_chosen_and_one_lucky_try_is_not(tmp_path):
    settings = study("grpo", tune_seeds=2, **TUNED)
    found = {("1", TUNING_SEED): 0.9, ("1", TUNING_SEED + 1): 0.1, ("2", TUNING_SEED): 0.6, ("2", TUNING_SEED + 1): 0.6}
    results = run(tmp_path, settings, lambda arm, turn: of_arm(arm, found.get((arm.settings["lr"], arm.seed), 0.5)))
    assert settings.choose(results.tuned) == {"grpo": {"lr": "2"}}
    made = make_table(settings, results)
    assert [trial.accuracy for trial in made.trials] == [pytest.approx(0.5, abs=0.02), pytest.approx(0.6, abs=0.02)]
    assert any("tuning before it, 2 seeds: 4 arms" in note for note in notes(made))


def test_of_equally_good_settings_the_first_is_chosen(tmp_path):
    settings = study(grid={"other": ("1", "2")})
    assert settings.choose(run(tmp_path, settings, Runner()).tuned) == {"grpo": {"other": "1"}, "dapo": {"other": "1"}}


@settings(max_examples=8)
@given(st.sets(st.integers(1, 8), max_size=4))
def test_interrupted_anywhere_and_gone_on_with_the_table_is_the_same(tmp_path_factory, cuts):
    whole = study(seeds=2, **TUNED)
    runner = Runner()
    expected = make_table(whole, run(tmp_path_factory.mktemp("whole"), whole, runner))
    path, ran = tmp_path_factory.mktemp("cut"), []
    for cut in sorted(cuts):
        interrupted = Runner(interrupted_at=cut)
        with pytest.raises(KeyboardInterrupt):
            run(path, whole, interrupted)
        ran += interrupted.ran
    last = Runner()
    assert make_table(whole, run(path, whole, last)) == expected
    assert ran + last.ran == runner.ran, "no arm twice, none left out"


def test_half_an_arm_is_started_anew(tmp_path):
    def is_cut(arm: Arm, turn: Turn) -> Result:
        (tmp_path / arm.name / "checkpoints").mkdir()
        raise KeyboardInterrupt

    with StudyFolder.open(tmp_path, study("grpo")) as folder, pytest.raises(KeyboardInterrupt):
        run_study(study("grpo"), folder, is_cut)
    assert (tmp_path / "grpo-seed1" / "checkpoints").exists()
    run(tmp_path, study("grpo"), Runner())
    assert {file.name for file in (tmp_path / "grpo-seed1").iterdir()} == {"arm.json", "result.json"}
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "study.json", "grpo-seed1"}


@pytest.mark.parametrize("damage", ["{", '{"validations": [{"accuracy": "1"}]}', "[]"])
@pytest.mark.parametrize("name", ["study.json", "dapo-seed1/result.json"])
def test_a_damaged_file_is_named_before_an_arm_begins_and_deleted_it_is_made_again(tmp_path, name, damage):
    run(tmp_path, study(), Runner())
    file, runner = tmp_path / name, Runner()
    file.write_text(damage)
    other = name == "study.json" and "validations" in damage
    with pytest.raises(ValueError, match="has another study" if other else f"{file}' is damaged .*: delete it"):
        run(tmp_path, study(seeds=2), runner)
    file.unlink()
    run(tmp_path, study(), runner)
    assert runner.ran == (["dapo-seed1"] if name != "study.json" else [])


def test_an_arm_whose_validation_is_no_number_is_not_made_again(tmp_path):
    run(tmp_path, study("grpo"), Runner())
    file, runner = tmp_path / "grpo-seed1" / "result.json", Runner()
    file.write_text(re.sub(r'"accuracy": [\d.]+', '"accuracy": NaN', file.read_text()))
    run(tmp_path, study("grpo"), runner)
    assert runner.ran == []


def test_a_folder_of_the_users_that_is_named_like_an_arm_is_left_alone(tmp_path):
    own = tmp_path / "grpo-seed1" / "thesis.tex"
    own.parent.mkdir()
    own.write_text("years of work")
    with pytest.raises(ValueError, match=r"grpo-seed1' is no arm of this study: move it away, or choose another --out"):
        run(tmp_path, study("grpo"), Runner())
    assert own.read_text() == "years of work"


def test_a_recipe_that_was_edited_is_another_study(tmp_path):
    mine, base = tmp_path / "mine.yaml", tmp_path / "base.yaml"
    mine.write_text("defaults: [base, _self_]\ndata: {train_batch_size: 8}\n")
    base.write_text("algorithm: {norm_adv_by_std_in_grpo: false}\n")
    for _ in range(2):  # the same recipe goes on
        with StudyFolder.open(tmp_path / "out", study(str(mine))):
            pass
    base.write_text("algorithm: {norm_adv_by_std_in_grpo: true}\n")
    edited = pytest.raises(ValueError, match="a recipe was edited since the study began")
    with edited, StudyFolder.open(tmp_path / "out", study(str(mine))):
        pass


def test_an_arm_keeps_where_it_comes_from(tmp_path):
    here = {"commit": "a1", "torch": "2"}
    with StudyFolder.open(tmp_path, study("grpo"), lambda: here) as folder:
        (reported,) = run_study(study("grpo"), folder, Runner()).reported
    assert reported.origin == {**here, "recipe grpo": recipe_digest("grpo")}
    assert json.loads((tmp_path / "grpo-seed1" / "arm.json").read_text())["origin"] == reported.origin
    with StudyFolder.open(tmp_path, study("grpo"), lambda: {"commit": "b2"}) as folder:
        assert run_study(study("grpo"), folder, Runner()).reported == (reported,)
    found = origin_here("cpu")
    assert found["goldilocks-rl"] == version("goldilocks-rl")
    assert found["device"].endswith(" cores")


def test_an_arm_that_fails_is_tried_again_and_one_that_crashed_once_is_no_failure(tmp_path):
    tried = []

    def fails(arm: Arm, turn: Turn) -> Result:
        tried.append(arm.name)
        if arm.name == "grpo-seed1" or tried == ["grpo-seed1", "grpo-seed1", "dapo-seed1"]:
            raise ArmFailed("out of memory" if arm.recipe == "grpo" else "a port was taken")
        return of_arm(arm, 0.5)

    with StudyFolder.open(tmp_path, study()) as folder, pytest.raises(ArmFailed, match="out of memory"):
        run_study(study(), folder, fails)
    assert tried == ["grpo-seed1", "grpo-seed1", "dapo-seed1", "dapo-seed1"]
    runner = Runner()
    results = run(tmp_path, study(), runner)
    assert runner.ran == ["grpo-seed1"], "the same command runs what is missing"
    assert [one.recipe for one in results.reported] == ["grpo", "dapo"]


def test_a_mistake_stops_the_study_and_arms_before_it_are_kept(tmp_path):
    def fails(arm: Arm, turn: Turn) -> Result:
        if arm.recipe == "dapo":
            raise ValueError("ended before its budget")
        return of_arm(arm, 0.5)

    with StudyFolder.open(tmp_path, study()) as folder, pytest.raises(ValueError, match="before its budget"):
        run_study(study(), folder, fails)
    assert [file.parent.name for file in tmp_path.glob("*/result.json")] == ["grpo-seed1"]


@pytest.mark.parametrize("parallel", [2, 3])
def test_as_many_arms_as_asked_for_run_at_a_time_and_the_table_is_the_same(tmp_path, parallel):
    whole = study(seeds=3, **TUNED)
    alone = make_table(whole, run(tmp_path / "alone", whole, Runner()))
    arrived, at_work, most = threading.Barrier(parallel), set(), []

    def together(arm: Arm, turn: Turn) -> Result:
        at_work.add(arm.name)
        most.append(len(at_work))
        if arm.name.startswith(("grpo", "dapo")):  # six reported arms: whole rounds of two and of three
            arrived.wait(timeout=30)
        at_work.discard(arm.name)
        return Runner()(arm, turn)

    with StudyFolder.open(tmp_path / "together", whole) as folder:
        results = run_study(whole, folder, together, parallel)
    assert make_table(whole, results) == alone
    assert max(most) <= parallel


def test_an_interrupt_stops_the_arms_at_work(tmp_path):
    stop = threading.Event()

    def waits(arm: Arm, turn: Turn) -> Result:
        if arm.recipe == "grpo":
            raise KeyboardInterrupt
        assert stop.wait(timeout=30)
        raise ArmFailed("interrupted")

    with StudyFolder.open(tmp_path, study()) as folder, pytest.raises(KeyboardInterrupt):
        run_study(study(), folder, waits, 2, stop)
    assert list(tmp_path.glob("*/result.json")) == []


def test_other_baselines_are_no_other_study(tmp_path):
    with StudyFolder.open(tmp_path, study()):
        pass
    assert len(run(tmp_path, study(against=("dapo",)), Runner()).reported) == 2


def test_two_at_work_in_one_folder_is_an_error(tmp_path):
    with (
        StudyFolder.open(tmp_path, study()),
        pytest.raises(ValueError, match="another --out: process"),
        StudyFolder.open(tmp_path, study()),
    ):
        pass


@pytest.mark.parametrize("now", [study("grpo"), study(cost=EqualCost("tokens", 9)), study(overrides=("data.seed=1",))])
def test_another_study_in_the_same_folder_is_an_error(tmp_path, now):
    with StudyFolder.open(tmp_path, study()):
        pass
    with pytest.raises(ValueError, match="has another study"), StudyFolder.open(tmp_path, now):
        pass


def test_the_place_of_an_arm_knows_what_is_still_to_come_which_is_judged_by_the_arms_before(tmp_path):
    runner = Runner()
    run(tmp_path, study(seeds=1, **TUNED), runner)
    assert [turn.cost for turn in runner.turns] == [300, 300, 300, 300, 1000, 1000]
    assert [turn.cost_after for turn in runner.turns] == [2900, 2600, 2300, 2000, 1000, 0]
    assert [turn.seconds_before for turn in runner.turns] == [0, 120, 240, 360, 480, 600]
    tuned_on_less = Turn(number=2, of=5, cost=100, cost_before=100, cost_after=3000, seconds_before=120)
    assert tuned_on_less.seconds_left(elapsed=30, eta=60) == 60 + 30 * 120
    first = Turn(number=1, of=3, cost=100, cost_before=0, cost_after=200, seconds_before=0)
    assert first.seconds_left(elapsed=30, eta=60) == 60 + 2 * 90


def test_an_arm_is_a_command_of_goldilocks_train():
    words = Arm("dapo-seed2", "dapo", 2, {"a.lr": "3"}, EqualCost("seconds", 2.5)).command(["task=gsm8k"])
    assert words[0] == "dapo"
    assert words[-2:] == ["task=gsm8k", "a.lr=3"]
    assert "goldilocks.budget.seconds=2.5" in words
    assert {f"{key}=2" for key in SEEDS} <= set(words)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The directory of an arm's run, of twelve updates."""
    return write_run(tmp_path / "run", "dapo", steps=12)


def read_from(path: Path, budget: int = 100) -> Result:
    return read_result(Arm("dapo-seed1", "dapo", 1, {}, EqualCost("rollouts", budget)), path, wall_seconds=90)


def test_a_result_is_read_from_the_run_directory_with_everything_charged(path):
    records = logged(path)
    generated = records[-1].get("accounts/generated_rollouts") or records[-2]["accounts/generated_rollouts"]
    read = read_from(path)
    assert (read.updates, read.rollouts, read.wall_seconds) == (12, generated, 90)
    assert [one.rollouts for one in read.validations] == sorted(one.rollouts for one in read.validations)
    assert len(read.validations) == 4
    assert read.validations[0].rollouts == 0
    assert read.informative_groups == 12 * 16, "dapo trains no other groups"
    assert 0 < read.signal < read.rollouts


@pytest.mark.parametrize(("trainer", "updates"), [({}, 12 * 4 * 2), ({"backend": "trl"}, 12)])
def test_of_verl_every_mini_batch_is_an_update_and_trl_logs_each(path, trainer, updates):
    actor = {"ppo_mini_batch_size": 8, "ppo_epochs": 2}
    config = {"data": {"train_batch_size": 32}, "actor_rollout_ref": {"actor": actor}, "trainer": trainer}
    (path / "config.yaml").write_text(json.dumps(config))
    read = read_from(path)
    assert (read.updates, read.epochs) == (updates, 2)


def test_accuracy_by_level_is_read_where_it_was_logged(path):
    first = json.dumps({"step": 0, "data": {"val/level/3/acc": 0.25, "val/level/10/acc": 0.5}})
    (path / "metrics.jsonl").write_text(first + "\n" + (path / "metrics.jsonl").read_text())
    assert [one.levels for one in read_from(path).validations] == [{"level": {"3": 0.25, "10": 0.5}}, {}, {}, {}]


def test_an_arm_that_ended_before_its_budget_is_an_error(path):
    with pytest.raises(ValueError, match=r"arm dapo-seed1 ended after .* of 1,000,000 rollouts"):
        read_from(path, budget=10**6)
