"""The collector in the checkpoints of TRL's trainers.

``WholeCheckpoints`` is the order of writing, for every trainer: a run goes on from the last checkpoint that was written
to its end, and one that ends because its batch cannot be filled writes a checkpoint first.

``Saved`` is what the checkpoint of a synchronous trainer has beside TRL's files. ``goldilocks.npz`` and the folder of
rows are the first process's. ``goldilocks_batch_RANK.safetensors`` holds each process's part of a batch that serves
several updates, where a checkpoint falls between two of them. Loading executes no code.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from goldilocks.core import Exhausted
from goldilocks.errors import require
from goldilocks.runs import checkpoints
from goldilocks.runs.checkpoints import FILE, load_state
from goldilocks.trl.collection import Collection, Processes
from goldilocks.trl.rows import COUNTS

logger = logging.getLogger(__name__)

Buffered = list[dict[str, Any]]
ANOTHER_NUMBER = (
    "%s was written by %d processes, and this run has %d: updates that its batch had left are not made, and the run "
    "goes on with a new batch"
)

if TYPE_CHECKING:
    Base = Any  # a trainer of TRL's, which comes behind the mixin
else:
    Base = object


class WholeCheckpoints(Base):  # type: ignore[misc]
    """A mixin for a trainer of TRL's."""

    _renamed = False  # whether the checkpoint that was loaded last has weights under other names than the model

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """TRL's; ``resume_from_checkpoint=True`` takes the last checkpoint that was written to its end."""
        if resume_from_checkpoint is True:
            root = self.args.output_dir
            found = checkpoints.last_whole(Path(root))
            require(found is not None, "resume_from_checkpoint", True, f"False: {root} has no whole checkpoint")
            resume_from_checkpoint = str(found)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The Trainer's, and the weights that it leaves out.

        transformers saves some models, such as LLaVA, under the names of their first release. ``from_pretrained`` knows
        them; the Trainer does not, and would go on with the weights of the start.
        """
        self._renamed = False
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._renamed:
            there = self.model if model is None else model
            saved = type(there).from_pretrained(resume_from_checkpoint, dtype=there.dtype)
            there.load_state_dict(saved.state_dict())

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        self._renamed = bool(load_result.unexpected_keys and load_result.missing_keys)
        if not self._renamed:
            super()._issue_warnings_after_load(load_result)

    def _save_collected(self, folder: Path) -> None:
        """Write the collector's state into the folder of a checkpoint, on every process."""
        raise NotImplementedError

    def _load_collected(self, folder: Path) -> None:
        """Go on from what ``_save_collected`` wrote."""
        raise NotImplementedError

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The collector's state first: TRL writes the file that makes the checkpoint count last."""
        folder = self._checkpoint_folder(trial)
        if self.args.should_save:  # one process: another might be late, and find the checkpoint whole
            checkpoints.begin_again(folder)
        self._save_collected(folder)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._load_collected(Path(checkpoint))

    def _save_unfinished(self, why: object) -> Exhausted:
        """Save what was generated for a batch that cannot be filled; return the error that says where.

        A run that goes on begins with what is saved here.
        """
        self._save_checkpoint(self.model, None)
        return Exhausted(f"{why} What was generated is saved in {self._checkpoint_folder(None)}.")

    def _save_rng_state(self, output_dir: str) -> None:
        """TRL's; what makes the checkpoint count comes next, and every process must have written its part by then."""
        super()._save_rng_state(output_dir)
        self.accelerator.wait_for_everyone()

    def _checkpoint_folder(self, trial: Any) -> Path:
        return Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"


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
        if not self._processes.decided((folder / FILE).exists):
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
