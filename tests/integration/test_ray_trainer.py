"""The drop-in class on real verl: the guide's two examples, and its command line for adaptive rollouts.

A launch is most of what a test costs, so each one shows several things.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from statistics import pstdev

import pytest
from run_files import json_lines

from .conftest import Launch

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parent / "examples"

# Of three prompts one has a right answer among two, one from the third on, and one is always answered right.
REWARD = """
import collections

scored = collections.Counter()

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    scored[extra_info["index"]] += 1
    wrong = 2 - extra_info["index"] % 3
    return float(scored[extra_info["index"]] > wrong)
"""

# `python3 -m verl.trainer.main_ppo_adaptive …` on a machine where nobody has said that there is no GPU.
GUIDES_LINE = """
import os, runpy, sys
del os.environ["VERL_PLATFORM"]
sys.argv.remove("+device=cpu")
runpy.run_module("verl.trainer.main_ppo_adaptive", run_name="__main__")
"""


def trained_groups(dump: Path, step: int) -> dict[str, list[float]]:
    """The rewards of one training batch by prompt, as verl dumped it."""
    groups = defaultdict(list)
    for row in json_lines(dump / f"{step}.jsonl"):
        groups[row["input"]].append(row["score"])
    return groups


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    folder = tmp_path / "dump"
    folder.mkdir()
    return folder


def test_the_first_example_trains_only_what_varies_goes_on_and_says_when_the_data_run_dry(
    launch: Launch, dump: Path
) -> None:
    run = launch(f"+dump={dump}", program=[str(EXAMPLES / "grpo.py")])
    assert [step["step"] for step in run.steps] == [1, 2, 3, 4, 5], run.tail()
    for step in run.steps:
        groups = trained_groups(dump, int(step["step"]))
        assert [len(rewards) for rewards in groups.values()] == [5] * 2
        assert min(map(pstdev, groups.values())) > 0
        assert step["accounts/trained_rollouts"] == 10 * step["step"]
        assert step["data/epoch"] == step["data/prompts_issued"] / 100
        assert step["timing_s/gen"] >= step.get("timing_s/agent_loop/slowest/generate_sequences", 0)
        assert step["timing_s/step"] > step["timing_s/gen"]
    assert run.steps[0]["training/rollout_probs_diff_max"] < 1e-5
    assert run.steps[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-5)
    assert run.steps[1]["training/rollout_probs_diff_max"] > 1e-5  # what was carried is one update old
    assert run.steps[0]["train/groups_carried"] > 0
    assert run.steps[1]["train/prompts_issued"] == 0  # a batch of nothing but surplus
    assert "Setting global step to 5" in run.log
    assert run.status == 1
    # in the sixth step, or in the one after it where there was surplus for the sixth
    words = r"num_gen_batches=10 >= max_num_gen_batches=10\. Generated too many batches\. "
    words += r"Please check if your data are too difficult\. What was generated is saved in .*/global_step_[56]\."
    assert re.search(f"Exhausted: {words}", run.log), run.tail()


@pytest.mark.slow
def test_the_second_example_trains_a_critic_and_validates_with_its_own_reward(launch: Launch, dump: Path) -> None:
    run = launch(f"+dump={dump}", program=[str(EXAMPLES / "ppo.py")])
    assert run.status == 0, run.tail()
    assert [step["step"] for step in run.steps] == [1, 2, 3]
    for step in run.steps:
        groups = trained_groups(dump, int(step["step"]))
        assert [len(rewards) for rewards in groups.values()] == [4] * 4
        assert min(map(pstdev, groups.values())) > 0
        assert step["critic/grad_norm"] > 0
    assert ["actor/grad_norm" in step for step in run.steps] == [False, True, True]  # after the critic's warm-up
    assert run.steps[-1]["val-core/addition/acc/mean@1"] == 7  # which no training prompt can earn


@pytest.mark.slow
def test_the_guides_line_for_adaptive_rollouts_on_two_ranks_judged_by_the_final_reward(
    launch: Launch, dump: Path, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    run = launch(
        "trainer.use_v1=False",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=3",
        f"trainer.rollout_data_dir={dump}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.rollout.agent.num_workers=2",
        "algorithm.use_kl_in_reward=True",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=seq_final_reward",
        "++algorithm.filter_groups.min_std=0.05",
        "+adaptive_rollout.enable=True",
        "+adaptive_rollout.max_n=11",
        "+adaptive_rollout.rollouts_per_batch=3",
        "+adaptive_rollout.positive_threshold=0.5",
        "+adaptive_rollout.min_rollouts=2",
        program=["-c", GUIDES_LINE],
    )
    assert run.status == 0, run.tail()
    assert [step["step"] for step in run.steps] == [1, 2, 3]
    sizes = set()
    for step in run.steps:
        groups = trained_groups(dump, int(step["step"]))
        assert len(groups) == 8
        assert min(map(pstdev, groups.values())) > 0.05
        assert 0 < step["actor/grad_norm"] < 1e3
        assert step["adaptive_rollout/min_rollouts_per_sample"] in (2, 5, 8, 11)
        assert step["adaptive_rollout/max_rollouts_per_sample"] <= 11
        sizes |= set(map(len, groups.values()))
    assert sizes == {2, 5}
    assert min(step["adaptive_rollout/min_rollouts_per_sample"] for step in run.steps) == 2
    assert run.steps[-1]["accounts/rejected/no_variance_after_kl_rollouts"] > 0
