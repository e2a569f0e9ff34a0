"""A TransferQueue in this process: rows by key, packed and unpacked by verl's own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transfer_queue as tq
from tensordict import NonTensorData, TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict


class Queue:
    """In the place of the TransferQueue's client, for a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}
        monkeypatch.setattr(tq, "kv_batch_get", self._get)
        monkeypatch.setattr(tq, "kv_batch_put", self._put)
        monkeypatch.setattr(tq, "kv_clear", self._clear)

    def batch(self) -> KVBatchMeta:
        """All rows."""
        return KVBatchMeta(partition_id="train", keys=list(self.rows), tags=list(self.tags.values()))

    def add(self, key: str, version: int | None, length: int, *, step: int = 1, **log_probs: float) -> None:
        """A row whose tokens all have the same log-probs; the reward of rollout ``i`` of a group is ``i % 2``."""
        scores = torch.zeros(length)
        scores[-1] = int(key.split("_")[1]) % 2
        fields = {name: torch.full((length,), value) for name, value in log_probs.items()}
        mask = torch.ones(length, dtype=torch.long)
        self.rows[key] = {"response_mask": mask, "rm_scores": scores, "extra_fields": {}, **fields}
        self.tags[key] = {"min_global_steps": version, "global_steps": step}

    def _get(self, keys: list[str], partition_id: str, select_fields: list[str] | None = None) -> TensorDict:
        names = [name for name in select_fields or self.rows[keys[0]] if name in self.rows[keys[0]]]
        return list_of_dict_to_tensordict([{name: self.rows[key][name] for name in names} for key in keys])

    def _put(
        self, keys: list[str], partition_id: str, fields: TensorDict, tags: list[dict[str, Any]] | None = None
    ) -> None:
        for key, tag in zip(keys, tags or (), strict=bool(tags)):
            self.tags[key] = tag
        for name, column in fields.items():
            for key, value in zip(keys, column.unbind(0), strict=True):
                self.rows.setdefault(key, {})[name] = value.data if isinstance(value, NonTensorData) else value

    def _clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            del self.rows[key], self.tags[key]
