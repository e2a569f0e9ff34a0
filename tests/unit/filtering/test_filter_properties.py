"""What holds of every batch and every configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from goldilocks.filtering import PPOBatchFilter, PPOFilterConfig
from goldilocks.filtering.config import STRATEGIES

TOKENS = 4


@dataclass(frozen=True)
class Case:
    """A batch whose rows are interleaved at random, and a configuration."""

    batch: dict[str, torch.Tensor]
    uids: list[str]
    config: PPOFilterConfig
    seed: int

    def run(self) -> tuple[list[int], dict[str, float]]:
        index, metrics = PPOBatchFilter(self.config, {"seed": self.seed}).filter_batch(
            self.batch, self.uids, return_indices=True
        )
        return index.tolist(), metrics

    def rows_of(self, uid: str, among: list[int] | None = None) -> list[int]:
        return [row for row in (range(len(self.uids)) if among is None else among) if self.uids[row] == uid]


@st.composite
def configs(draw: st.DrawFn) -> PPOFilterConfig:
    target = draw(st.integers(2, 5))
    length = draw(st.none() | st.integers(1, 8))
    return PPOFilterConfig(
        sample_selection_strategy=draw(st.sampled_from(STRATEGIES)),
        target_group_size=target,
        min_group_size=draw(st.none() | st.integers(target // 2 + 1, target)),
        target_num_groups=draw(st.none() | st.integers(1, 4)),
        reward_threshold=draw(st.none() | st.sampled_from([-0.5, 0.5])),
        max_response_length=length,
        remove_clip=length is not None and draw(st.booleans()),
        min_rollout_n=draw(st.integers(1, 3)),
        enable_two_gate_filter=draw(st.booleans()),
        gate_always=draw(st.booleans()),
        varying_group_sizes=draw(st.booleans()),
        gate1_mode=draw(st.sampled_from(["mean", "abs"])),
        prompt_oversampling_factor=draw(st.sampled_from([1.0, 1.5])),
    )


@st.composite
def cases(draw: st.DrawFn, configs: st.SearchStrategy[PPOFilterConfig] = configs()) -> Case:  # noqa: B008
    sizes = draw(st.lists(st.integers(1, 8), max_size=7))
    in_order = [f"prompt {group}" for group, size in enumerate(sizes) for _ in range(size)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    uids = [in_order[row] for row in torch.randperm(len(in_order), generator=generator).tolist()]

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    rows = len(uids)
    levels = torch.tensor(draw(st.sampled_from([[0.0, 1.0], [-1.0, 1.0], [-1.0, 0.0, 0.3, 1.0, 1.0]])))
    rollout = -random(rows, TOKENS)
    batch = {
        "rewards": levels[(random(rows) * len(levels)).long()],
        "response_lengths": (random(rows) * 10).long() + 1,
        "response_mask": torch.ones(rows, TOKENS, dtype=torch.bool),
        "rollout_log_probs": rollout,
        "old_log_probs": rollout + 0.02 * (random(rows, 1) < 0.2),
        "top_log_probs": rollout + 20 * (random(rows, TOKENS) < 0.04),
    }
    return Case(batch, uids, draw(configs), draw(st.integers(0, 100)))


@given(cases())
def test_rows_are_the_same_with_the_same_seed_unique_grouped_and_in_order_of_first_occurrence(case: Case) -> None:
    kept, metrics = case.run()
    assert case.run() == (kept, metrics)
    assert len(set(kept)) == len(kept)
    assert set(kept) <= set(range(len(case.uids)))
    groups = list(dict.fromkeys(case.uids[row] for row in kept))
    assert groups == [uid for uid in dict.fromkeys(case.uids) if uid in set(groups)]
    assert kept == [row for uid in groups for row in case.rows_of(uid, kept)]
    assert all(case.rows_of(uid, kept) == sorted(case.rows_of(uid, kept)) for uid in groups)


@given(cases())
def test_groups_have_variance_a_size_from_the_minimum_to_the_target_and_a_number_within_what_is_wanted(
    case: Case,
) -> None:
    kept, metrics = case.run()
    sizes = {uid: len(case.rows_of(uid, kept)) for uid in dict.fromkeys(case.uids[row] for row in kept)}
    for uid, size in sizes.items():
        given = len(case.rows_of(uid)) if case.config.varying_group_sizes else len(case.uids)
        assert min(case.config.min_group_size, given) <= size <= case.config.target_group_size
        assert case.batch["rewards"][case.rows_of(uid, kept)].double().std() >= 1e-3
    assert len(sizes) <= case.config.groups_to_keep(len(set(case.uids)))
    assert metrics["batch/selected_groups"] == len(sizes)


@given(cases())
def test_both_signs_stay_where_both_were_and_the_strategy_promises_it(case: Case) -> None:
    kept, _ = case.run()
    if not case.config.sample_selection_strategy.startswith("efficiency"):
        return
    accepted = torch.ones(len(case.uids), dtype=torch.bool)
    oversampled = max((len(case.rows_of(uid)) for uid in case.uids), default=0) > case.config.target_group_size
    if case.config.enable_two_gate_filter and (oversampled or case.config.gate_always):
        difference = (case.batch["old_log_probs"] - case.batch["rollout_log_probs"]).mean(-1).abs()
        gap = (case.batch["rollout_log_probs"] - case.batch["top_log_probs"]).amin(-1)
        accepted = (difference < 0.01) & (gap > -15)
    if case.config.reward_threshold is not None:
        accepted &= case.batch["rewards"] >= case.config.reward_threshold
    for uid in {case.uids[row] for row in kept}:
        signs = {bool(case.batch["rewards"][row] > 0) for row in case.rows_of(uid) if accepted[row]}
        assert {bool(case.batch["rewards"][row] > 0) for row in case.rows_of(uid, kept)} == signs


@given(cases(st.just(PPOFilterConfig(target_group_size=8, min_group_size=5))), st.integers(0, 10_000))
def test_no_sample_is_dropped_for_its_own_length(case: Case, seed: int) -> None:
    """Where nothing has to be cut, lengths change nothing at all."""
    other = torch.randint(1, 10_000, (len(case.uids),), generator=torch.Generator().manual_seed(seed))
    assert Case(case.batch | {"response_lengths": other}, case.uids, case.config, case.seed).run()[0] == case.run()[0]


@given(cases(), st.randoms(use_true_random=False))
def test_permuting_groups_permutes_the_result(case: Case, random: Any) -> None:
    """Groups that are equal row for row may stand in for one another; lengths that differ rule that out here."""
    distinct = case.batch["response_lengths"] + 10 * torch.arange(len(case.uids)) if len(case.uids) else torch.ones(0)
    config = case.config
    if config.max_response_length is not None:  # keep the length rule within reach of such lengths
        config = PPOFilterConfig(**{**vars(config), "max_response_length": 10 * config.max_response_length})
    case = Case(case.batch | {"response_lengths": distinct.long()}, case.uids, config, case.seed)
    order = list(dict.fromkeys(case.uids))
    random.shuffle(order)
    turned = [row for uid in order for row in case.rows_of(uid)]
    permuted = Case(
        {name: value[turned] for name, value in case.batch.items()},
        [f"renamed {case.uids[row]}" for row in turned],
        case.config,
        case.seed,
    )
    kept, metrics = case.run()
    permuted_kept, permuted_metrics = permuted.run()
    assert sorted(turned[row] for row in permuted_kept) == sorted(kept)
    assert {n: v for n, v in permuted_metrics.items() if n != "filter/ppl_drift"} == {
        n: v
        for n, v in metrics.items()
        if n != "filter/ppl_drift"  # a mean over rows: order changes its last bit
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@given(cases())
def test_a_gpu_chooses_the_same_rows(case: Case) -> None:
    on_gpu = Case({name: value.cuda() for name, value in case.batch.items()}, case.uids, case.config, case.seed)
    assert on_gpu.run()[0] == case.run()[0]


@given(cases())
def test_every_group_has_exactly_one_fate(case: Case) -> None:
    kept, metrics = case.run()
    fates = (
        metrics["rejection/two_gate_insufficient_groups"],
        metrics["batch/filter_all_groups"],
        metrics["batch/poor_groups_rejected"],
        metrics["batch/single_sample_groups_rejected"],
        metrics["batch/variance_lost_groups"],
        metrics["batch/groups_before_selection"] - metrics["batch/groups_after_selection"],
        metrics["batch/selected_groups"],
    )
    assert min(fates) >= 0
    assert sum(fates) == metrics["batch/total_groups_generated"] == len(set(case.uids))
    assert metrics["batch/total_samples_selected"] == len(kept)
