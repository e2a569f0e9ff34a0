"""The collector in TRL's checkpoint: its state and the rows that wait, and a batch that is only partly trained.

``goldilocks.npz`` is the first process's. ``goldilocks_batch_RANK.safetensors`` holds each process's part of a batch
that serves several updates, where a checkpoint falls between two of them. Loading either executes no code.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from goldilocks.runs.checkpoints import FILE, load_state, save_state
from goldilocks.trl.budget import BudgetCallback
from goldilocks.trl.collection import Collection
from goldilocks.trl.processes import Processes

Buffered = list[dict[str, Tensor]]


class Saved:
    """Writes and reads what TRL's checkpoint lacks."""

    def __init__(self, collection: Collection, budget: BudgetCallback, processes: Processes) -> None:
        self._collection = collection
        self._budget = budget
        self._processes = processes

    def write(self, folder: Path, step: int, buffered: Sequence[dict[str, Any]] | None) -> None:
        """Write everything; each process writes the batch it is training."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(_flat(buffered or ()), folder / self._batch_file)
        decisions = self._collection.decisions
        if decisions is not None:
            rows = self._collection.rows.state_dict({uid for uid, _ in decisions.waiting()})
            state = {**decisions.state_dict(), "rows": rows, "step": step, "meter": self._budget.state_dict()}
            save_state(state, folder / FILE)

    def read(self, folder: Path, device: torch.device) -> tuple[int, Buffered | None]:
        """Take up where ``write`` was called; returns TRL's step and the batch it was training.

        A checkpoint without our state, as ``GRPOTrainer`` writes them, starts a collector anew.
        """
        state = self._processes.decided(lambda: load_state(folder / FILE) if (folder / FILE).exists() else None)
        if state is None:
            return 0, None
        self._collection.rows.load_state_dict(state["rows"])
        if self._collection.decisions is not None:
            self._collection.decisions.load_state_dict(state)
        self._budget.load_state_dict(state["meter"])
        file = folder / self._batch_file
        return state["step"], _nested(load_file(file, device=str(device))) if file.exists() else None

    @property
    def _batch_file(self) -> str:
        return f"goldilocks_batch_{self._processes.rank}.safetensors"


def _flat(parts: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    return {
        f"{place}/{name}": value.clone()  # parts share what is one number for all of them
        for place, part in enumerate(parts)
        for name, value in part.items()
        if isinstance(value, Tensor)
    }


def _nested(flat: dict[str, Tensor]) -> Buffered | None:
    parts: dict[int, dict[str, Tensor]] = {}
    for key, value in flat.items():
        place, _, name = key.partition("/")
        parts.setdefault(int(place), {})[name] = value
    return [parts[place] for place in sorted(parts)] or None
