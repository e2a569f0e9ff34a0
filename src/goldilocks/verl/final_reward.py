"""``filter_groups.metric=seq_final_reward``: groups judged by their rewards after the KL penalty, in both trainers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from goldilocks.types import mean_and_std

REASON = "no_variance_after_kl"  # of the rejection, in the accounts


@dataclass(frozen=True)
class KLPenalty:
    """verl's ``algorithm.kl_penalty`` and the coefficient of the moment."""

    kind: str
    coefficient: float

    def final_rewards(self, rows: Any) -> list[float]:
        """Return each row's summed reward less its penalty; ``rows`` has verl's tensors by their names."""
        from verl.trainer.ppo.core_algos import kl_penalty

        kl = kl_penalty(rows["old_log_probs"], rows["ref_log_prob"], kl_penalty=self.kind)
        final: Tensor = rows["rm_scores"] - self.coefficient * kl * rows["response_mask"]
        return final.sum(-1).tolist()


def groups_without_variance(uids: Iterable[str], rewards: Iterable[float], min_std: float) -> list[str]:
    """Return the groups of several rows whose rewards differ by ``min_std`` at most."""
    groups: dict[str, list[float]] = {}
    for uid, reward in zip(uids, rewards, strict=True):
        groups.setdefault(uid, []).append(reward)
    return [uid for uid, values in groups.items() if len(values) > 1 and mean_and_std(values)[1] <= min_std]
