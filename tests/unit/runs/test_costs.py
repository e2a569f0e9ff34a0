"""What an update costs in rollouts beside one of GRPO's, and what a run has cost."""

from __future__ import annotations

from typing import Any

import pytest

from goldilocks.runs.costs import Progress, closing, hint, spending, updates_per_line
from goldilocks.runs.history import History


def config(batch: int, mini_batch: int, *, n: int = 8, epochs: int = 1, backend: str | None = None) -> dict[str, Any]:
    return {
        "data": {"train_batch_size": batch},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": mini_batch, "ppo_epochs": epochs}, "rollout": {"n": n}},
        "trainer": {"backend": backend},
    }


def totals(of_a_batch: int, batches: int, lines: int = 1, before: int = 0) -> list[int]:
    """The rollouts after each of a batch's lines, the first batch twice as dear."""
    return [before + of_a_batch * (number + 2) for number in range(batches) for _ in range(lines)]


def test_more_than_four_times_grpos_rollouts_are_said_after_three_batches_and_not_by_the_first() -> None:
    assert hint(config(16, 16), totals(4 * 128, 10)) is None
    assert hint(config(16, 16), totals(4 * 128 + 1, 10)) is not None
    assert hint(config(16, 16), []) is None
    assert hint(config(16, 16), [100_000]) is None
    assert hint(config(16, 16), totals(900, 3)) is None
    assert hint(config(16, 16), totals(900, 4)) is not None
    assert hint(config(16, 16), totals(128, 4, before=100_000)) is None, "a resumed run has a total at its first line"


def test_the_sizes_that_make_as_many_updates_are_named() -> None:
    assert hint(config(16, 16), totals(900, 10)) == (
        "an update costs 900 rollouts, 7.0 times GRPO's 128: "
        "actor_rollout_ref.actor.ppo_mini_batch_size=2 would make as many updates of them, "
        "or data.train_batch_size=2 with actor_rollout_ref.actor.ppo_mini_batch_size=2, each from newer rollouts"
    )


@pytest.mark.parametrize("backend", [None, "trl"])
@pytest.mark.parametrize(("batch", "mini_batch", "epochs"), [(16, 16, 1), (512, 32, 1), (64, 16, 2), (12, 12, 1)])
def test_with_those_sizes_there_are_as_many_updates_as_grpos(
    backend: str | None, batch: int, mini_batch: int, epochs: int
) -> None:
    lines = batch // mini_batch * epochs if backend else 1
    of_a_batch = 6 * batch * 8
    said = hint(config(batch, mini_batch, epochs=epochs, backend=backend), totals(of_a_batch, 6, lines))
    assert said is not None
    assert f"6.0 times GRPO's {mini_batch * 8 // epochs:,}: " in said
    words = said.replace(",", " ").split()
    first, smaller, size = (int(word.split("=")[1]) for word in words if "=" in word)
    assert batch % first == 0
    assert smaller // size == batch // mini_batch
    of_a_group, plain = of_a_batch / batch, mini_batch * 8 / epochs
    assert first * of_a_group / epochs <= plain
    assert size * of_a_group / epochs <= plain < (size + 1) * of_a_group / epochs


def test_where_no_size_makes_as_many_updates_that_is_said_and_the_smallest_mini_batch_cannot_be_smaller() -> None:
    fewer = "ppo_mini_batch_size=1 would make 4 times the updates, still fewer than GRPO's, of them, or data.train"
    assert fewer in (hint(config(4, 4), totals(19 * 32, 6)) or "")
    smallest = hint(config(4, 1), totals(4 * 8 * 10, 6)) or ""
    assert smallest.endswith("choose prompts that differ more (goldilocks.selector), or other data")


def test_a_line_of_verl_is_a_batch_and_one_of_trl_an_update() -> None:
    assert updates_per_line(config(64, 16, epochs=2)) == 8
    assert updates_per_line(config(64, 16, epochs=2, backend="trl")) == 1
    assert updates_per_line({}) == 1


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


def test_the_closing_line_says_what_uniform_sampling_needs_where_that_is_known() -> None:
    counted = {f"accounts/{name}_rollouts": count for name, count in (("generated", 2_000), ("trained", 500))}
    assert closing(counted) == "2,000 generated, 500 trained (25%)"
    estimated = {"selector/uniform_rollouts": 9_000.4, "selector/informative_groups": 60}
    uniform = "; uniform sampling would need about 9,000 for the same 60 informative groups"
    assert closing({**counted, **estimated, "accounts/filtered_rollouts": 300}).endswith(
        f"300 in dropped groups{uniform}"
    )
