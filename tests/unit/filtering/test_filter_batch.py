"""The stages, one after the other, as docs/batch-filter.md tells them."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from goldilocks.filtering import PPOBatchFilter, PPOFilterConfig

Group = list[tuple[float, int]]  # (reward, length) of each sample


def make(*groups: Group) -> tuple[dict[str, torch.Tensor], list[str]]:
    """A batch of groups a, b, c, ... and its uids."""
    rows = [sample for group in groups for sample in group]
    uids = [chr(ord("a") + number) for number, group in enumerate(groups) for _ in group]
    return {
        "rewards": torch.tensor([reward for reward, _ in rows], dtype=torch.float32),
        "response_lengths": torch.tensor([length for _, length in rows], dtype=torch.int64),
    }, uids


def run(groups: list[Group], **config: object) -> tuple[list[int], dict[str, float]]:
    config = {"sample_selection_strategy": "efficiency"} | config
    batch, uids = make(*groups)
    index, metrics = PPOBatchFilter(config).filter_batch(batch, uids, return_indices=True)
    return index.tolist(), metrics


MIXED: Group = [(1.0, 10), (0.0, 10), (1.0, 20), (0.0, 20)]
SOLVED: Group = [(1.0, 10)] * 4
UNSOLVED: Group = [(0.0, 10)] * 4


# --- Stage 1: groups


def test_groups_without_variance_are_dropped_unless_they_are_asked_for() -> None:
    kept, metrics = run([SOLVED, MIXED, UNSOLVED], target_group_size=4)
    assert kept == [4, 5, 6, 7]
    assert metrics["batch/low_variance_groups"] == metrics["batch/filter_all_groups"] == 2
    assert metrics["batch/solve_all_ratio"] == metrics["batch/solve_none_ratio"] == pytest.approx(1 / 3)
    kept, metrics = run([SOLVED, MIXED], target_group_size=4, reject_low_variance_groups=False)
    assert kept == list(range(8))
    assert metrics["batch/low_variance_groups"] == 0


def test_the_threshold_is_an_unbiased_standard_deviation_of_a_thousandth() -> None:
    just_above, just_below = [(0.5, 1), (0.5 + 0.00142, 1)], [(0.5, 1), (0.5 + 0.00141, 1)]
    assert run([just_above, just_below], target_group_size=2)[0] == [0, 1]


def test_a_group_all_of_whose_samples_reach_the_limit_is_dropped_and_one_short_sample_saves_it() -> None:
    long: Group = [(1.0, 512), (0.0, 600), (1.0, 512), (0.0, 512)]
    kept, metrics = run([MIXED, long], target_group_size=4, max_response_length=512)
    assert kept == [0, 1, 2, 3]
    assert metrics["batch/overlong_groups"] == 1
    assert metrics["batch/response_clip_ratio"] == 0.5
    nearly: Group = [(1.0, 512), (0.0, 511), (1.0, 512), (0.0, 512)]
    assert run([nearly], target_group_size=4, max_response_length=512)[0] == [0, 1, 2, 3]


def test_remove_clip_wants_min_rollout_n_short_samples() -> None:
    nearly: Group = [(1.0, 512), (0.0, 511), (1.0, 510), (0.0, 512)]
    limits = {"target_group_size": 4, "max_response_length": 512, "remove_clip": True}
    assert run([nearly], **limits, min_rollout_n=2)[0] == [0, 1, 2, 3]
    kept, metrics = run([nearly], **limits, min_rollout_n=3)
    assert kept == []
    assert metrics["batch/overlong_groups"] == 1


def test_a_group_dropped_for_two_reasons_is_counted_once_in_all() -> None:
    long: Group = [(0.0, 512)] * 4
    metrics = run([long], target_group_size=4, max_response_length=512)[1]
    assert metrics["batch/low_variance_groups"] == metrics["batch/overlong_groups"] == 1
    assert metrics["batch/filter_all_groups"] == 1


def gated(out: list[int], *groups: Group) -> tuple[list[int], dict[str, float]]:
    """Run groups of which gate 1 refuses these rows."""
    batch, uids = make(*groups)
    batch |= {name: torch.zeros(len(uids), 2) for name in ("old_log_probs", "rollout_log_probs")}
    batch["response_mask"] = torch.ones(len(uids), 2)
    batch["old_log_probs"][out] = 1.0
    config = PPOFilterConfig(target_group_size=4, enable_two_gate_filter=True, gate_always=True)
    index, metrics = PPOBatchFilter(config).filter_batch(batch, uids, return_indices=True)
    return index.tolist(), metrics


def test_variance_is_judged_on_what_the_gates_left() -> None:
    kept, metrics = gated([3], [(1.0, 2)] * 3 + [(0.0, 2)])  # the only wrong answer is gated out
    assert kept == []
    assert metrics["batch/low_variance_groups"] == 1


def test_a_group_the_gates_leave_too_small_is_dropped_there() -> None:
    kept, metrics = gated([0, 1], MIXED, MIXED)
    assert kept == [4, 5, 6, 7]
    assert metrics["rejection/two_gate_insufficient_groups"] == 1
    assert metrics["batch/poor_groups_rejected"] == 0


def test_groups_that_were_given_fewer_samples_are_whole_with_all_of_them() -> None:
    """Adaptive rollouts give an easy prompt two: less than half of the target, and all there is."""
    groups: list[Group] = [[(1.0, 5)] + [(0.0, 5)] * (size - 1) for size in (2, 2, 3, 4, 10)]
    kept, metrics = run(groups, target_group_size=8)
    assert metrics["batch/poor_groups_rejected"] == 4
    kept, metrics = run(groups, target_group_size=8, varying_group_sizes=True)
    assert len(kept) == 2 + 2 + 3 + 4 + 8
    assert metrics["batch/complete_groups_selected"] == 5
    assert metrics["batch/batch_size_ratio"] == 1
    assert metrics["batch/low_batch_size_warning"] == 0
    one, metrics = run([[(1.0, 5)]], target_group_size=8, varying_group_sizes=True)
    assert one == []
    assert metrics["batch/single_sample_groups_rejected"] == 1


# --- Stage 2: samples


def test_samples_below_the_reward_threshold_are_dropped() -> None:
    group: Group = [(0.2, 1), (0.5, 1), (0.7, 1), (0.9, 1)]
    kept, metrics = run([group], target_group_size=4, reward_threshold=0.5)
    assert kept == [1, 2, 3]
    assert metrics["rejection/reward_rejection_rate"] == 0.25


def test_a_group_that_loses_its_variance_to_the_threshold_is_dropped() -> None:
    kept, metrics = run([[(1.0, 1)] * 3 + [(0.0, 1)]], target_group_size=4, reward_threshold=0.5)
    assert kept == []
    assert metrics["batch/variance_lost_groups"] == 1


# --- Stage 3: selection


def test_small_groups_are_dropped_and_told_apart_from_single_samples() -> None:
    kept, metrics = run([MIXED[:2], MIXED[:3], MIXED[:1]], target_group_size=4)
    assert kept == [2, 3, 4]
    assert metrics["batch/poor_groups_rejected"] == 1
    assert metrics["batch/single_sample_groups_rejected"] == 1
    assert metrics["batch/complete_groups_selected"] == 0
    assert metrics["batch/avg_group_size"] == 3
    lost: Group = [(0.1, 1), (0.2, 1)]  # every sample, to the threshold: a poor one
    kept, metrics = run([lost, [(1.0, 1), (2.0, 1)]], target_group_size=2, reward_threshold=0.5)
    assert kept == [2, 3]
    assert metrics["batch/poor_groups_rejected"] == 1


def test_single_samples_can_be_trained_where_groups_mean_nothing() -> None:
    kept, metrics = run([[(1.0, 5)], [(0.0, 5)]], target_group_size=1, reject_low_variance_groups=False)
    assert kept == [0, 1]
    assert metrics["batch/single_sample_groups_rejected"] == 0


def test_complete_groups_are_chosen_before_incomplete_ones_and_overfull_ones_are_complete() -> None:
    overfull: Group = [*MIXED, (1.0, 5), (0.0, 5)]
    groups = [MIXED[:3], overfull, MIXED[:3], MIXED]
    for seed in range(5):
        batch, uids = make(*groups)
        chosen = PPOBatchFilter({"target_group_size": 4, "target_num_groups": 3}, {"seed": seed})
        index, metrics = chosen.filter_batch(batch, uids, return_indices=True)
        assert list(dict.fromkeys(uids[row] for row in index.tolist())) in (["a", "b", "d"], ["b", "c", "d"])
        assert metrics["batch/complete_groups_selected"] == 2
        assert (metrics["batch/groups_before_selection"], metrics["batch/groups_after_selection"]) == (4, 3)


def test_which_groups_are_chosen_is_by_lot() -> None:
    batch, uids = make(*([(1.0, length), (0.0, length)] for length in range(1, 9)))
    chooser = PPOBatchFilter({"target_group_size": 2, "target_num_groups": 2})
    counts = torch.zeros(8)
    for _ in range(200):
        index, _ = chooser.filter_batch(batch, uids, return_indices=True)
        counts[index[::2] // 2] += 1
    assert (counts / 200 - 0.25).abs().max() < 0.1


def test_a_group_that_loses_its_variance_to_the_cut_leaves_its_place_to_another() -> None:
    # All positive, so efficiency takes the shortest, whose rewards are equal.
    flattened: Group = [(1.0, 1), (1.0, 1), (0.5, 900), (0.5, 900)]
    kept, metrics = run([flattened, MIXED[:2]], target_group_size=2, target_num_groups=1)
    assert kept == [4, 5]
    assert metrics["batch/variance_lost_groups"] == 1


def test_prompt_oversampling_changes_what_is_kept() -> None:
    groups = [[(1.0, length), (0.0, length)] for length in range(1, 7)]
    kept, metrics = run(groups, target_group_size=2, prompt_oversampling_factor=2.0)
    assert len(kept) == 6
    assert metrics["batch/groups_after_selection"] == 3
    assert metrics["batch/batch_size_ratio"] == 1.0


def test_sample_oversampling_is_asked_for_and_cut_to_the_target() -> None:
    config = PPOFilterConfig(target_group_size=4, sample_oversampling_factor=1.5)
    group: Group = [(float(row % 2), row + 1) for row in range(config.rollouts_to_generate)]
    batch, uids = make(group, group)
    index, metrics = PPOBatchFilter(config).filter_batch(batch, uids, return_indices=True)
    assert (len(batch["rewards"]), len(index)) == (12, 8)
    assert metrics["batch/complete_groups_selected"] == 2


# --- Stage 4: metrics


def test_the_metrics_of_a_call_are_these() -> None:
    kept, metrics = run([MIXED, SOLVED, MIXED[:2]], target_group_size=4, target_num_groups=2)
    assert kept == [0, 1, 2, 3]
    assert metrics == {
        "batch/total_samples_generated": 10,
        "batch/total_groups_generated": 3,
        "batch/solve_none_ratio": 0.0,
        "batch/solve_all_ratio": pytest.approx(1 / 3),
        "batch/response_clip_ratio": 0.0,
        "rejection/invalid_rows": 0,
        "rejection/two_gate_insufficient_groups": 0,
        "batch/low_variance_groups": 1,
        "batch/overlong_groups": 0,
        "batch/filter_all_groups": 1,
        "rejection/reward_rejection_rate": 0.0,
        "batch/single_sample_groups_rejected": 0,
        "batch/poor_groups_rejected": 1,
        "batch/variance_lost_groups": 0,
        "batch/groups_before_selection": 1,
        "batch/groups_after_selection": 1,
        "batch/total_samples_selected": 4,
        "batch/selection_rate": 0.4,
        "batch/selected_groups": 1,
        "batch/complete_groups_selected": 1,
        "batch/avg_group_size": 4.0,
        "batch/batch_size_ratio": 0.5,
        "batch/low_batch_size_warning": 0.0,
        "batch/critical_empty_batch": 0.0,
    }


def test_metrics_are_of_the_call_and_not_cumulative() -> None:
    batch, uids = make(MIXED, SOLVED)
    again = PPOBatchFilter({"target_group_size": 4})
    assert again.filter_batch(batch, uids)[1] == again.filter_batch(batch, uids)[1]


def test_a_batch_of_which_little_is_left_is_flagged_and_an_empty_one_too(caplog: pytest.LogCaptureFixture) -> None:
    assert run([MIXED, SOLVED, SOLVED], target_group_size=4)[1]["batch/low_batch_size_warning"] == 1.0
    with caplog.at_level(logging.WARNING):
        kept, metrics = run([])
    assert kept == []
    assert metrics["batch/critical_empty_batch"] == 1.0
    assert metrics["batch/selection_rate"] == 0.0
    assert "kept none of 0 rows" in caplog.text


@pytest.mark.parametrize("strategy", ["uniform", "efficiency", "efficiency_stochastic", "max_variance"])
def test_a_batch_nothing_of_which_survives_gives_an_empty_result(strategy: str) -> None:
    kept, metrics = run([SOLVED, UNSOLVED], target_group_size=2, sample_selection_strategy=strategy)
    assert kept == []
    assert metrics["batch/critical_empty_batch"] == 1.0


# --- What goes in and out


def test_the_rows_of_every_field_come_back_together() -> None:
    batch, uids = make(SOLVED, MIXED)
    fields = batch | {
        "tokens": torch.arange(16).view(8, 2),
        "names": np.array(list("stuvwxyz")),
        "extra": list(range(8)),
    }
    kept, _ = PPOBatchFilter({"target_group_size": 4}).filter_batch(fields, uids)
    assert kept["tokens"].tolist() == [[8, 9], [10, 11], [12, 13], [14, 15]]
    assert kept["names"].tolist() == list("wxyz")
    assert kept["extra"] == [4, 5, 6, 7]
    assert kept["rewards"].tolist() == [1, 0, 1, 0]


def test_lengths_are_counted_from_the_mask_when_not_given() -> None:
    batch, uids = make(MIXED, MIXED)
    lengths = batch.pop("response_lengths")
    config = {"target_group_size": 4, "max_response_length": 15}
    for mask in (torch.arange(32)[None] < lengths[:, None], (torch.arange(32)[None] < lengths[:, None]).float()):
        metrics = PPOBatchFilter(config).filter_batch(batch | {"response_mask": mask}, uids)[1]
        assert metrics["batch/response_clip_ratio"] == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": None}, r"rewards is missing from the batch, which has \['response_lengths'\]"),
        ({"rewards": torch.zeros(4, 2)}, r"rewards='shape \(4, 2\)' is not accepted: a tensor of 1 dimension"),
        ({"rewards": [0.0] * 4}, r"rewards='list' is not accepted: a tensor of 1 dimension"),
        ({"rewards": torch.zeros(3)}, r"uids='4 uids' is not accepted: one for each of the 3 rows"),
        ({"rewards": torch.tensor([0, 1, torch.nan, 0])}, r"rewards\[2\]=nan is not accepted: a finite number"),
        ({"rewards": torch.tensor([0, 1, torch.inf, 0])}, r"rewards\[2\]=inf is not accepted: a finite number"),
        ({"response_lengths": None}, r"response_lengths and response_mask are missing from the batch.* \['rewards'\]"),
        ({"response_lengths": torch.tensor([1, 0, 3, 4])}, r"response_lengths\[1\]=0 is not accepted: at least one"),
        ({"response_lengths": torch.ones(5)}, r"response_lengths=.* is not accepted: 4 rows on cpu"),
        ({"response_lengths": None, "response_mask": torch.ones(4)}, r"response_mask=.* is not accepted: a tensor of"),
        ({"extra": torch.ones(3)}, r"extra='Tensor of 3' is not accepted: a tensor, a numpy array or a list of 4 rows"),
        ({"extra": 5}, r"extra='int' is not accepted: a tensor, a numpy array or a list of 4 rows"),
    ],
)
def test_bad_input_is_named(change: dict[str, object], message: str) -> None:
    batch, uids = make(MIXED)
    fields = {name: value for name, value in (batch | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        PPOBatchFilter({"target_group_size": 4}).filter_batch(fields, uids)


def test_the_first_bad_row_of_the_batch_is_named_wherever_its_group_stands() -> None:
    batch, _ = make(MIXED)
    batch["rewards"][3] = torch.nan
    batch["response_lengths"][2] = 0
    with pytest.raises(ValueError, match=r"response_lengths\[2\]=0.*invalid_rows=drop"):
        PPOBatchFilter({"target_group_size": 4}).filter_batch(batch, ["a", "b", "b", "a"])


def test_bad_rows_are_dropped_and_counted_when_asked_for() -> None:
    batch, uids = make(MIXED, MIXED)
    batch["rewards"][1] = torch.nan
    batch["response_lengths"][6] = 0
    config = {"target_group_size": 4, "invalid_rows": "drop"}
    index, metrics = PPOBatchFilter(config).filter_batch(batch, uids, return_indices=True)
    assert index.tolist() == [0, 2, 3, 4, 5, 7]
    assert metrics["rejection/invalid_rows"] == 2


@pytest.mark.parametrize("data_config", [None, {}, {"seed": None}, {"seed": 1}])
def test_the_seed_is_one_unless_said_otherwise(data_config: dict[str, object] | None) -> None:
    assert choices(data_config) == choices({"seed": 1}) != choices({"seed": 2})


def choices(data_config: dict[str, object] | None) -> list[list[int]]:
    batch, uids = make(*[[(float(row % 2), row + group) for row in range(1, 17)] for group in range(6)])
    chooser = PPOBatchFilter({"target_group_size": 8}, data_config)
    return [chooser.filter_batch(batch, uids, return_indices=True)[0].tolist() for _ in range(3)]


def test_a_seed_that_is_no_integer_is_refused() -> None:
    for seed in ("1", True, 1.5):
        with pytest.raises(ValueError, match=r"data.seed=.* is not accepted: an integer"):
            PPOBatchFilter({}, {"seed": seed})


def test_every_call_draws_anew_and_a_restored_filter_goes_on_where_it_was() -> None:
    batch, uids = make(*[[(float(row % 2), row + group) for row in range(1, 17)] for group in range(6)])
    chooser = PPOBatchFilter({"target_group_size": 8})
    first = chooser.filter_batch(batch, uids, return_indices=True)[0]
    state = chooser.state_dict()
    second = chooser.filter_batch(batch, uids, return_indices=True)[0]
    assert not torch.equal(first, second)
    resumed = PPOBatchFilter({"target_group_size": 8}, {"seed": 99})
    resumed.load_state_dict(state)
    assert torch.equal(resumed.filter_batch(batch, uids, return_indices=True)[0], second)
