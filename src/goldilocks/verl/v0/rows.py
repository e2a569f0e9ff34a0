"""Finished rollouts, kept on the driver until they are trained or dropped, their batches and gates.

A row is everything verl's batch holds of one rollout. Rows are copied out of the generation batch they came with, so
that a dropped group's memory is free at once. What a gate on them needs of the policy is computed while the batch is
being filled.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl import DataProto

from goldilocks.drive.filter_gate import FilterGate
from goldilocks.drive.gate import Gate, Judgement, by_group
from goldilocks.drive.rows import MemoryRows, Place
from goldilocks.filtering import PPOFilterConfig, pad_batch
from goldilocks.types import Group, Rollout
from goldilocks.verl.store.stored_rows import load_rows, save_rows
from goldilocks.verl.update.gates import REASON, KLPenalty, groups_without_signal

TRAINED = "__trained__"  # of each row, whether it is trained: baselines come from all
STALE = "__stale__"  # of each row, whether an older policy wrote it

# Returns the tensors of these rows, with ``old_log_probs`` and, if asked for, ``ref_log_prob``.
WithLogProbs = Callable[[DataProto, bool], Mapping[str, Tensor]]
OfBatch = Callable[[Sequence[Group]], DataProto]  # the rows of groups


@dataclass(frozen=True, slots=True)
class Row:
    """One rollout: a tensor or a value for each field."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]

    def with_fields_of(self, other: Row) -> Row:
        """Return a row with the fields of both; the other row wins."""
        return Row({**self.tensors, **other.tensors}, {**self.values, **other.values})


class ProtoRows(MemoryRows[Row]):
    """Rows that become verl's ``DataProto``."""

    def of_batch(self, groups: Sequence[Group], policy: int) -> DataProto:
        """Return every row of the groups. Rows that are not trained are marked and count for the baseline only.

        ``policy`` is the version that is being trained, in updates.
        """
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        trained = {(rollout.uid, rollout.index) for group in groups for rollout in group.trained}
        places = [(rollout.uid, rollout.index) for rollout in rollouts]
        batch = self.batch(places)
        batch.non_tensor_batch[TRAINED] = np.array([place in trained for place in places])
        written = [(rollout.version, group.version) for group in groups for rollout in group.rollouts]
        versions = [of_group if own is None else own for own, of_group in written]
        batch.non_tensor_batch[STALE] = np.array(versions) < policy
        return batch

    def batch(self, places: Sequence[Place]) -> DataProto:
        """The rows of these rollouts, in this order, with their group's name as ``uid``."""
        rows = self.get(places)
        tensors = {name: torch.stack([row.tensors[name] for row in rows]) for name in rows[0].tensors}
        names = dict.fromkeys(name for row in rows for name in row.values)
        values = {name: _column([row.values.get(name) for row in rows]) for name in names}
        values["uid"] = objects([uid for uid, _ in places])
        return DataProto.from_dict(tensors=tensors, non_tensors=values)

    def save(self, rollouts: Iterable[Rollout], folder: Path) -> None:
        rows = self.of_groups(rollouts)
        save_rows([[*place, row.tensors, row.values] for place, row in rows.items()], folder)

    def load(self, folder: Path) -> tuple[()]:
        """Take back what ``save`` wrote; nothing that was unfinished can go on."""
        for uid, index, tensors, values in load_rows(folder):
            self.put((uid, index), Row(tensors, values))
        return ()


def rows_of(batch: DataProto) -> Iterator[Row]:
    """The batch, row by row."""
    columns = {name: column.unbind(0) for name, column in batch.batch.items()}
    for place in range(len(batch)):
        tensors = {name: column[place].clone() for name, column in columns.items()}
        yield Row(tensors, {name: column[place] for name, column in batch.non_tensor_batch.items()})


def pad_to(batch: DataProto, divisor: int) -> DataProto:
    """Pad the batch at its end, with rows of zero mask, to a size that the workers can divide.

    The batch that ``fit`` holds is never padded: padding is added on the way to the workers and cut from their answer.
    """
    if len(batch) % divisor == 0:
        return batch
    columns = batch.non_tensor_batch
    rows = list(range(len(batch)))  # a uid per row, so that no row is moved to its group
    padded = pad_batch({**batch.batch, **columns}, rows, None, divisor)
    values = {name: padded.batch[name] for name in columns}
    values["uid"] = objects([*columns["uid"], *padded.uids[len(batch) :]])
    tensors = {name: padded.batch[name] for name in batch.batch.keys()}  # noqa: SIM118
    return DataProto.from_dict(tensors=tensors, non_tensors=values, meta_info=batch.meta_info)


def _column(values: list[Any]) -> np.ndarray:
    """Return numbers as a numeric array and anything else as objects, as verl has them."""
    if all(isinstance(value, (bool, int, float, np.generic)) for value in values):
        return np.array(values)
    return objects(values)


def objects(values: Sequence[Any]) -> np.ndarray:
    """Return a column of objects: numpy would make a matrix of values that have a length."""
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


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
        self, penalty: Callable[[], KLPenalty], min_std: float | None, of_batch: OfBatch, with_log_probs: WithLogProbs
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
