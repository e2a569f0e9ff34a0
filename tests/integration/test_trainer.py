"""``trainer.v1.trainer_mode=goldilocks``: what the collector promises, on the real trainer.

A launch is most of what a test costs, so each one shows several things. What was trained is read from verl's own dumps.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas
import pytest

from goldilocks.types import Account

from .conftest import Launch, Run, Task
from .killed import assert_none_twice, dumped_every_step, killed, trained_groups

pytestmark = pytest.mark.integration

REWARDS = '''
import collections
import json
import pathlib

scored = collections.Counter()

def right_from_the_third_on(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """There is one reward worker, so it sees every answer to a prompt."""
    scored[extra_info["index"]] += 1
    acc = float(scored[extra_info["index"]] > 2)
    return {"score": acc, "acc": acc}


def every_other_where_there_is_water(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    folder = pathlib.Path(__file__).parent
    wells = json.loads((folder / "wells.json").read_text())
    wet = extra_info["index"] in wells or (folder / "rain").exists()
    scored[extra_info["index"]] += 1
    acc = float(wet and scored[extra_info["index"]] % 2)
    return {"score": acc, "acc": acc}
'''
MODE = "trainer.v1.trainer_mode=goldilocks"
FILTER = "algorithm.filter_groups.enable=True"


def assert_full_of_signal(groups: dict[str, list[float]]) -> None:
    """A batch of the size that was asked for, and no group in it without variance."""
    assert len(groups) == 8
    assert all(len(set(scores)) > 1 for scores in groups.values()), "a group without variance was trained"


def rewards(tmp_path: Path, name: str) -> list[str]:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return [f"reward.custom_reward_function.path={path}", f"reward.custom_reward_function.name={name}"]


def assert_trained(run: Run, *steps: int) -> None:
    """Ended well at the last of these steps; where no row is older than the policy, rollout and trainer agree on it."""
    assert run.status == 0, run.tail()
    assert [step["step"] for step in run.steps] == list(steps)
    for step in run.steps:
        if step["training/off_policy/trajectory_staleness_worst/max"] == 0:
            assert step["training/rollout_probs_diff_max"] < 1e-5


def assert_accounts_sum(run: Run) -> None:
    for step in run.steps:
        assert sum(step[f"accounts/{account}_tokens"] for account in Account) == step["accounts/generated_tokens"]


@pytest.mark.runs(2)
def test_dynamic_sampling_on_two_ranks_is_killed_and_goes_on_where_it_was(
    launch: Launch, task: Task, tmp_path: Path
) -> None:
    dumps = tmp_path / "rollouts"
    overrides = [
        MODE,
        FILTER,
        "algorithm.filter_groups.metric=acc",
        "data.gen_batch_size=12",
        "trainer.n_gpus_per_node=2",
        *dumped_every_step(tmp_path),
        *wells(task, tmp_path, *range(0, 100, 2)),
    ]
    before = killed(launch, tmp_path, *overrides)
    saved = before.saved
    resumed = launch(
        *overrides,
        f"trainer.total_training_steps={saved + 3}",
        "trainer.resume_mode=auto",
        "algorithm.adv_estimator=reinforce_plus_plus",
    )
    assert_trained(resumed, saved + 1, saved + 2, saved + 3)
    after = [trained_groups(dumps, step) for step in range(saved + 1, saved + 4)]

    assert_none_twice(*before.trained.values(), *after)
    for groups in [*before.trained.values(), *after]:
        assert_full_of_signal(groups)
        assert all(len(scores) == 4 for scores in groups.values())
    assert_accounts_sum(resumed)
    last_before = next(step for step in before.run.steps if step["step"] == min(saved, before.run.steps[-1]["step"]))
    assert resumed.steps[0]["data/prompts_issued"] >= last_before["data/prompts_issued"]
    for step in resumed.steps:
        assert (
            step["training/off_policy/trajectory_staleness_worst/max"] <= 1
        )  # carried groups are one update old at most
        assert step["accounts/filtered_tokens"] > 0
        assert step["train/num_gen_batches"] >= 1


def test_a_chunk_of_rollouts_is_waited_for_and_trained_whole(launch: Launch, tmp_path: Path) -> None:
    dumps = tmp_path / "rollouts"
    run = launch(
        MODE,
        FILTER,
        "algorithm.filter_groups.metric=score",
        "algorithm.adv_estimator=rloo",
        "+goldilocks.selector=thompson",
        "+adaptive_rollout.enable=True",
        "+adaptive_rollout.stop=contrast",
        "+adaptive_rollout.max_n=10",
        f"trainer.rollout_data_dir={dumps}",
        *rewards(tmp_path, "right_from_the_third_on"),
    )
    assert_trained(run, 1, 2)
    for step in (1, 2):
        groups = trained_groups(dumps, step)
        assert_full_of_signal(groups)
        # Two were wrong, so eight more were asked for, and the first of the eight was right.
        assert all(sorted(scores) == [0, 0, *[1] * 8] for scores in groups.values())
    assert run.steps[-1]["accounts/cancelled_rollouts"] == 0
    assert_accounts_sum(run)


@pytest.mark.slow
def test_carried_groups_are_trained_against_the_policy_that_wrote_them(launch: Launch, tmp_path: Path) -> None:
    """Twice the batch is rolled out at first, and nothing is dropped: all of update 2 was written before update 1."""
    run = launch(
        MODE,
        "data.gen_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",  # one step of the optimiser: the ratio begins where it is
        "actor_rollout_ref.rollout.calculate_log_probs=False",  # switched on where something may be carried
        "algorithm.adv_estimator=rloo",
        "+adaptive_rollout.enable=True",
        "+adaptive_rollout.min_rollouts=4",
        "+adaptive_rollout.max_n=4",
        "+adaptive_rollout.max_train_n=2",  # the baseline is over all four: rloo_pool
        "trainer.total_training_steps=3",
    )
    assert run.status == 0, run.tail()
    assert [step["train/stale_rows"] for step in run.steps] == [0, 16, 0]
    assert [step["accounts/trimmed_rollouts"] for step in run.steps] == [16, 32, 48]
    assert run.steps[1]["train/stale_log_prob_diff_mean"] > 1e-4
    # The mean of the log-ratio, which recomputed log-probs would make 0.
    assert [abs(step["actor/ppo_kl"]) > 1e-6 for step in run.steps] == [False, True, False]
    assert_accounts_sum(run)


@pytest.mark.slow
def test_the_batch_filter_rejects_inside_the_loop_and_the_batch_is_full(launch: Launch, tmp_path: Path) -> None:
    dumps = tmp_path / "rollouts"
    run = launch(
        MODE,
        "+batch_filter.sample_oversampling_factor=2.0",
        "+batch_filter.prompt_oversampling_factor=1.5",
        "+batch_filter.enable_two_gate_filter=True",
        "+batch_filter.gate2_instability_threshold=-2.3",  # no token less than a tenth as likely as the best
        f"trainer.rollout_data_dir={dumps}",
    )
    assert_trained(run, 1, 2)
    for step in (1, 2):
        groups = trained_groups(dumps, step)
        assert_full_of_signal(groups)
        assert all(3 <= len(scores) <= 4 for scores in groups.values())
    assert run.steps[-1]["accounts/rejected_rollouts"] > 0
    assert any(0 < step["filter/gate2_rejection_rate"] < 1 for step in run.steps)
    assert all(step["filter/gate1_missing_tensors"] == step["filter/gate2_missing_tensors"] == 0 for step in run.steps)
    assert_accounts_sum(run)


def wells(task: Task, tmp_path: Path, *places: int) -> list[str]:
    """Only the prompts at these places of the data have signal, each with as many right answers as wrong ones."""
    rows = pandas.read_parquet(task.train)
    indices = [int(rows["extra_info"][place]["index"]) for place in places]
    (tmp_path / "wells.json").write_text(json.dumps(indices))
    return ["data.shuffle=False", *rewards(tmp_path, "every_other_where_there_is_water")]


@pytest.mark.slow
def test_ppo_with_a_critic_filters_on_the_reward_after_the_kl_penalty_and_fills_up_what_it_cannot_have(
    launch: Launch, task: Task, tmp_path: Path
) -> None:
    dumps = tmp_path / "rollouts"
    run = launch(
        MODE,
        FILTER,
        "algorithm.filter_groups.metric=seq_final_reward",
        "+algorithm.filter_groups.min_std=1e-2",  # before the first update the penalty is nothing: scores alone differ
        "algorithm.filter_groups.max_num_gen_batches=2",
        "+algorithm.filter_groups.on_exhausted=backfill",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        f"trainer.rollout_data_dir={dumps}",
        *wells(task, tmp_path, *range(4), *range(8, 10), *range(16, 32)),
    )
    assert_trained(run, 1, 2)
    first, second = run.steps
    flat = [scores for scores in trained_groups(dumps, 1).values() if len(set(scores)) == 1]
    assert len(trained_groups(dumps, 1)) == 8
    assert len(flat) == first["train/groups_backfilled"] == 2  # six of sixteen have signal
    assert_full_of_signal(trained_groups(dumps, 2))
    assert second["train/groups_backfilled"] == 0
    assert second["accounts/rejected/no_variance_after_kl_rollouts"] == 8 * 4
    assert second["accounts/backfilled_rollouts"] == 2 * 4
    assert_accounts_sum(run)


@pytest.mark.slow
@pytest.mark.runs(2)
def test_data_without_signal_end_the_run_in_the_documented_words_and_it_goes_on_to_the_end_of_its_epoch(
    launch: Launch, task: Task, tmp_path: Path
) -> None:
    common = [
        MODE,
        FILTER,
        "trainer.total_training_steps=null",
        "trainer.total_epochs=1",
        "trainer.save_freq=1000000",
        "trainer.test_freq=1000000",
        "trainer.resume_mode=auto",
        *wells(task, tmp_path, *range(20)),
    ]
    first = launch(*common, "algorithm.filter_groups.max_num_gen_batches=2")
    assert first.status != 0
    assert "num_gen_batches=2 >= max_num_gen_batches=2." in first.log
    assert "Generated too many batches. Please check if your data are too difficult." in first.log
    last = first.steps[-1]
    assert last["step"] == 2  # of twenty prompts with signal, eight an update
    saved = tmp_path / "checkpoints" / "global_step_2"
    assert f"What was generated is saved in {saved}." in first.log
    assert (saved / "actor").is_dir()

    (tmp_path / "rain").touch()
    second = launch(*common)
    assert second.status == 0, second.tail()
    assert f"Goldilocks goes on from {saved}: " in second.log
    next_step, end = second.steps[0], second.steps[-1]
    assert next_step["step"] == 3
    assert next_step["data/prompts_issued"] == last["data/prompts_issued"] + next_step["train/prompts_issued"]
    assert next_step["train/prompts_issued"] > 16  # those of the unfinished step are not asked for again
    assert next_step["accounts/trained_rollouts"] == last["accounts/trained_rollouts"] + 32
    assert_accounts_sum(second)

    assert end["step"] < 12  # which is verl's count of an epoch of 100 prompts, if all were trained
    assert 100 - end["data/prompts_issued"] < 8
    assert all(("val-core/addition/acc/mean@1" in step) == (step is end) for step in second.steps)
    assert (tmp_path / "checkpoints" / f"global_step_{end['step']}" / "goldilocks.npz").exists()
