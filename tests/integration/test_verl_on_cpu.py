"""verl 0.9.1 as it is installed, with nothing but the plug-in and ``+device=cpu``, and our trainer with everything off.

A launch is most of what a test costs, so each one shows several things.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_files import json_lines

from .conftest import Launch, kill

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ACCURACY = "val-core/addition/acc/mean@1"
DATA = "data.seed=7"


def dumped(folder: Path, step: int, *names: str) -> list[tuple[str, ...]]:
    """These columns of every row that was dumped in a step."""
    return sorted(tuple(row[name] for name in names) for row in json_lines(folder / f"{step}.jsonl"))


@pytest.mark.runs(4)
def test_two_ranks_train_grpo_end_with_a_dead_worker_go_on_with_gspo_and_everything_off_trains_their_prompts(
    launch: Launch, tmp_path: Path
) -> None:
    dumps = tmp_path / "verl"
    grpo = launch(
        *("trainer.n_gpus_per_node=2", "trainer.save_freq=2", "trainer.test_freq=2", DATA),
        *("trainer.total_training_steps=1000", f"trainer.rollout_data_dir={dumps}"),
        during=kill("AgentLoopWorker", once=dumps / "3.jsonl"),  # by then those of the first two steps are whole
    )
    assert grpo.status == 1
    assert re.search(r"ActorDiedError: [^\n]*\n\s*class_name: AgentLoopWorker", grpo.log), grpo.tail()
    assert re.search(r"LLMServerManager: \['[^']+:0', '[^']+:1'\]", grpo.log), "not two servers"
    before = grpo.updates()
    saved = 2  # the worker may die between a later save and its step's metrics
    assert list(before)[:saved] == [1, 2]
    gspo = launch(
        "trainer.n_gpus_per_node=2",
        f"trainer.total_training_steps={saved + 1}",
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path / 'checkpoints' / f'global_step_{saved}'}",
        "trainer.val_before_train=True",
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        "actor_rollout_ref.actor.clip_ratio_low=3e-4",
        "actor_rollout_ref.actor.clip_ratio_high=4e-4",
        # Four updates of a batch: at the later ones the ratio has gone where the advantage drew it, and is clipped.
        "actor_rollout_ref.actor.ppo_epochs=4",
    )
    assert gspo.status == 0, gspo.tail()
    assert list(gspo.updates()) == [saved + 1]
    validated, trained = gspo.steps
    assert trained["actor/pg_clipfrac"] > 0
    sides = trained["actor/pg_clipfrac_lower"] + trained["actor/pg_clipfrac_upper"]
    assert sides == pytest.approx(trained["actor/pg_clipfrac"], abs=1e-6)
    assert trained["actor/seq_importance_ratio"] == pytest.approx(1, abs=0.1)
    # Validation is greedy: the same weights give the same answers.
    assert validated["step"] == saved
    assert validated[ACCURACY] == before[saved][ACCURACY] > 0

    prompts = [dumped(dumps, step, "input") for step in (1, 2)]
    assert prompts[0] != prompts[1]
    check_everything_off(launch, tmp_path, prompts)


def check_everything_off(launch: Launch, folder: Path, prompts: list[list[tuple[str, ...]]]) -> None:
    """Our trainer with a critic has verl's prompts, and a second run with its seed the same answers to the letter."""
    ppo = [
        "trainer.v1.trainer_mode=goldilocks",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_penalty=low_var_kl",  # an estimate that no sample can make negative
        "critic.optim.lr=1e-3",
        DATA,
        "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
        "trainer.val_before_train=True",
    ]
    answers = []
    for name in ("once", "again"):
        dumps, validated = folder / name, folder / f"{name} validated"
        run = launch(*ppo, f"trainer.rollout_data_dir={dumps}", f"trainer.validation_data_dir='{validated}'")
        assert run.status == 0, run.tail()
        first, second = run.updates().values()
        assert first["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-8)  # the policy is still its reference
        assert second["actor/reward_kl_penalty"] > 1e-6
        for step in (first, second):
            assert step["critic/lr"] == pytest.approx(1e-3)
            assert step["critic/grad_norm"] > 0
            assert 0 < step["critic/vf_loss"] < 1
        assert [dumped(dumps, step, "input") for step in (1, 2)] == prompts
        # One seed, the same noise. Not after an update: verl draws the critic's value head without a seed.
        answers.append((dumped(dumps, 1, "uid", "output"), dumped(validated, 0, "input", "output")))
    assert answers[0] == answers[1]
