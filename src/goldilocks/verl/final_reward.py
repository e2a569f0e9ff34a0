"""``filter_groups.metric=seq_final_reward``: groups judged by their rewards after the KL penalty, in both trainers.

The penalty differs from row to row once the policy has moved, so a penalised reward always varies. A group teaches
something of the task if its reward varies by more than its penalties alone do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from goldilocks.types import mean_and_std

REASON = "no_variance_after_kl"  # of the rejection, in the accounts
MARGIN = 1e-6  # more than rounding


@dataclass(frozen=True)
class KLPenalty:
    """verl's ``algorithm.kl_penalty`` and the coefficient of the moment."""

    kind: str
    coefficient: float

    def of(self, rows: Any) -> Tensor:
        """Return each row's summed penalty; ``rows`` has verl's tensors by their names."""
        from verl.trainer.ppo.core_algos import kl_penalty

        kl = kl_penalty(rows["old_log_probs"], rows["ref_log_prob"], kl_penalty=self.kind)
        return (self.coefficient * kl * rows["response_mask"]).sum(-1)


def groups_without_signal(
    uids: Iterable[str], scores: Tensor, penalties: Tensor, min_std: float | None = None
) -> list[str]:
    """Return the groups of several rows whose final reward, score less penalty, does not vary enough.

    Enough is a standard deviation above ``min_std``; None: above that of the group's penalties.
    """
    groups: dict[str, list[tuple[float, float]]] = {}
    for uid, score, penalty in zip(uids, scores.double().tolist(), penalties.double().tolist(), strict=True):
        groups.setdefault(uid, []).append((score - penalty, penalty))
    return [uid for uid, rows in groups.items() if len(rows) > 1 and _is_flat(rows, min_std)]


def _is_flat(rows: Sequence[tuple[float, float]], min_std: float | None) -> bool:
    (_, spread), (_, of_penalties) = (mean_and_std(values) for values in zip(*rows, strict=True))
    return spread <= (of_penalties + MARGIN if min_std is None else min_std)
