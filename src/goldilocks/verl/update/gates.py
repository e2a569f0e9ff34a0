"""The gates on rows of the queue: the batch filter, and ``filter_groups.metric=seq_final_reward``.

The final reward, in both trainers, is the one after the KL penalty. The penalty differs from row to row once the policy
has moved, so a penalised reward always varies. A group teaches something of the task if its reward varies by more than
its penalties alone do.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta

from goldilocks.config.settings import Settings
from goldilocks.drive.filter_gate import FilterGate, joined
from goldilocks.drive.gate import Gate, Judgement, by_group
from goldilocks.filtering import PPOFilterConfig
from goldilocks.runs.records import split_row_key
from goldilocks.types import Group, mean_and_std
from goldilocks.verl.store.behaviour import stale_tokens
from goldilocks.verl.store.rows import batch_of

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
        return self.select(batch.keys, self._tensors(batch, self._policy()))

    def select(self, keys: Sequence[str], data: Mapping[str, torch.Tensor]) -> Judgement:
        """Judge rows whose tensors are at hand."""
        return self.judge_rows([split_row_key(key) for key in keys], data)

    def _tensors(self, batch: KVBatchMeta, policy: int) -> dict[str, torch.Tensor]:
        fields = ["rm_scores", "response_mask"]
        if self.filter.config.enable_two_gate_filter:
            fields += ["old_log_probs", "rollout_log_probs", "extra_fields"]
        stored = _get(batch, fields)
        extra = stored.pop("extra_fields").tolist() if "extra_fields" in stored.keys() else []  # noqa: SIM118
        data = dict(stored.to_padded_tensor().items())
        data["rewards"] = data.pop("rm_scores").sum(-1)
        if "rollout_log_probs" in data and "old_log_probs" in data:
            # A stale token is trained against the engine's log-prob: trainer and engine cannot differ in it.
            stale = stale_tokens(batch.tags, policy, data["response_mask"])
            data["old_log_probs"] = torch.where(stale, data["rollout_log_probs"], data["old_log_probs"])
        if extra and all("top_log_probs" in one for one in extra):
            data["top_log_probs"] = _pad([one["top_log_probs"] for one in extra], data["response_mask"])
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
        rows = _get(batch, ["rm_scores", "response_mask", "old_log_probs", "ref_log_prob"]).to_padded_tensor()
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


def _get(batch: KVBatchMeta, fields: list[str]) -> TensorDict:
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)


def _pad(rows: list[list[float]], like: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(like.shape, dtype=torch.float32)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = torch.tensor(row)[: padded.shape[1]]
    return padded
