"""Stage 0: reject rows on whose log-probs the trainer and the rollout engine disagree.

Gate 1 rejects a disagreement on average (lower precision, a stale weight): it keeps a row if the mean over its tokens
of old − rollout log-prob is nearer to zero than ``gate1_bias_epsilon``. Gate 2 rejects tokens that the engine itself
thought next to impossible: it keeps a row if every token's rollout log-prob is above the most likely token's plus
``gate2_instability_threshold``.

A comparison with NaN is false, so a row with an undefined log-prob is rejected. Token tensors are read block by block:
no temporary has their size.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from goldilocks.errors import require
from goldilocks.filtering.config import PPOFilterConfig
from goldilocks.filtering.rows import count_tokens, row_blocks, row_tensor
from goldilocks.filtering.step_metrics import Mean

logger = logging.getLogger(__name__)

GATE1_FIELDS = ("response_mask", "old_log_probs", "rollout_log_probs")
GATE2_FIELDS = ("response_mask", "rollout_log_probs", "top_log_probs")


@dataclass(frozen=True)
class RowVerdicts:
    """The gates' verdict on each row of the batch, and their metrics."""

    accepted: Tensor
    metrics: dict[str, float]


class TwoGateRejectionFilter:
    """Both gates. A gate whose tensors are missing is skipped: logged once, counted every time."""

    def __init__(self, config: PPOFilterConfig) -> None:
        self.config = config
        self._warned: set[str] = set()

    def judge(self, batch: Mapping[str, Any], judged: Tensor) -> RowVerdicts:
        """Judge the rows of the batch for which ``judged`` is true; the others are not accepted and not counted."""
        accepted = judged.clone()
        metrics: dict[str, float] = {}
        rows = int(judged.sum())
        for name, fields, gate in (("gate1", GATE1_FIELDS, self._gate1), ("gate2", GATE2_FIELDS, self._gate2)):
            missing = [field for field in fields if field not in batch]
            metrics[f"filter/{name}_missing_tensors"] = Mean(rows * bool(missing), rows)
            if missing:
                self._warn_once(name, missing)
                continue
            mask, first, second = (row_tensor(batch, field, 2, judged) for field in fields)
            _check_shapes(dict(zip(fields, (mask, first, second), strict=True)))
            passed, statistics = gate(mask, first, second, judged)
            metrics[f"filter/{name}_rejection_rate"] = Mean(int((judged & ~passed).sum()), rows)
            metrics.update(statistics)
            accepted &= passed
        metrics["filter/acceptance_rate"] = Mean(int(accepted.sum()), rows)
        return RowVerdicts(accepted, metrics)

    def _gate1(self, mask: Tensor, old: Tensor, rollout: Tensor, judged: Tensor) -> tuple[Tensor, dict[str, float]]:
        signed = torch.empty(len(mask), dtype=torch.float64, device=mask.device)
        bias = torch.empty_like(signed)
        for block in row_blocks(mask):
            difference = _masked_difference(old[block], rollout[block], mask[block], 0.0)
            signed[block] = difference.sum(-1)
            bias[block] = signed[block].abs() if self.config.gate1_mode == "mean" else difference.abs_().sum(-1)
        tokens = count_tokens(mask)
        bias /= tokens
        drift = signed.div_(-tokens).expm1_().abs_()[judged]  # perplexity is exp(−mean log-prob)
        drift = drift[drift.isfinite()]  # a row whose drift is not finite is rejected below
        return bias < self.config.gate1_bias_epsilon, {"filter/ppl_drift": Mean(float(drift.sum()), len(drift))}

    def _gate2(self, mask: Tensor, rollout: Tensor, top: Tensor, judged: Tensor) -> tuple[Tensor, dict[str, float]]:
        lowest = torch.empty(len(mask), dtype=torch.float32, device=mask.device)
        extreme = torch.empty(len(mask), dtype=torch.int64, device=mask.device)
        for block in row_blocks(mask):
            gap = _masked_difference(rollout[block], top[block], mask[block], torch.inf)
            lowest[block] = gap.amin(-1)
            extreme[block] = (gap <= self.config.gate2_instability_threshold).sum(-1, dtype=torch.int32)
        tokens = count_tokens(mask)
        rate = Mean(int(extreme[judged].sum()), int(tokens[judged].sum()))
        return (lowest > self.config.gate2_instability_threshold) & (tokens > 0), {"filter/extreme_token_rate": rate}

    def _warn_once(self, gate: str, missing: list[str]) -> None:
        if gate not in self._warned:
            self._warned.add(gate)
            logger.warning(
                "enable_two_gate_filter=True, but %s is skipped: no %s in the batch", gate, ", ".join(missing)
            )


def _masked_difference(left: Tensor, right: Tensor, mask: Tensor, fill: float) -> Tensor:
    """Return left − right in single precision where the mask is set, and ``fill`` elsewhere."""
    difference = left.float() - right.float()
    return torch.where(mask.bool(), difference, difference.new_tensor(fill), out=difference)


def _check_shapes(tensors: dict[str, Tensor]) -> None:
    shapes = [tuple(tensor.shape) for tensor in tensors.values()]
    require(len(set(shapes)) == 1, ", ".join(tensors), shapes, "one shape")
