"""Rollouts that wait in the TransferQueue, on disk: tensors as safetensors, everything else as JSON.

Loading executes no code. What is neither a tensor nor a JSON value cannot be saved, and says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transfer_queue as tq
from safetensors.torch import load_file, save_file
from tensordict import NonTensorData
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from goldilocks.types import Rollout
from goldilocks.verl.row_json import dump_values
from goldilocks.verl.v1.fields import PARTITION

TENSORS, VALUES = "tensors.safetensors", "values.json"


def save_rows(rollouts: Iterable[Rollout], folder: Path) -> None:
    """Copy the rollouts' rows out of the queue."""
    pairs = [pair for rollout in rollouts for pair in rollout.payload]
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    rows: list[dict[str, Any]] = []
    if pairs:
        stored = tq.kv_batch_get(keys=[key for key, _ in pairs], partition_id=PARTITION)
        for place, (key, tag) in enumerate(pairs):
            row = {name: _plain(value) for name, value in stored[place].items()}
            found = {name: value for name, value in row.items() if isinstance(value, torch.Tensor)}
            tensors |= {f"{place}/{name}": value.contiguous().clone() for name, value in found.items()}
            values = {name: value for name, value in row.items() if name not in found}
            rows.append({"key": key, "tag": tag, "tensors": sorted(found), "values": values})
    text = dump_values(rows)
    save_file(tensors, folder / TENSORS)
    (folder / VALUES).write_text(text)


def load_rows(folder: Path) -> None:
    """Put the rows back into the queue under their keys."""
    rows = json.loads((folder / VALUES).read_text())
    if not rows:
        return
    tensors = load_file(folder / TENSORS)
    fields = [
        {**row["values"], **{name: tensors[f"{place}/{name}"] for name in row["tensors"]}}
        for place, row in enumerate(rows)
    ]
    tq.kv_batch_put(
        keys=[row["key"] for row in rows],
        partition_id=PARTITION,
        fields=list_of_dict_to_tensordict(fields),
        tags=[row["tag"] for row in rows],
    )


def _plain(value: Any) -> Any:
    return value.data if isinstance(value, NonTensorData) else value
