"""Adds accuracy by the columns of ``goldilocks.validate_by`` to the validation metrics of verl's trainers.

On V1 it also adds how many answers failed.

verl's validation names an answer by the uid of its prompt and does not keep the row of the data. So a data loader
remembers the rows: verl 0.9.1 writes the uid into them (V1) or takes the uid that they have (V0).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from goldilocks.runs.history import accuracy_by, value_of

logger = logging.getLogger(__name__)

Batch = dict[str, Any]


class ValidatesByColumn:
    """Mixed into one of verl's trainers."""

    config: Any
    settings: Any
    collector: Any
    val_dataloader: Any

    def _validate(self, *args: Any, **kwargs: Any) -> Any:
        if not self.settings.policies.validate_by:
            return super()._validate(*args, **kwargs)  # type: ignore[misc]
        loader = self.val_dataloader
        self.val_dataloader = self._validated = RememberingLoader(loader)
        try:
            return super()._validate(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.val_dataloader = loader

    def _val_metrics_update(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics: dict[str, float] = super()._val_metrics_update(*args, **kwargs)  # type: ignore[misc]
        uids: Sequence[str] = args[1]
        infos: Mapping[str, Sequence[Any]] = args[2]
        columns = self.settings.policies.validate_by
        right = infos.get("acc") or infos["reward"]
        rows = self._validated.rows() if columns else {}
        for column in columns:
            values = [value_of(rows[str(uid)], column) for uid in uids]
            metrics |= accuracy_by(column, values, [float(one or 0.0) for one in right])
        metrics |= failed_answers(kwargs.get("expected_acc_counts"), len(uids))
        self.collector.beliefs.prior.tell(metrics)
        return metrics


def failed_answers(expected: Mapping[Any, int] | None, graded: int) -> dict[str, float]:
    """Return the metric of the answers that are missing; ``expected`` has how many each prompt was asked for.

    verl's V1 counts a rollout that failed as a wrong answer, though it may be the reward function that failed.
    """
    if expected is None:  # V0, where a failure ends the run
        return {}
    asked = sum(expected.values())
    if failed := asked - graded:
        logger.warning("%d of %d answers of the validation failed: verl's acc counts them as wrong", failed, asked)
    return {"val/failed_answers": failed}


class RememberingLoader:
    """A data loader whose batches are remembered, each row under its uid."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._batches: list[Batch] = []

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            size = len(next(iter(batch.values())))
            batch.setdefault("uid", np.array([str(uuid.uuid4()) for _ in range(size)], dtype=object))
            self._batches.append(batch)
            yield batch

    def rows(self) -> dict[str, Batch]:
        """Return the columns of each row, without tensors, by the row's uid."""
        found: dict[str, Batch] = {}
        for batch in self._batches:
            columns = {name: values for name, values in batch.items() if isinstance(values, np.ndarray | list)}
            for place, uid in enumerate(batch["uid"]):
                found[str(uid)] = {name: values[place] for name, values in columns.items()}
        return found
