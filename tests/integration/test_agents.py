"""An agent loop with a tool that returns several rows a rollout, on the real trainer."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from run_files import json_lines

from goldilocks.verl.store import load_rows

from .agent import EACH, OPENED, answered, journal_of, with_agent
from .conftest import Launch, Task
from .killed import assert_none_twice, killed, trained_groups
from .paused import of_all_lengths
from .test_trainer import MODE, assert_accounts_sum, assert_full_of_signal, assert_trained, rewards

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_rollouts_of_several_rows_count_once_and_tools_of_cancelled_ones_are_told(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = launch(
        MODE,
        "algorithm.adv_estimator=rloo",
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=score",
        "+algorithm.filter_groups.on_full=requeue",
        f"data.gen_batch_size={OPENED}",
        f"actor_rollout_ref.rollout.n={EACH}",
        *with_agent(tmp_path, monkeypatch, cut=True),
        *rewards(tmp_path, "right_from_the_third_on"),
    )
    assert_trained(run, 1, 2)
    assert_accounts_sum(run)
    rows = json_lines(tmp_path / "rollouts" / "1.jsonl")
    parts: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        uid, index, _ = row["uid"].rsplit("_", 2)
        if not uid.startswith("pad"):
            parts[uid, index].append(row["score"])
    assert {len(scores) for scores in parts.values()} == {2, 3}
    assert all(len(set(scores)) == 1 for scores in parts.values())
    groups = {uid: [parts[uid, str(index)][0] for index in range(3)] for uid, _ in parts}
    assert len(groups) == 8
    assert all(sorted(scores) == [0, 0, 1] for scores in groups.values())
    first = run.steps[0]
    assert first["accounts/trained_rollouts"] == len(parts) == 24
    assert first["accounts/tool_tokens"] > 0
    journal = Counter((what, uid) for what, uid, _ in journal_of(run))
    for uid in groups:
        assert (journal["waits", uid], journal["answers", uid], journal["released", uid]) == (0, EACH, EACH)
    for number in range(1, OPENED, 2):  # cancelled: their calls were told of before the second step began
        uid = f"g{number}"
        assert (journal["waits", uid], journal["answers", uid], journal["released", uid]) == (EACH, 0, EACH)
    # Charged to the step that cancelled them, with those of groups that were opened when the first ones were kept.
    assert (
        OPENED // 2 * EACH <= first["accounts/cancelled_rollouts"] == first["accounts/generated_rollouts"] - len(parts)
    )


LORA = [
    "actor_rollout_ref.model.lora_rank=4",  # of all layers, and without model.lora.merge, as verl has it by default
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "+goldilocks.on_stale_weights=error",
]


@pytest.mark.runs(2)
def test_conversations_pause_go_on_survive_a_kill_and_call_their_tool_once_in_each_life_of_the_run(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, task: Task, tmp_path: Path
) -> None:
    """With an adapter: our server has none, it samples from base and adapter merged, in each life of the run."""
    overrides = [*with_agent(tmp_path, monkeypatch, cut=False), MODE, *of_all_lengths(task, tmp_path), *LORA]
    overrides += ["+algorithm.filter_groups.on_full=partial", "data.gen_batch_size=12"]
    before = killed(launch, tmp_path, *overrides)
    saved = before.saved
    unfinished = unfinished_rows(tmp_path / "checkpoints" / f"global_step_{saved}")
    run = launch(*overrides, f"trainer.total_training_steps={saved + 4}", "trainer.resume_mode=auto")
    assert run.status == 0, run.tail()
    assert (f", {len(unfinished)} rollouts go on from what they had written" in run.log) == bool(unfinished)
    assert [step["step"] for step in run.steps] == [*range(saved + 1, saved + 5)]
    assert_accounts_sum(run)
    for step in (*before.run.steps, *run.steps):
        assert step["accounts/tool_tokens"] > 0
        assert step["train/age_max"] <= 4
        assert step["train/groups_expired"] == 0
    # A step may find its whole batch written while the one before was judged: then nothing goes on in it.
    for name in ("train/rollouts_paused", "accounts/paused_tokens", "train/age_max"):
        assert max(step[name] for step in run.steps) > 0
    assert any(0 < step.get("train/stale_tokens", 0) < step["response_length/mean"] * 32 for step in run.steps)
    for life in (before.run, run):
        assert len(answered(life)) == len(set(answered(life)))
        assert any("rollout/weights_gap" in step for step in life.steps)
        for step in life.steps:  # of an adapter that moves: an update is larger than what rounding explains
            assert step.get("rollout/weights_gap", 0.0) < 1e-5
            assert step["actor/grad_norm"] > 0
    after = [trained_groups(tmp_path / "rollouts", step) for step in range(saved + 1, saved + 5)]
    assert_none_twice(*before.trained.values(), *after)
    for groups in after:
        assert_full_of_signal(groups)


def unfinished_rows(checkpoint: Path) -> list[Any]:
    """Every rollout that was unfinished and had been answered something."""
    return [row for folder in checkpoint.rglob("unfinished") for row in load_rows(folder)]
