"""Gates on verl's V0 trainer. What they need of the policy is computed while the batch is being filled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from verl import DataProto

from goldilocks.drive.filter_gate import FilterGate
from goldilocks.drive.gate import Gate, Judgement, by_group
from goldilocks.drive.rows import Place
from goldilocks.filtering import PPOFilterConfig
from goldilocks.types import Group
from goldilocks.verl.compat.rows import STALE, TRAINED
from goldilocks.verl.update.gates import REASON, KLPenalty, groups_without_signal

# Returns the tensors of these rows, with ``old_log_probs`` and, if asked for, ``ref_log_prob``.
WithLogProbs = Callable[[DataProto, bool], Mapping[str, Tensor]]
OfBatch = Callable[[Sequence[Group]], DataProto]  # the rows of groups


class BatchFilter(FilterGate):
    """``batch_filter.*`` on the rows that would be trained. The two gates cost log-probs of these rows once more."""

    def __init__(self, config: PPOFilterConfig, seed: int, of_batch: OfBatch, with_log_probs: WithLogProbs) -> None:
        super().__init__(config, seed)
        self._of_batch = of_batch
        self._with_log_probs = with_log_probs

    def judge(self, groups: Sequence[Group]) -> Judgement:
        batch, trained = self._trained(groups)
        data = {"rewards": batch.batch["rm_scores"].sum(-1), "response_mask": batch.batch["response_mask"]}
        if self.filter.config.enable_two_gate_filter and "rollout_log_probs" in batch.batch:
            data |= self._log_probs(batch)
        return self.judge_rows(trained, data)

    def _trained(self, groups: Sequence[Group]) -> tuple[DataProto, list[Place]]:
        """Return the rows that would be trained and the rollout of each: an allocator may train them in any order."""
        batch = self._of_batch(groups)
        chosen = batch.non_tensor_batch[TRAINED]
        places = [(rollout.uid, rollout.index) for group in groups for rollout in group.rollouts]
        return batch.select_idxs(chosen), list(itertools.compress(places, chosen))

    def _log_probs(self, batch: DataProto) -> dict[str, Tensor]:
        """A stale row is trained against the engine's log-probs: trainer and engine cannot differ in it."""
        written = batch.batch["rollout_log_probs"]
        stale = torch.from_numpy(batch.non_tensor_batch[STALE]).unsqueeze(-1)
        now = self._with_log_probs(batch, False)["old_log_probs"]
        return {"rollout_log_probs": written, "old_log_probs": torch.where(stale, written, now)}


class FinalReward(Gate):
    """``filter_groups.metric=seq_final_reward``: whole groups whose reward after the KL penalty does not vary."""

    reason = REASON
    refuses_flat = True

    def __init__(
        self,
        penalty: Callable[[], KLPenalty],
        min_std: float | None,
        of_batch: OfBatch,
        with_log_probs: WithLogProbs,
    ) -> None:
        """``penalty`` returns that of the moment: verl may change the coefficient after each update."""
        self._penalty = penalty
        self._min_std = min_std
        self._of_batch = of_batch
        self._with_log_probs = with_log_probs

    def judge(self, groups: Sequence[Group]) -> Judgement:
        batch = self._of_batch(groups)
        scores, uids = batch.batch["rm_scores"].sum(-1), batch.non_tensor_batch["uid"]
        penalties = self._penalty().of(self._with_log_probs(batch, True))
        flat = set(groups_without_signal(uids, scores, penalties, self._min_std))
        rollouts = [rollout for group in groups for rollout in group.rollouts if group.uid in flat]
        return Judgement(by_group((rollout.uid, rollout.index) for rollout in rollouts), {}, {})
