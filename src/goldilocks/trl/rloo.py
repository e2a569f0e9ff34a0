"""TRL's ``RLOOTrainer`` with the collector in the place of its batches.

RLOO has one ratio a completion, so every row comes with the log-prob of its whole completion under the policy that
wrote it. The KL penalty is a part of the score: it is read off TRL's own two passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from trl import RLOOTrainer

from goldilocks.trl.advantages import leave_one_out
from goldilocks.trl.collection import Rewards
from goldilocks.trl.rows import Row
from goldilocks.trl.trainer import CollectedTrainer

KL = "goldilocks_kl"  # a column of the batch: how far each completion is from the reference model


class GoldilocksRLOOTrainer(CollectedTrainer, RLOOTrainer):  # type: ignore[misc]
    """``RLOOTrainer`` and, if asked for, what ``CollectedTrainer`` adds."""

    trl = RLOOTrainer
    _passes: list[Tensor] | None = None  # the log-probs that TRL computes of a round: the policy's, the reference's

    def _rewards(self) -> Rewards:
        weights, bounds = self.reward_weights.tolist(), self.reward_clip_range
        beta, normalize = self.beta, self.normalize_advantages

        def score(row: Row) -> float:
            """Return the clipped reward; filters and selectors judge it without the penalty."""
            reward = row.reward(weights)
            return min(max(reward, bounds[0]), bounds[1]) if bounds else reward

        def found(groups: Sequence[Sequence[Row]]) -> list[Tensor]:
            return leave_one_out([torch.tensor([penalized(row) for row in one]) for one in groups], normalize=normalize)

        def penalized(row: Row) -> float:
            return score(row) - beta * float(row.tensors[KL]) if beta else score(row)

        return Rewards(self.reward_func_names, score, found)

    def _generate_and_score(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._passes = []
        output = super()._generate_and_score(inputs)
        passes, self._passes = self._passes, None
        if self.beta:
            policy, reference = passes
            output[KL] = ((policy - reference) * output["completion_mask"]).sum(1)
        return output

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._passes is not None:
            self._passes.append(found[0])
        return found

    @property
    def _rows_stand_alone(self) -> bool:
        return True

    @property
    def _mean_of_rows(self) -> bool:
        return True

    @property
    def _lacks_log_probs(self) -> bool:
        return False

    def _returned(self, ids: list[list[int]], log_probs: list[list[float]]) -> Any:
        return ids
