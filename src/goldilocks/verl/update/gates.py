"""The gates on rows of the queue: the batch filter, and ``filter_groups.metric=seq_final_reward``.

The final reward is the one after the KL penalty. Once the policy has moved, the penalty differs from row to row, so a
penalised reward always varies. A group has signal if its final reward varies by more than its penalties alone do.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transfer_queue as tq
from torch import Tensor
from transfer_queue import KVBatchMeta

from goldilocks.config.settings import Settings
from goldilocks.drive.filter_gate import FilterGate, joined
from goldilocks.drive.gate import Gate, Judgement, by_group
from goldilocks.filtering import PPOFilterConfig
from goldilocks.runs.records import split_row_key
from goldilocks.types import Group, mean_and_std
from goldilocks.verl.store import batch_of, stale_tokens

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
    flat = []
    for uid, rows in groups.items():
        if len(rows) > 1:
            (_, spread), (_, of_penalties) = (mean_and_std(values) for values in zip(*rows, strict=True))
            if spread <= (of_penalties + MARGIN if min_std is None else min_std):
                flat.append(uid)
    return flat


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
        """What the filter reads of the rows, padded."""
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


class FinalRewardGate(QueueGate):
    """``filter_groups.metric=seq_final_reward``: variance of the summed token-level rewards after the KL penalty."""

    reason = REASON
    refuses_flat = True

    def __init__(self, penalty: Callable[[], KLPenalty], min_std: float | None, prepare: Prepare) -> None:
        """``penalty`` returns that of the moment: verl may change the coefficient after each update."""
        self._penalty = penalty
        self._min_std = min_std
        self._prepare = prepare

    def judge_batch(self, batch: KVBatchMeta) -> Judgement:
        fields = ["rm_scores", "response_mask", "old_log_probs", "ref_log_prob"]
        stored = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        rows = stored.to_padded_tensor()
        places = [split_row_key(key) for key in batch.keys]
        rollouts = list(dict.fromkeys(places))
        each = {"scores": rows["rm_scores"].sum(-1), "penalties": self._penalty().of(rows).unsqueeze(-1)}
        whole = joined(places, each)  # a rollout has one score, and the penalties of all its rows
        uids, penalties = [uid for uid, _ in rollouts], whole["penalties"].sum(-1)
        flat = set(groups_without_signal(uids, whole["scores"], penalties, self._min_std))
        return Judgement(by_group(place for place in places if place[0] in flat), {}, {})


def build_gate(
    settings: Settings, penalty: Callable[[], KLPenalty], policy: Callable[[], int], prepare: Prepare
) -> Gate | None:
    """The gate these settings ask for, if any."""
    if settings.gate_config is not None:
        return BatchFilterGate(settings.gate_config, settings.seed, policy, prepare)
    if settings.judges_final_reward:
        return FinalRewardGate(penalty, settings.filter_groups.min_std, prepare)
    return None
