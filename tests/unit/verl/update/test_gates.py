"""What the gates reject inside the refill loop, and what stays in a group's baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from builders import settings, source
from hypothesis import given
from hypothesis import strategies as st
from verl_world import Queue

from goldilocks.config.settings import Settings
from goldilocks.core import Collector
from goldilocks.drive.backend import Rounds, places
from goldilocks.drive.driver import Driver
from goldilocks.drive.gate import Judgement
from goldilocks.drive.rows import NoRows
from goldilocks.filtering import PPOFilterConfig
from goldilocks.types import Group, Request, Rollout
from goldilocks.verl.store import batch_of, untrained_of
from goldilocks.verl.update.gates import BatchFilterGate, FinalRewardGate, build_gate

TOKENS = 5


def prepare(groups: Sequence[Group]) -> None:
    """Do nothing: the rows have their log-probs."""


def built(chosen: Settings, policy: int) -> BatchFilterGate:
    gate = build_gate(chosen, "kl", lambda: 0.0, lambda: policy, prepare)
    assert isinstance(gate, BatchFilterGate)
    return gate


class Shown(BatchFilterGate):
    """The batch filter on rows without a queue; ``judged`` are the groups it was shown."""

    def __init__(self, config: PPOFilterConfig) -> None:
        super().__init__(config, 1, lambda: 0, prepare)
        self.judged: set[str] = set()

    def judge(self, groups: Sequence[Group]) -> Judgement:
        self.judged |= {group.uid for group in groups}
        rollouts = [rollout for group in groups for rollout in group.trained]
        data = {
            "rewards": torch.tensor([rollout.reward for rollout in rollouts]),
            "response_mask": torch.ones(len(rollouts), TOKENS, dtype=torch.long),
        }
        return self.judge_rows([(rollout.uid, rollout.index) for rollout in rollouts], data)


class Run:
    """Updates with a batch filter, as the V1 trainer makes them, without a model.

    Of every five prompts, ``informative`` have right and wrong answers in turn; the others only wrong ones.
    """

    def __init__(self, informative: int, *overrides: str) -> None:
        chosen = settings(*overrides, batch=16)
        assert chosen.gate_config is not None
        self.informative = informative
        self.collector: Collector = chosen.collector(source(1000))
        self.gate = Shown(chosen.gate_config)
        self.driver = Driver(self.collector, Rounds(self._answers), NoRows(), self.gate)
        self.lost = 0  # groups with signal that were rejected

    def update(self) -> tuple[Group, ...]:
        groups = self.driver.batch()
        gone = self.gate.judged - {group.uid for group in groups}
        self.lost += sum(int(uid[1:]) % 5 < self.informative for uid in gone)
        self.gate.judged.clear()
        return groups

    @property
    def generated(self) -> float:
        return self.collector.metrics()["accounts/generated_rollouts"]

    def _answers(self, requests: Sequence[Request]) -> Iterator[Rollout]:
        for request, index, _ in places(requests):
            mixed = int(request.uid[1:]) % 5 < self.informative
            yield Rollout(request.uid, index, float(mixed and index % 2), TOKENS)


@pytest.mark.parametrize(
    ("overrides", "informative", "most"),
    [
        (["batch_filter.prompt_oversampling_factor=2.0"], 5, 1.1),  # the first wave is twice the batch: half is carried
        (["batch_filter.prompt_oversampling_factor=2.0", "algorithm.filter_groups.enable=true"], 3, 1.75),
        (["batch_filter.target_num_groups=16", "data.gen_batch_size=32"], 5, 1.1),
    ],
)
def test_prompts_are_oversampled_once_and_surplus_carried(overrides: list[str], informative: int, most: float) -> None:
    """Groups with signal are paid for once: 1 over the share that is informative, not twice that."""
    run = Run(informative, *overrides)
    trained = sum(len(group.trained) for _ in range(20) for group in run.update())
    assert trained == 20 * 16 * 4
    assert run.lost == 0
    assert run.generated / trained < most


def test_rows_cut_to_the_group_size_stay_in_the_baseline() -> None:
    run = Run(4, "batch_filter.sample_oversampling_factor=2.0")
    for update in range(1, 4):
        groups = run.update()
        assert {len(group.trained) for group in groups} == {4}
        assert {sum(group.rewards) for group in groups} == {4}  # of 8 that were rolled out
        for group, others in zip(groups, untrained_of(groups).values(), strict=True):
            seen = [*(rollout.reward for rollout in group.trained), *(one.reward for one in others)]
            assert sorted(seen) == sorted(group.rewards)
        metrics = run.collector.metrics()
        assert metrics["accounts/trained_rollouts"] == metrics["accounts/trimmed_rollouts"] == update * 16 * 4
        assert metrics["accounts/rejected_rollouts"] % 8 == 0  # whole groups, without signal


def test_a_group_whose_trained_rows_all_fail_a_gate_is_lost_and_none_of_its_other_rows_is_trained(queue: Queue) -> None:
    """``max_train_n`` trains two of four rows. Log-probs are computed of those two, and the gate sees no others."""
    chosen = settings(
        "batch_filter.enable_two_gate_filter=true",
        "batch_filter.target_group_size=2",
        "data.train_batch_size=1",
        "adaptive_rollout={enable: true, min_rollouts: 4, max_n: 4, max_train_n: 2}",
    )
    gate, subject = built(chosen, policy=0), chosen.collector(source(9))
    (request,) = subject.requests()
    for index in range(4):
        key = f"{request.uid}_{index}_0"
        queue.add(key, 0, TOKENS, rollout_log_probs=-9.0)
        subject.observe(Rollout(request.uid, index, float(index % 2), TOKENS, payload=[[key, queue.tags[key]]]))
    batch = batch_of(subject.take())
    for key in batch.keys:
        queue.rows[key]["old_log_probs"] = torch.full((TOKENS,), -1.0)  # far from what the engine says
    refused, _, _ = gate.judge_batch(batch)
    assert refused == {"g0": [0, 1]}
    assert subject.reject(refused, gate.reason) == ("g0",)
    assert batch_of(subject.in_hand).keys == []


def test_on_is_on_every_group_is_judged_also_where_none_is_larger_than_the_target(queue: Queue) -> None:
    rows_of_a_group(queue, 3, 3, 3, 3, now=-1.0, written=-1.0)
    queue.rows["g1_2_0"]["rollout_log_probs"] = queue.rows["g1_2_0"]["rollout_log_probs"] - 1.0
    for overrides in ([], ["batch_filter.prompt_oversampling_factor=2.0"]):
        gate = built(settings("batch_filter.enable_two_gate_filter=true", *overrides), policy=3)
        refused, _, metrics = gate.judge_batch(queue.batch())
        assert refused == {"g1": [2]}
        assert metrics["filter/gate1_rejection_rate"] == 1 / 4


def test_a_batch_that_was_filled_up_again_is_full_and_its_losses_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(1, "batch_filter.enable=true")  # four of five groups are refused, and replaced one by one at the end
    groups = run.update()
    metrics = run.driver.metrics()
    assert len(groups) == 16
    assert metrics["batch/batch_size_ratio"] == 1
    assert metrics["batch/low_batch_size_warning"] == metrics["batch/critical_empty_batch"] == 0
    assert metrics["train/groups_rejected"] > 0
    kept = metrics["train/groups_judged"] - metrics["train/groups_rejected"]
    assert metrics["train/filtered_prompts_ratio"] == kept / metrics["train/groups_judged"] < 0.3
    assert "kept none" not in caplog.text


def test_a_batch_that_shrank_is_not_full() -> None:
    limits = [f"algorithm.filter_groups.{key}" for key in ("max_num_gen_batches=1", "on_exhausted=shrink")]
    run = Run(1, "batch_filter.enable=true", *limits)
    groups = run.update()
    assert len(groups) < 8
    metrics = run.driver.metrics()
    assert metrics["batch/batch_size_ratio"] == len(groups) / 16
    assert metrics["batch/low_batch_size_warning"] == 1
    of_two = run.driver.gate.combined(run.driver._judgements, groups, batches=2)
    assert of_two["batch/batch_size_ratio"] == len(groups) / 32


def test_small_groups_of_an_adaptive_allocator_are_trained() -> None:
    run = Run(5, "batch_filter.enable=true", "actor_rollout_ref.rollout.n=8", "adaptive_rollout.enable=true")
    groups = run.update()
    assert {len(group) for group in groups} == {2}  # the second answer is right: it is enough, and below 8 // 2 + 1
    metrics = run.driver.metrics()
    assert metrics["train/groups_rejected"] == 0
    assert metrics["batch/batch_size_ratio"] == 1


def rows_of_a_group(queue: Queue, *versions: int, now: float, written: float) -> None:
    for index, version in enumerate(versions):
        queue.add(
            f"g1_{index}_0", version, 2 + index, old_log_probs=now, rollout_log_probs=written, ref_log_prob=written
        )


def test_a_row_that_fails_a_gate_leaves_the_baseline_and_a_stale_one_is_not_held_to_the_current_policy(
    queue: Queue,
) -> None:
    rows_of_a_group(queue, 3, 3, 3, 3, 2, 2, now=-1.0, written=-1.0)
    for key in ("g1_0_0", "g1_4_0"):  # both differ from what the current policy gives; the second is older than it
        queue.rows[key]["rollout_log_probs"] = queue.rows[key]["rollout_log_probs"] - 1.0
    chosen = settings("batch_filter.enable_two_gate_filter=true", "batch_filter.target_group_size=4")
    refused, cut, metrics = built(chosen, policy=3).judge_batch(queue.batch())
    assert metrics["filter/gate1_rejection_rate"] == pytest.approx(1 / 6)
    assert refused == {"g1": [0]}
    assert len(cut["g1"]) == 1  # six rows: one failed, four are trained


@pytest.mark.parametrize("beta", [0.001, 0.1])
def test_the_final_reward_drops_equal_rewards_whatever_the_penalties(queue: Queue, beta: float) -> None:
    """Once the policy has moved, no two penalties are equal: rows here differ in length."""
    rows_of_a_group(queue, 3, 3, 3, now=-1.0, written=-2.0)
    flat = {
        key.replace("g1", "g2"): {**row, "rm_scores": torch.zeros_like(row["rm_scores"])}
        for key, row in queue.rows.items()
    }
    queue.rows |= flat
    queue.tags |= {key: {"min_global_steps": 3, "global_steps": 4} for key in flat}
    varies, stated = (FinalRewardGate("kl", lambda: beta, least, prepare) for least in (None, 1e-6))
    assert varies.judge_batch(queue.batch()).refused == {"g2": [0, 1, 2]}
    assert stated.judge_batch(queue.batch()).refused == {}  # taken at its word


# -- several rows a rollout --------------------------------------------------------------------------------------------


def test_a_rollout_is_judged_by_all_its_rows(queue: Queue) -> None:
    """Of four rollouts one fails the gate in its first row alone: it is refused whole, and counts as one of four."""
    for index, rows in enumerate((3, 1, 2, 1)):
        for part in range(rows):
            queue.add(f"g1_{index}_{part}", 3, 2 + part, old_log_probs=-1.0, rollout_log_probs=-1.0)
    queue.rows["g1_2_0"]["rollout_log_probs"] = queue.rows["g1_2_0"]["rollout_log_probs"] - 1.0
    chosen = settings("batch_filter.enable_two_gate_filter=true")
    refused, cut, metrics = built(chosen, policy=3).judge_batch(queue.batch())
    assert (refused, cut) == ({"g1": [2]}, {})
    assert metrics["filter/gate1_rejection_rate"] == 1 / 4
    assert metrics["batch/total_samples_generated"] == 4


def test_the_final_reward_of_a_rollout_has_the_penalties_of_all_its_rows(queue: Queue) -> None:
    """Rewards 0 and 1; the second rollout has a row more, whose penalty is 1: their final rewards are the same."""
    for key, written in {"g1_0_0": -1.0, "g1_1_0": -2.0, "g1_1_1": -1.0}.items():
        queue.add(key, 3, 1, old_log_probs=-1.0, ref_log_prob=written)
    queue.rows["g1_1_0"]["rm_scores"] = torch.ones(1)
    assert FinalRewardGate("kl", lambda: 1.0, 1e-6, prepare).judge_batch(queue.batch()).refused == {"g1": [0, 1]}


def test_a_group_of_one_rollout_has_no_final_reward_to_differ_from(queue: Queue) -> None:
    queue.add("g1_0_0", 3, 1, old_log_probs=-1.0, ref_log_prob=-2.0)
    assert FinalRewardGate("kl", lambda: 1.0, 1e-6, prepare).judge_batch(queue.batch()).refused == {"g1": [0]}


@given(st.lists(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 4)), min_size=2, max_size=5), max_size=4))
def test_the_batch_filter_sees_rollouts_however_many_rows_they_have(groups: list[list[tuple[int, int]]]) -> None:
    """``groups`` has the reward and the rows of each rollout: every row has TOKENS tokens, and one row all of them."""
    chosen = PPOFilterConfig(target_group_size=2, min_group_size=2, sample_selection_strategy="efficiency")
    found = [(f"g{uid}", index, *one) for uid, group in enumerate(groups) for index, one in enumerate(group)]
    rows = [(uid, index, part, reward) for uid, index, reward, parts in found for part in range(parts)]
    several = {
        "rewards": torch.tensor([float(reward) for *_, reward in rows]),
        "response_mask": torch.ones(len(rows), TOKENS, dtype=torch.long),
    }
    lengths = torch.tensor([TOKENS * parts for *_, parts in found])
    once = {
        "rewards": torch.tensor([float(reward) for *_, reward, _ in found]),
        "response_mask": (torch.arange(4 * TOKENS) < lengths.unsqueeze(-1)).long(),
    }
    by_rows = Shown(chosen).judge_rows([(uid, index) for uid, index, *_ in rows], several)
    assert by_rows == Shown(chosen).judge_rows([(uid, index) for uid, index, *_ in found], once)
