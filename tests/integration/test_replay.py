"""Replay on the real trainer: groups are trained again, a rollout is generated once, and a resumed run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
from documented_metrics import undocumented

from goldilocks.runs.records import read_records

from .conftest import Launch

pytestmark = [pytest.mark.integration, pytest.mark.runs(2)]

EVERY_OTHER = '''
import collections

scored = collections.Counter()

def every_other(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """There is one reward worker, so it sees every answer to a prompt: each group has right and wrong ones."""
    scored[extra_info["index"]] += 1
    acc = float(scored[extra_info["index"]] % 2)
    return {"score": acc, "acc": acc}
'''


def test_groups_are_trained_again_against_the_policy_that_wrote_them_also_after_a_resume(
    launch: Launch, tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(EVERY_OTHER)
    words = [
        "trainer.v1.trainer_mode=goldilocks",
        "+goldilocks.replay.groups=4",
        "+goldilocks.replay.max_age=2",
        "+goldilocks.guard.enable=True",
        "+goldilocks.guard.bound=1e-9",  # beyond what the server and the trainer differ by, and nothing else is within
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",  # one step of the optimiser: the ratio begins where it is
        f"trainer.rollout_data_dir={tmp_path / 'rollouts'}",
        f"trainer.default_local_dir={tmp_path / 'checkpoints'}",
        "trainer.save_freq=2",
        f"reward.custom_reward_function.path={tmp_path / 'rewards.py'}",
        "reward.custom_reward_function.name=every_other",
    ]
    first = launch(*words, "trainer.total_training_steps=2")
    assert first.status == 0, first.tail()
    skipping = "+goldilocks.guard.skip=1e-9"  # an update on groups that another policy wrote is not made
    second = launch(*words, skipping, "trainer.total_training_steps=4", "trainer.resume_mode=auto")
    assert second.status == 0, second.tail()

    steps = [step for run in (first, second) for step in run.steps if "actor/grad_norm" in step]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    n = steps[0]["accounts/trained_rollouts"] / 8
    assert [step["replay/groups"] for step in steps] == [0, 4, 4, 4]
    assert [step["train/stale_rows"] for step in steps] == [0, 4 * n, 4 * n, 4 * n]
    assert [step["replay/total_rollouts"] for step in steps] == [0, 4 * n, 8 * n, 12 * n]
    assert [step["accounts/generated_rollouts"] for step in steps] == [8 * n, 16 * n, 24 * n, 32 * n]
    # The third update is skipped, so the groups of the third batch are trained again by the policy that wrote them.
    assert [step["replay/skipped_updates"] for step in steps] == [0, 0, 1, 0]
    # Squares of the log-ratio, which do not cancel out; recomputed log-probs would make them 0.
    assert [step["replay/m2"] > 1e-9 for step in steps] == [False, True, True, False]
    assert [step["replay/guarded_rows"] > 0 for step in steps] == [False, True, True, False]
    assert all(step["replay/guarded_tokens"] >= step["replay/guarded_rows"] for step in steps)
    assert all(abs(steps[place]["actor/ppo_kl"]) < 1e-5 for place in (0, 3))
    assert all(step["replay/age_max"] <= 2 for step in steps)
    assert not undocumented(name for step in steps for name in step)

    rows = [row["uid"] for row in read_records(tmp_path / "rollouts") if not str(row["uid"]).startswith("pad")]
    assert len(rows) == len(set(rows)) == 32 * n, "a rollout is dumped with the batch that trains it first"
