"""The collector in TRL's checkpoint: its state and the rows that wait, and a batch that is only partly trained.

``goldilocks.npz`` and the folder of rows are the first process's. ``goldilocks_batch_RANK.safetensors`` holds each
process's part of a batch that serves several updates, where a checkpoint falls between two of them. Loading executes no
code.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from goldilocks.drive import checkpoint
from goldilocks.runs.checkpoints import FILE, load_state
from goldilocks.trl.collection import Collection
from goldilocks.trl.images import COUNTS
from goldilocks.trl.processes import Processes

logger = logging.getLogger(__name__)

Buffered = list[dict[str, Any]]
ANOTHER_NUMBER = (
    "%s was written by %d processes, and this run has %d: updates that its batch had left are not made, and the run "
    "goes on with a new batch"
)


class Saved:
    """Writes and reads what TRL's checkpoint lacks."""

    def __init__(self, collection: Collection, processes: Processes) -> None:
        self._collection = collection
        self._processes = processes

    def write(self, folder: Path, step: int, buffered: Sequence[dict[str, Any]] | None) -> None:
        """Write everything; each process writes the batch it is training."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(_flat(buffered or ()), folder / self._batch_file)
        self._collection.take_costs()  # of a validation
        if self._collection.driver is not None:
            self._collection.driver.save(folder, step=step, processes=self._processes.count)

    def read(self, folder: Path, device: torch.device) -> tuple[int, Buffered | None]:
        """Take up where ``write`` was called; returns TRL's step and the batch it was training.

        A checkpoint without our state, as ``GRPOTrainer`` writes them, starts a collector anew. So does another number
        of processes start a batch anew: each has saved its own part.
        """
        if not self._processes.decided(lambda: checkpoint.exists(folder)):
            return 0, None
        step, processes, rows = self._processes.decided(lambda: self._take_up(folder))
        if not self._processes.first:
            self._collection.rows.unpack(rows)
        file, own = folder / self._batch_file, self._processes.count
        batch = _nested(load_file(file, device=str(device))) if file.exists() else None
        if processes == own or self._processes.decided(lambda: batch is None):
            return step, batch
        logger.warning(ANOTHER_NUMBER, folder, processes, own)
        return 0, None

    def _take_up(self, folder: Path) -> tuple[int, int, list[dict[str, Any]]]:
        """Load the driver; return TRL's step, who wrote it, and the rows as they travel to the other processes."""
        driver, rows = self._collection.driver, self._collection.rows
        assert driver is not None
        state = load_state(folder / FILE)
        kept = state["rows"]  # an earlier version had them in the state itself
        unfinished = rows.load(folder / kept) if isinstance(kept, str) else rows.unpack(kept)
        driver.load_state_dict(state, unfinished)
        alone = self._processes.count == 1
        processes = state.get("processes", self._processes.count)  # an earlier version did not save it
        return state["step"], processes, [] if alone else rows.packed(dict(rows.items()))

    @property
    def _batch_file(self) -> str:
        return f"goldilocks_batch_{self._processes.rank}.safetensors"


def _flat(parts: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    return {
        f"{place}/{name}": torch.tensor(value) if name in COUNTS else value.clone()  # parts share single numbers
        for place, part in enumerate(parts)
        for name, value in part.items()
        if isinstance(value, Tensor) or name in COUNTS
    }


def _nested(flat: dict[str, Tensor]) -> Buffered | None:
    parts: dict[int, dict[str, Any]] = {}
    for key, value in flat.items():
        place, _, name = key.partition("/")
        parts.setdefault(int(place), {})[name] = value.tolist() if name in COUNTS else value
    return [parts[place] for place in sorted(parts)] or None
