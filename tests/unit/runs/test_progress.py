"""What ``goldilocks train`` says of a run's cost is what the report says of it."""

from __future__ import annotations

import pytest

from goldilocks.runs.costs import spending
from goldilocks.runs.history import History
from goldilocks.runs.progress import Progress

CONFIG = {"data": {"train_batch_size": 4}, "actor_rollout_ref": {"rollout": {"n": 8}}}
COLLECTED = {"accounts/generated_rollouts": 80, "accounts/generated_tokens": 1_234, "perf/total_num_tokens": 99_999}


def steps(**last: float) -> list[dict]:
    plain = {"critic/score/mean": 0.5, "response_length/mean": 20.5, "timing_s/step": 2.0}
    return [{"step": 1, "data": plain}, {"step": 2, "data": {**plain, **last}}]


@pytest.mark.parametrize("records", [steps(), [{"step": 1, "data": {**steps()[0]["data"], **COLLECTED}}]])
def test_the_summary_and_the_report_count_the_same_rollouts_and_tokens(records: list[dict]) -> None:
    progress = Progress(total_steps=2, rollouts_per_step=32)
    for record in records:
        progress.add(record)
    spent = spending(History.of(records), CONFIG)
    assert progress.rollouts == spent.total("rollouts")
    assert progress.tokens == spent.total("tokens")
    assert ("tokens", f"{progress.tokens:,} generated") in progress.summary(elapsed=4)


def test_tokens_are_those_generated_and_not_those_trained_with_their_prompts() -> None:
    progress = Progress(total_steps=2, rollouts_per_step=32)
    progress.add({"step": 1, "data": {"critic/score/mean": 0.5, **COLLECTED}})
    assert (progress.rollouts, progress.tokens) == (80, 1_234)
