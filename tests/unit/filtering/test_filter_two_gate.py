"""Stage 0: rows on whose log-probs trainer and engine disagree."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from goldilocks.filtering import PPOBatchFilter, PPOFilterConfig
from goldilocks.filtering.batch_filter import RowVerdicts, TwoGateRejectionFilter
from goldilocks.filtering.rows import count_tokens


def log_probs(rows: int = 4, tokens: int = 6) -> dict[str, torch.Tensor]:
    """Four answers on which both agree, each a token longer than the one before."""
    rollout = -torch.arange(1.0, rows * tokens + 1).view(rows, tokens) / 10
    return {
        "response_mask": torch.arange(tokens)[None] < torch.arange(2, rows + 2)[:, None],
        "old_log_probs": rollout.clone(),
        "rollout_log_probs": rollout,
        "top_log_probs": rollout + 1.0,
    }


def judge(batch: dict[str, torch.Tensor], judged: torch.Tensor | None = None, **config: object) -> RowVerdicts:
    every_row = torch.ones(len(next(iter(batch.values()))), dtype=torch.bool)
    return TwoGateRejectionFilter(PPOFilterConfig(**config)).judge(batch, every_row if judged is None else judged)


def test_rows_on_which_both_agree_pass() -> None:
    verdict = judge(log_probs())
    assert verdict.accepted.all()
    assert verdict.metrics == {
        "filter/gate1_missing_tensors": 0.0,
        "filter/gate1_rejection_rate": 0.0,
        "filter/ppl_drift": 0.0,
        "filter/gate2_missing_tensors": 0.0,
        "filter/gate2_rejection_rate": 0.0,
        "filter/extreme_token_rate": 0.0,
        "filter/acceptance_rate": 1.0,
    }


def test_gate_1_rejects_a_row_biased_on_average_and_measures_the_drift_in_perplexity() -> None:
    batch = log_probs()
    batch["old_log_probs"][1] += 0.02
    verdict = judge(batch)
    assert verdict.accepted.tolist() == [True, False, True, True]
    assert verdict.metrics["filter/gate1_rejection_rate"] == 0.25
    assert verdict.metrics["filter/ppl_drift"] == pytest.approx((1 - math.exp(-0.02)) / 4, rel=1e-4)


def test_opposite_errors_cancel_in_mean_mode_and_not_in_abs_mode() -> None:
    batch = log_probs()
    batch["old_log_probs"][0, 0] += 1.0
    batch["old_log_probs"][0, 1] -= 1.0
    assert judge(batch, gate1_mode="mean").accepted.all()
    assert judge(batch, gate1_mode="abs").accepted.tolist() == [False, True, True, True]


def test_gate_2_rejects_a_row_with_a_token_the_engine_thought_impossible() -> None:
    batch = log_probs()
    batch["top_log_probs"][2, 1] = batch["rollout_log_probs"][2, 1] + 15.0
    verdict = judge(batch)
    assert verdict.accepted.tolist() == [True, True, False, True]
    assert verdict.metrics["filter/gate2_rejection_rate"] == 0.25
    assert verdict.metrics["filter/extreme_token_rate"] == pytest.approx(1 / (2 + 3 + 4 + 5))


def test_what_stands_behind_the_mask_is_not_looked_at() -> None:
    batch = log_probs()
    for name in ("old_log_probs", "rollout_log_probs", "top_log_probs"):
        batch[name][~batch["response_mask"]] = torch.nan
    assert judge(batch).accepted.all()


@pytest.mark.parametrize("field", ["old_log_probs", "rollout_log_probs", "top_log_probs"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_with_an_undefined_log_prob_is_never_kept(field: str, value: float) -> None:
    batch = log_probs()
    batch[field][3, 0] = value
    verdict = judge(batch)
    if (field, value) == ("top_log_probs", -torch.inf):  # the sampled token is then the likelier one
        assert verdict.accepted.all()
    else:
        assert verdict.accepted.tolist() == [True, True, True, False]
    assert math.isfinite(verdict.metrics["filter/ppl_drift"])


def test_a_row_without_tokens_passes_no_gate() -> None:
    batch = log_probs()
    batch["response_mask"][0] = False
    assert judge(batch).accepted.tolist() == [False, True, True, True]
    del batch["old_log_probs"]
    assert judge(batch).accepted.tolist() == [False, True, True, True]


def test_rows_that_are_not_judged_are_in_no_rate() -> None:
    batch = log_probs()
    batch["old_log_probs"][0] += 1.0
    batch["top_log_probs"][0] += 100.0
    verdict = judge(batch, judged=torch.tensor([False, True, True, True]))
    assert verdict.accepted.tolist() == [False, True, True, True]
    assert verdict.metrics["filter/acceptance_rate"] == 1.0
    assert verdict.metrics["filter/ppl_drift"] == verdict.metrics["filter/extreme_token_rate"] == 0.0


def test_a_batch_all_of_whose_drifts_are_undefined_has_none() -> None:
    batch = log_probs()
    batch["old_log_probs"][:, 0] = torch.nan
    verdict = judge(batch)
    assert not verdict.accepted.any()
    assert verdict.metrics["filter/ppl_drift"] == 0.0


@pytest.mark.parametrize(
    ("missing", "skipped"),
    [("old_log_probs", ["gate1"]), ("top_log_probs", ["gate2"]), ("rollout_log_probs", ["gate1", "gate2"])],
)
def test_a_gate_without_its_tensors_is_skipped_with_one_warning_and_a_metric(
    missing: str, skipped: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    batch = log_probs()
    del batch[missing]
    gates = TwoGateRejectionFilter(PPOFilterConfig())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            verdict = gates.judge(batch, torch.ones(4, dtype=torch.bool))
    assert [record.message for record in caplog.records] == [
        f"enable_two_gate_filter=True, but {gate} is skipped: no {missing} in the batch" for gate in skipped
    ]
    for gate in ("gate1", "gate2"):
        assert verdict.metrics[f"filter/{gate}_missing_tensors"] == float(gate in skipped)
        assert (f"filter/{gate}_rejection_rate" in verdict.metrics) == (gate not in skipped)
    assert verdict.accepted.all()


def test_half_precision_and_integer_masks_are_taken() -> None:
    batch = {name: value.bfloat16() for name, value in log_probs().items()}
    batch["response_mask"] = log_probs()["response_mask"].long()
    batch["top_log_probs"] = batch["rollout_log_probs"].clone()
    assert judge(batch).accepted.all()


def test_shapes_that_do_not_fit_are_named() -> None:
    batch = log_probs()
    batch["old_log_probs"] = batch["old_log_probs"][:, :5]
    with pytest.raises(ValueError, match=r"old_log_probs, rollout_log_probs=.* is not accepted: one shape"):
        judge(batch)
    batch["old_log_probs"] = torch.zeros(3, 6)
    with pytest.raises(ValueError, match=r"old_log_probs=.* is not accepted: 4 rows on cpu"):
        judge(batch)


def test_the_gates_are_opened_by_oversampling_or_by_asking() -> None:
    batch = log_probs() | {"rewards": torch.tensor([1.0, 0.0, 1.0, 0.0])}
    batch["old_log_probs"][0] += 1.0

    def run(**config: object) -> tuple[list[int], dict[str, float]]:
        config = {"enable_two_gate_filter": True, "sample_selection_strategy": "efficiency"} | config
        index, metrics = PPOBatchFilter(config).filter_batch(batch, ["a"] * 4, return_indices=True)
        return index.tolist(), metrics

    kept, metrics = run(target_group_size=4)
    assert kept == [0, 1, 2, 3]
    assert not [name for name in metrics if name.startswith("filter/")]
    kept, metrics = run(target_group_size=4, gate_always=True)
    assert kept == [1, 2, 3]
    assert metrics["filter/gate1_rejection_rate"] == 0.25
    assert run(target_group_size=3)[0] == [1, 2, 3]
    assert run(target_group_size=3, enable_two_gate_filter=False)[0] != [1, 2, 3]


def test_gates_that_judge_nothing_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    batch = log_probs() | {"rewards": torch.tensor([1.0, 0.0, 1.0, 0.0])}
    subject = PPOBatchFilter({"enable_two_gate_filter": True, "target_group_size": 4})
    for _ in range(2):
        subject.filter_batch(batch, ["a"] * 4)
    assert [record.getMessage() for record in caplog.records if "judged nothing" in record.getMessage()] == [
        "enable_two_gate_filter=True judged nothing: no group has more than target_group_size=4 samples; "
        "gate_always=True judges every group"
    ]


class LargestTemporary(TorchDispatchMode):
    """Remembers the most elements any operation made anew."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_temporary_has_the_size_of_a_token_tensor() -> None:
    rows, tokens = 9000, 256
    batch = {name: torch.zeros(rows, tokens) for name in ("old_log_probs", "rollout_log_probs", "top_log_probs")}
    batch |= {"response_mask": torch.ones(rows, tokens, dtype=torch.bool)}
    with LargestTemporary() as largest:
        judge(batch, gate1_mode="abs")
        count_tokens(batch["response_mask"])
    assert rows <= largest.elements < rows * tokens / 2
