"""Rows of rollouts on disk: tensors and arrays as safetensors, everything else as JSON. Loading executes no code.

A row is any nesting of dicts and lists. A tensor comes back as a tensor and an array of numbers as an array, however
deep it was. What is neither of these nor a JSON value cannot be saved, and the error names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

TENSORS, VALUES = "tensors.safetensors", "values.json"
TENSOR, ARRAY, PAIRS = "__tensor__", "__array__", "__pairs__"  # what stands in the JSON for what it cannot hold

Tensors = dict[str, torch.Tensor]


def save_rows(rows: Sequence[Any], folder: Path) -> None:
    """Write the rows into the folder."""
    tensors: Tensors = {}
    text = json.dumps([_to_json(row, tensors) for row in rows])
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS)
    (folder / VALUES).write_text(text)


def load_rows(folder: Path) -> list[Any]:
    """Return what ``save_rows`` wrote."""
    tensors = load_file(folder / TENSORS)
    return [_from_json(row, tensors) for row in json.loads((folder / VALUES).read_text())]


def _to_json(value: Any, tensors: Tensors) -> Any:
    if isinstance(value, torch.Tensor):
        return {TENSOR: _store(value, tensors)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {ARRAY: _store(torch.from_numpy(np.ascontiguousarray(value)), tensors)}
    if isinstance(value, Mapping):
        return _mapping_to_json(value, tensors)
    if isinstance(value, (list, tuple)):
        return [_to_json(item, tensors) for item in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return _to_json(_plain(value), tensors)


def _mapping_to_json(value: Mapping[Any, Any], tensors: Tensors) -> Any:
    """JSON has text keys only, and a key of the user's may be one of our marks."""
    if all(isinstance(key, str) and key not in (TENSOR, ARRAY, PAIRS) for key in value):
        return {key: _to_json(item, tensors) for key, item in value.items()}
    return {PAIRS: [[_to_json(key, tensors), _to_json(item, tensors)] for key, item in value.items()]}


def _store(tensor: torch.Tensor, tensors: Tensors) -> str:
    name = str(len(tensors))
    tensors[name] = tensor.detach().cpu().contiguous().clone()
    return name


def _plain(value: Any) -> Any:
    """Return what stands for an object of a library: an array, a number, the fields of a model."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "model_dump"):
        return value.model_dump()
    raise ValueError(
        f"a rollout has a field that is neither a tensor nor a JSON value: {type(value).__name__} {value!r:.80}"
    )


def _from_json(value: Any, tensors: Tensors) -> Any:
    if isinstance(value, list):
        return [_from_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value)) if len(value) == 1 else None
    if mark in _MARKS:
        return _MARKS[mark](value[mark], tensors)
    return {key: _from_json(item, tensors) for key, item in value.items()}


_MARKS: dict[str, Callable[[Any, Tensors], Any]] = {
    TENSOR: lambda name, tensors: tensors[name],
    ARRAY: lambda name, tensors: tensors[name].numpy(),
    PAIRS: lambda pairs, tensors: {_from_json(key, tensors): _from_json(item, tensors) for key, item in pairs},
}
