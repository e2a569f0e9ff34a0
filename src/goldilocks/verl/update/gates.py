"""The gates on rows of the queue: the batch filter, and ``filter_groups.metric=seq_final_reward``.

The final reward is the one after the KL penalty. Once the policy has moved, the penalty differs from row to row, so a
penalised reward always varies. A group has signal if its final reward varies by more than its penalties alone do. A
group of one rollout has none.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transfer_queue as tq
from torch import Tensor
from transfer_queue import KVBatchMeta

from goldilocks.config.settings import Settings
from goldilocks.drive.filter_gate import FilterGate, joined
from goldilocks.drive.gate import Gate, Judgement, by_group
from goldilocks.drive.rows import Place
from goldilocks.filtering import PPOFilterConfig
from goldilocks.types import Group, mean_and_std, split_row_key
from goldilocks.verl.store import batch_of, stale_tokens

MARGIN = 1e-6  # more than rounding
Prepare = Callable[[Sequence[Group]], None]  # puts log-probs of the rows of these groups into the queue


class QueueGate(Gate):
    """A gate on rows of the queue, whose log-probs are computed before they are judged."""

    _prepare: Prepare

    def prepare(self, groups: Sequence[Group]) -> None:
        self._prepare(groups)

    def judge(self, groups: Sequence[Group]) -> Judgement:
        return self.judge_batch(batch_of(groups))

    @abstractmethod
    def judge_batch(self, batch: KVBatchMeta) -> Judgement:
        """Judge rows of the queue."""


class BatchFilterGate(QueueGate, FilterGate):
    """``batch_filter.*`` on rows of the queue."""

    def __init__(self, config: PPOFilterConfig, seed: int, policy: Callable[[], int], prepare: Prepare) -> None:
        """``policy`` returns the version that is being trained, in updates."""
        super().__init__(config, seed)
        self._policy = policy
        self._prepare = prepare

    def judge_batch(self, batch: KVBatchMeta) -> Judgement:
        return self.judge_rows([split_row_key(key) for key in batch.keys], self._tensors(batch))

    def _tensors(self, batch: KVBatchMeta) -> dict[str, Tensor]:
        fields = ["rm_scores", "response_mask"]
        if self.filter.config.enable_two_gate_filter:
            fields += ["old_log_probs", "rollout_log_probs", "extra_fields"]
        stored = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        extra = stored.pop("extra_fields").tolist() if "extra_fields" in stored.keys() else []  # noqa: SIM118
        data = dict(stored.to_padded_tensor().items())
        mask = data["response_mask"]
        data["rewards"] = data.pop("rm_scores").sum(-1)
        if "rollout_log_probs" in data and "old_log_probs" in data:
            # A stale token is trained against the engine's log-prob: trainer and engine cannot differ in it.
            stale = stale_tokens(batch.tags, self._policy(), mask)
            data["old_log_probs"] = torch.where(stale, data["rollout_log_probs"], data["old_log_probs"])
        if extra and all("top_log_probs" in one for one in extra):
            top = data["top_log_probs"] = torch.zeros(mask.shape, dtype=torch.float32)
            for place, one in enumerate(extra):
                row = torch.tensor(one["top_log_probs"])[: mask.shape[1]]
                top[place, : len(row)] = row
        return data


class KLRewardGate(Gate):
    """``filter_groups.metric=seq_final_reward``: variance of the summed token-level rewards after the KL penalty."""

    reason = "no_variance_after_kl"
    refuses_flat = True

    def __init__(self, kind: str, coefficient: Callable[[], float], min_std: float | None) -> None:
        """``kind`` is ``algorithm.kl_penalty``. verl may change the ``coefficient`` after each update.

        The final reward must have a standard deviation above ``min_std``; None: above that of the group's penalties.
        """
        self._kind, self._coefficient, self._min_std = kind, coefficient, min_std

    def judge_rows(self, places: Sequence[Place], rows: Any) -> Judgement:
        """Judge whole groups whose tensors are at hand, by verl's names; ``places`` has the rollout of each row."""
        from verl.trainer.ppo.core_algos import kl_penalty

        kl = kl_penalty(rows["old_log_probs"], rows["ref_log_prob"], kl_penalty=self._kind)
        penalty = (self._coefficient() * kl * rows["response_mask"]).sum(-1, keepdim=True)
        # A rollout has one score, and the penalties of all its rows.
        whole = joined(places, {"scores": rows["rm_scores"].sum(-1), "penalties": penalty})
        scores, penalties = whole["scores"].double().tolist(), whole["penalties"].sum(-1).double().tolist()
        groups: dict[str, list[tuple[float, float]]] = {}
        for (uid, _), score, penalty in zip(dict.fromkeys(places), scores, penalties, strict=True):
            groups.setdefault(uid, []).append((score - penalty, penalty))
        flat = set()
        for uid, rollouts in groups.items():
            (_, spread), (_, of_penalties) = (mean_and_std(values) for values in zip(*rollouts, strict=True))
            if len(rollouts) == 1 or spread <= (of_penalties + MARGIN if self._min_std is None else self._min_std):
                flat.add(uid)
        return Judgement(by_group(place for place in places if place[0] in flat), {}, {})


class FinalRewardGate(QueueGate, KLRewardGate):
    """``filter_groups.metric=seq_final_reward`` on rows of the queue."""

    def __init__(self, kind: str, coefficient: Callable[[], float], min_std: float | None, prepare: Prepare) -> None:
        super().__init__(kind, coefficient, min_std)
        self._prepare = prepare

    def judge_batch(self, batch: KVBatchMeta) -> Judgement:
        fields = ["rm_scores", "response_mask", "old_log_probs", "ref_log_prob"]
        stored = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        return self.judge_rows([split_row_key(key) for key in batch.keys], stored.to_padded_tensor())


def build_gate(
    settings: Settings, kind: str, coefficient: Callable[[], float], policy: Callable[[], int], prepare: Prepare
) -> Gate | None:
    """The gate these settings ask for, if any; ``kind`` and ``coefficient`` are of the KL penalty."""
    if settings.gate_config is not None:
        return BatchFilterGate(settings.gate_config, settings.seed, policy, prepare)
    if settings.judges_final_reward:
        return FinalRewardGate(kind, coefficient, settings.filter_groups.min_std, prepare)
    return None
