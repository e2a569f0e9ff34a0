"""Rows that are trained again stay in the TransferQueue, where they were put when they were generated.

verl clears the rows of every batch it has trained. A row that may be trained again is taken out of the batch right
before that, and the sampler frees it once the collector has let go of its group. Its log-probs are those of the policy
that wrote it, stored with it. A rollout is dumped with the batch that trains it first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta

from goldilocks.core import Collector
from goldilocks.types import Group

if TYPE_CHECKING:
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync as Base
else:
    Base = object

NOTHING = "nothing"  # a key without fields


class ReplayedRows(Base):
    """What verl does with a batch after its update, with rows in mind that a later batch needs."""

    collector: Collector

    def _compute_metrics(self, batch: KVBatchMeta, *args: Any, **kwargs: Any) -> None:
        super()._compute_metrics(batch, *args, **kwargs)
        if not self.config.trainer.get("rollout_data_dir", None):
            self._spare(batch)

    def _log_rollout_data(self, batch: KVBatchMeta, *args: Any, **kwargs: Any) -> None:
        again = trained_keys(group for group in self.collector.in_hand if group.replays)
        super()._log_rollout_data(without(batch, again), *args, **kwargs)
        self._spare(batch)

    def _spare(self, batch: KVBatchMeta) -> None:
        """Take rows that may be trained again out of the batch: verl clears what is left in it next."""
        rest = without(batch, trained_keys(self.collector.reusable))
        if not rest.keys:  # the TransferQueue refuses to clear nothing
            tq.kv_put(key=NOTHING, partition_id=batch.partition_id, tag={})
            rest.keys, rest.tags = [NOTHING], [{}]
        batch.keys, batch.tags = rest.keys, rest.tags


def trained_keys(groups: Iterable[Group]) -> set[str]:
    """The rows of the groups that are trained."""
    return {key for group in groups for rollout in group.trained for key, _ in rollout.payload}


def without(batch: KVBatchMeta, keys: set[str]) -> KVBatchMeta:
    """The batch less these rows."""
    pairs = [(key, tag) for key, tag in zip(batch.keys, batch.tags, strict=True) if key not in keys]
    return KVBatchMeta(
        partition_id=batch.partition_id,
        keys=[key for key, _ in pairs],
        tags=[tag for _, tag in pairs],
        fields=batch.fields,
        extra_info=batch.extra_info,
    )
