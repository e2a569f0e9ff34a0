"""``GoldilocksGRPOTrainer`` trains: the tiny model on the CPU, TRL's own trainer beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_files import batches_of, json_lines, logged

pytest.importorskip("trl")

import trl_world as world
from documented_metrics import undocumented

from goldilocks.cli import main
from goldilocks.core import Exhausted
from goldilocks.drive.driver import MAX_REFILLS
from goldilocks.runs.checkpoints import last_whole


def test_with_everything_off_it_trains_what_trl_trains(tmp_path: Path) -> None:
    """Over an epoch's end, where TRL drops what makes no whole batch."""
    theirs = world.run(tmp_path / "theirs", ours=False, data=world.dataset(10))
    off: list[dict[str, Any]] = [{}, {"goldilocks": {}}, {"filter_groups": {"enable": False}}]
    for place, sections in enumerate(off):
        world.assert_same_training(world.run(tmp_path / str(place), sections, data=world.dataset(10)), theirs)


def test_with_everything_off_batches_are_split_accumulated_and_used_again_as_in_trl(tmp_path: Path) -> None:
    chosen = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4}
    chosen |= {"num_iterations": 2, "beta": 0.1, "max_steps": 9}
    theirs = world.run(tmp_path / "theirs", ours=False, **chosen)
    world.assert_same_training(world.run(tmp_path / "ours", {"goldilocks": {}}, **chosen), theirs)


def test_dynamic_sampling_trains_full_batches_of_groups_that_differ_and_the_run_becomes_a_report(
    tmp_path: Path,
) -> None:
    sections = {"filter_groups": {"enable": True, "max_carry_steps": 2}}
    trainer = world.run(tmp_path, sections, log_completions=True, save_strategy="steps", save_steps=4)
    advantages = set()
    for groups in batches_of(tmp_path):
        assert len(groups) == 4
        for rows in groups.values():
            assert len({row["score"] for row in rows}) == 2
            assert sum(row["advantage"] for row in rows) == pytest.approx(0, abs=1e-5)
            advantages |= {row["advantage"] for row in rows}
    updates = [record for record in trainer.state.log_history if "loss" in record]
    assert all(record["frac_reward_zero_std"] == 0 for record in updates)
    assert updates[-1]["accounts/filtered_rollouts"] > 0
    assert not undocumented(updates[-1])
    world.assert_accounts_sum(updates[-1])
    table = {
        value for value in trainer._logs["advantages"] if value == value
    }  # of completions: those that were trained
    assert table
    assert table <= advantages

    assert main(["report", str(tmp_path), "--no-png"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "informative groups" in page
    assert "Prompts and beliefs" in page


def test_adaptive_rollouts_train_groups_of_different_sizes(tmp_path: Path) -> None:
    adaptive = {"enable": True, "max_n": 12, "rollouts_per_batch": 3, "min_rollouts": 2, "stop": "contrast"}
    chosen = {"loss_type": "grpo", "per_device_train_batch_size": 8, "steps_per_generation": 2, "max_steps": 6}
    trainer = world.run(tmp_path, {"adaptive_rollout": adaptive}, **chosen)
    sizes = {len(rows) for groups in batches_of(tmp_path) for rows in groups.values()}
    assert len(sizes) > 1
    assert max(sizes) <= 12
    assert all(len(groups) == 4 for groups in batches_of(tmp_path))
    assert all(abs(loss) < 10 for loss in world.losses(trainer))


@pytest.mark.parametrize(
    "sections",
    [
        {"goldilocks": {"selector": "thompson"}, "filter_groups": {"enable": True}},
        {"goldilocks": {"selector": "greso"}},
        {"goldilocks": {"selector": "thompson", "prior": "strata", "strata": {"columns": ["right"]}}},
        {"batch_filter": {"enable": True, "sample_oversampling_factor": 2.0}},
        {"goldilocks": {"allocator": "pilot", "allocator_kwargs": {"n_pilot": 2, "n_commit": 4}}},
    ],
    ids=["thompson", "greso", "strata", "batch_filter", "pilot"],
)
def test_policies_of_the_core_drive_trl(sections: dict[str, Any], tmp_path: Path) -> None:
    assert world.run(tmp_path, sections, max_steps=2).state.global_step == 2
    assert len(batches_of(tmp_path)) == 2
    assert "batch_filter" not in sections or all(len(rows) <= 4 for rows in batches_of(tmp_path)[0].values())


def never(completions: list[Any], **_: Any) -> list[float]:
    return [0.0 for _ in completions]


def test_a_limit_that_leaves_too_few_groups_is_an_error_and_nothing_generated_is_lost(tmp_path: Path) -> None:
    sections = {"filter_groups": {"enable": True, "max_num_gen_batches": 2}}
    trainer = world.trainer(tmp_path, sections=sections, reward_funcs=never)
    with pytest.raises(Exhausted, match=r"num_gen_batches=2 >= max_num_gen_batches=2"):
        trainer.train()
    assert (tmp_path / "checkpoint-0" / "goldilocks.npz").is_file()


def test_a_gate_that_refuses_everything_ends_the_run_and_its_state_is_saved(tmp_path: Path) -> None:
    rounds: list[int] = []

    def reward(completions: list[Any], right: list[int], **columns: Any) -> list[float]:
        rounds.append(len(completions))
        assert len(rounds) <= 1 + MAX_REFILLS, "the limit counts the refills of a batch"
        return world.reward(completions, right, **columns)

    sections = {"batch_filter": {"enable": True, "reward_threshold": 2.0}, "engine_slots": 16}
    trainer = world.trainer(tmp_path, sections=sections, reward_funcs=reward)
    with pytest.raises(
        Exhausted, match=rf"After {MAX_REFILLS} refills .* What was generated is saved in .*checkpoint-0"
    ):
        trainer.train()
    assert len(rounds) == 1 + MAX_REFILLS
    assert last_whole(tmp_path) == tmp_path / "checkpoint-0"
    world.run(tmp_path, {**sections, "batch_filter": {"enable": True}}, resume=True, max_steps=4)
    lines = [line for line in logged(tmp_path) if "critic/score/mean" in line]
    assert lines[-1]["accounts/rejected_rollouts"] >= sum(rounds)
    # Groups without variance are refused after they were kept, and others take their place.
    later = [(line["batch/total_groups_generated"], line["train/groups_rejected"]) for line in lines[1:]]
    assert any(rejected for _, rejected in later)
    assert all(judged == 4 + rejected for judged, rejected in later)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda completions: 1.0, r"reward_funcs=bad: 'float' object is not iterable; accepted: a list of a number"),
        (
            lambda completions: ["good"] * len(completions),
            r"reward_funcs=bad: .*; accepted: a list of a number or None",
        ),
        (lambda completions: [None] * len(completions), r"rollouts failed in a row; .* the reward was None"),
    ],
)
def test_a_reward_that_is_no_list_of_numbers_is_said_by_its_function(
    returned: Any, message: str, tmp_path: Path
) -> None:
    def bad(completions: list[Any], **_: Any) -> Any:
        return returned(completions)

    trainer = world.trainer(tmp_path, sections={"filter_groups": {"enable": True}}, reward_funcs=bad, max_steps=1)
    with pytest.raises((ValueError, RuntimeError), match=message):
        trainer.train()


def test_dropped_groups_fill_a_batch_up_and_train_nothing(tmp_path: Path) -> None:
    filter_groups = {"enable": True, "max_num_gen_batches": 1, "on_exhausted": "backfill"}
    trainer = world.run(tmp_path, {"filter_groups": filter_groups}, reward_funcs=never, max_steps=1)
    assert len(batches_of(tmp_path)[0]) == 4
    assert world.losses(trainer) == [0.0]


def test_beside_groups_that_are_trained_those_that_only_fill_a_batch_up_have_no_loss(tmp_path: Path) -> None:
    """Their rewards are equal; a KL penalty in the loss would train them all the same."""

    def every_second_group_differs(completions: list[Any], **_: Any) -> list[float]:
        return [float(place % 8 == 4) for place, _ in enumerate(completions)]

    filter_groups = {"enable": True, "max_num_gen_batches": 1, "on_exhausted": "backfill"}
    one = world.trainer(tmp_path, sections={"filter_groups": filter_groups}, reward_funcs=every_second_group_differs)
    one.model.train()
    batch = one.collection.collect(one._generate_round, one._log_probs, one._rewards())
    backfilled = one.collection.driver.collector.backfilled
    assert backfilled == {"g0", "g2"}
    silent = [not mask.any() for mask in batch["completion_mask"]]
    assert silent == [uid in backfilled for uid, _ in one.collection.trained]


def test_several_reward_functions_peft_and_evaluation_are_trls(tmp_path: Path) -> None:
    from peft import LoraConfig

    def short(completions: list[Any], **_: Any) -> list[float | None]:
        return [None if place % 5 == 0 else float(len(one[0]["content"]) < 4) for place, one in enumerate(completions)]

    trainer = world.run(
        tmp_path,
        {"filter_groups": {"enable": True, "metric": "reward"}},
        reward_funcs=[world.reward, short],
        reward_weights=[1.0, 0.5],
        multi_objective_aggregation="normalize_then_sum",
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        eval_dataset=world.dataset(4),
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=4,
        max_steps=2,
        beta=0.05,
    )
    evaluations = [record["eval_reward"] for record in trainer.state.log_history if "eval_reward" in record]
    assert len(evaluations) == 1
    lines = json_lines(tmp_path / "metrics.jsonl")
    logged = [line["data"]["val-core/eval/reward/mean@4"] for line in lines if len(line["data"]) == 1]
    assert logged == pytest.approx(evaluations)


def test_a_budget_ends_training(tmp_path: Path) -> None:
    sections = {"goldilocks": {"budget": {"rollouts": 40, "validations": 2}}}
    evaluated = {"eval_dataset": world.dataset(4), "eval_strategy": "steps", "eval_steps": 1}
    trainer = world.run(tmp_path, sections, max_steps=20, per_device_eval_batch_size=4, **evaluated)
    assert trainer.state.global_step == 3  # of 16 rollouts each
    assert [one["step"] for one in trainer.state.log_history if "eval_reward" in one] == [2, 3]  # at 0.5 and 1 of it
    lines = logged(tmp_path)
    assert [line["budget/spent"] for line in lines if "budget/spent" in line] == [0.4, 0.8, 1.2]


def test_a_budget_of_seconds_ends_training_by_the_clock_that_is_logged(tmp_path: Path) -> None:
    assert world.run(tmp_path, {"goldilocks": {"budget": {"seconds": 1e-3}}}, max_steps=20).state.global_step == 1
    (line,) = (line for line in logged(tmp_path) if "budget/spent" in line)
    assert line["budget/spent"] == pytest.approx(line["timing_s/step"] / 1e-3)
    assert line["budget/spent"] >= 1


def recipe_on_trl(out: Path, recipe: str, *words: str) -> list[dict[str, Any]]:
    """Train two steps of a recipe on the tiny model; return the lines of its metrics."""
    from goldilocks.config.recipes import choose, compose_config
    from goldilocks.launch import on_trl
    from goldilocks.rewards.calls import guard
    from goldilocks.tasks.arithmetic import Arithmetic
    from goldilocks.tasks.registry import write_split
    from goldilocks.tasks.tiny_model import tiny_model

    task = Arithmetic()
    files = {
        key: write_split(out, task.data_source, split, task.problems(split, size, seed=0))
        for key, split, size in (("train_files", "train", 32), ("val_files", "val", 4))
    }
    given = [
        recipe,
        "trainer=trl",
        f"actor_rollout_ref.model.path={tiny_model('arithmetic')}",
        f"trainer.default_local_dir={out / 'run' / 'checkpoints'}",
        *(f"data.{key}={file}" for key, file in files.items()),
        *("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=4"),
        *("trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.val_before_train=false"),
        *words,
    ]
    config = compose_config(choose(given, "cpu"))
    guard(config, timeout_s=10.0, workers=1)
    on_trl.train(config, out / "run")
    return json_lines(out / "run" / "metrics.jsonl")


def test_a_recipe_runs_on_trl(tmp_path: Path) -> None:
    lines = recipe_on_trl(tmp_path, "grpo")
    steps = [line["step"] for line in lines if "critic/score/mean" in line["data"]]
    assert steps == [1, 2, 3, 4]  # each batch of four prompts serves two updates
    assert "val-core/eval/acc/mean@1" in lines[-1]["data"]


HANGS_ONCE = """
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info):
    try:
        Path(__file__).with_suffix(".hung").touch(exist_ok=False)
    except FileExistsError:
        return {"score": float(sum(map(ord, solution_str)) % 2)}
    7 ** 10**9  # minutes in which its interpreter does nothing else
"""


def test_a_reward_without_acc_that_hangs_once_costs_a_recipe_one_rollout(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(HANGS_ONCE)
    words = ["algorithm.filter_groups.metric=score", "trainer.test_freq=-1"]
    words += [f"reward.custom_reward_function.path={tmp_path}/reward.py"]
    lines = recipe_on_trl(tmp_path, "dapo", *words)
    trained = [line["data"] for line in lines if "train/rollout_failures" in line["data"]]
    assert [line["train/rollout_failures/non_finite_reward"] for line in trained[:1]] == [1]
    assert trained[-1]["accounts/failed_rollouts"] == 1
