"""verl 0.9.1 as it is installed, with nothing but the plug-in and ``+device=cpu``, from start to end.

A launch is most of what a test costs, so each one shows several things.
"""

from __future__ import annotations

import re

import pytest

from .conftest import Launch, kill

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ACCURACY = "val-core/addition/acc/mean@1"


@pytest.mark.runs(2)
def test_two_ranks_with_two_replicas_train_grpo_save_and_go_on_with_gspo(launch: Launch) -> None:
    grpo = launch("trainer.n_gpus_per_node=2", "trainer.save_freq=2", "trainer.test_freq=2")
    grpo.assert_trained(1, 2)
    assert re.search(r"LLMServerManager: \['[^']+:0', '[^']+:1'\]", grpo.log), "not two servers"
    gspo = launch(
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=3",
        "trainer.resume_mode=auto",
        "trainer.val_before_train=True",
        "actor_rollout_ref.actor.policy_loss.loss_mode=gspo",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        "actor_rollout_ref.actor.clip_ratio_low=3e-4",
        "actor_rollout_ref.actor.clip_ratio_high=4e-4",
        # Four updates of a batch: at the later ones the ratio has gone where the advantage drew it, and is clipped.
        "actor_rollout_ref.actor.ppo_epochs=4",
    )
    gspo.assert_trained(3)
    validated, trained = gspo.steps
    assert trained["actor/pg_clipfrac"] > 0
    sides = trained["actor/pg_clipfrac_lower"] + trained["actor/pg_clipfrac_upper"]
    assert sides == pytest.approx(trained["actor/pg_clipfrac"], abs=1e-6)
    assert trained["actor/seq_importance_ratio"] == pytest.approx(1, abs=0.1)
    # Validation is greedy: the same weights give the same answers.
    assert validated["step"] == 2
    assert validated[ACCURACY] == grpo.steps[-1][ACCURACY] > 0


def test_a_worker_that_dies_ends_the_run_with_the_reason(launch: Launch) -> None:
    run = launch("trainer.total_training_steps=1000", during=kill("AgentLoopWorker"))
    assert run.status == 1
    assert re.search(r"ActorDiedError: [^\n]*\n\s*class_name: AgentLoopWorker", run.log), run.tail()
