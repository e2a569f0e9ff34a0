"""A ``state_dict`` on disk: JSON and its arrays in one ``.npz`` file. Loading executes no code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from goldilocks.runs.atomic import replacing

_STATE = "state"


def save_state(state: dict[str, Any], path: str | Path) -> None:
    """Write a nested state of JSON values and numpy arrays, whole or not at all."""
    path = Path(path)
    arrays: dict[str, np.ndarray] = {}
    text = json.dumps(_without_arrays(state, arrays))
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, **{_STATE: np.frombuffer(text.encode(), dtype=np.uint8), **arrays})


def load_state(path: str | Path) -> dict[str, Any]:
    """Return what ``save_state`` wrote."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        state = json.loads(arrays.pop(_STATE).tobytes())
    except (KeyError, EOFError, ValueError) as error:
        raise ValueError(f"{path} is not a saved state: {error}") from error
    return dict(_with_arrays(state, arrays))


def _without_arrays(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, np.ndarray):
        name = f"array{len(arrays)}"
        arrays[name] = value
        return {"__array__": name}
    if isinstance(value, dict):
        return {key: _without_arrays(item, arrays) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_arrays(item, arrays) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _with_arrays(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    if isinstance(value, dict):
        if set(value) == {"__array__"}:
            return arrays[value["__array__"]]
        return {key: _with_arrays(item, arrays) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_arrays(item, arrays) for item in value]
    return value
