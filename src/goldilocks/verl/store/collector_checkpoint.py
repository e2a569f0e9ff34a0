"""The collector's part of a verl checkpoint: what both trainers save beside the weights and load again.

Invariant: the state lies in the folder of the weights it belongs to, ``global_step_N``, and nowhere else. A run that
ends because a batch cannot be filled saves the weights of its last update, with everything generated since; so the
newest checkpoint is always the newest consistent state, whatever ``trainer.save_freq`` is.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from goldilocks.core import Collector, Exhausted
from goldilocks.runs.checkpoints import load_state, save_state
from goldilocks.types import Rollout

STATE, ROWS = "goldilocks.npz", "goldilocks_rows"
OF_OLD = "interrupted_step_*"  # folders of an earlier version, which had no weights beside them


class Stateful(Protocol):
    """Something whose state is saved with the collector's."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class RowStore(Protocol):
    """Where the trainer keeps the tensors of rollouts that wait; ``load`` returns unfinished ones that can go on."""

    def save(self, rollouts: Iterable[Rollout], folder: Path) -> None: ...

    def load(self, folder: Path) -> Collection[tuple[str, int]]: ...


class CollectorCheckpoint:
    """Saves and loads a collector, the rows of its rollouts, and ``parts``: what else decides how the run goes on."""

    def __init__(self, trainer: Any, collector: Collector, rows: RowStore, **parts: Stateful) -> None:
        """``trainer`` is that section of verl's config."""
        self._trainer = trainer
        self._collector = collector
        self._rows = rows
        self._parts = parts
        self.step: int | None = None  # of the newest checkpoint whose weights are in its folder for certain

    def folder(self, step: int) -> Path:
        """Return the folder in which verl saves this step's weights."""
        return Path(self._trainer.default_local_dir) / f"global_step_{step}"

    def save(self, step: int) -> None:
        """Write the state into the folder of the step; rows first, since the state names the rows it goes with."""
        folder = self.folder(step)
        folder.mkdir(parents=True, exist_ok=True)
        before = list(folder.glob(f"{ROWS}*"))
        rows = f"{ROWS}_{self._collector.accounts.generated_rollouts}"
        self._rows.save(self._collector.waiting_rollouts, folder / rows)
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        save_state({"collector": self._collector.state_dict(), "rows": rows, **parts}, folder / STATE)
        for old in before:
            if old.name != rows:
                shutil.rmtree(old)
        self.step = step

    def take_up(self, step: int) -> None:
        """Load the state that belongs to the weights verl has loaded, and say what was found."""
        if self._trainer.resume_mode == "disable":
            return
        self._say_what_is_left_out()
        path = self._trainer.resume_from_path
        folder = Path(path) if self._trainer.resume_mode == "resume_path" else self.folder(step)
        if (folder / STATE).exists():
            self._load(folder)
            here = folder.resolve() == self.folder(step).resolve()
            self.step = step if here and not self._trainer.del_local_ckpt_after_load else None
            print(f"Goldilocks goes on from {folder}: {self._summary()}")
        elif folder.is_dir():
            print(
                f"Goldilocks finds no {STATE} in {folder}, a checkpoint of verl's own trainer: its weights are "
                "taken up; the data begin anew with the first prompt of the first epoch, and every count at 0"
            )

    def _load(self, folder: Path) -> None:
        state = load_state(folder / STATE)
        self._collector.load_state_dict(state["collector"])
        self._collector.reissue(known=self._rows.load(folder / state.get("rows", ROWS)))
        for name, part in self._parts.items():
            if state.get(name):
                part.load_state_dict(state[name])

    def _summary(self) -> str:
        collector = self._collector
        return (
            f"{collector.prompts_issued} prompts issued, {len(collector.kept)} groups wait to be trained, "
            f"{len(collector.waiting_rollouts)} rollouts are kept{self._paused()}"
        )

    def _paused(self) -> str:
        rollouts = len(self._collector.paused)
        return f", {rollouts} rollouts go on from what they had written" if rollouts else ""

    def _say_what_is_left_out(self) -> None:
        for folder in sorted(Path(self._trainer.default_local_dir).glob(OF_OLD)):
            print(f"Goldilocks does not take up {folder}: an earlier version wrote it, without the weights it is about")


class SavesCollector:
    """Mixed into one of verl's trainers: the collector is saved and taken up with verl's checkpoints."""

    if TYPE_CHECKING:
        global_steps: int
        collector: Collector
        checkpoint_manager: Any

    collector_checkpoint: CollectorCheckpoint

    def _save_checkpoint(self) -> None:
        """The collector's state first: verl writes the file that makes the checkpoint count last."""
        self.collector_checkpoint.save(self.global_steps)
        super()._save_checkpoint()  # type: ignore[misc]

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()  # type: ignore[misc]
        self.collector_checkpoint.take_up(self.global_steps)

    @contextmanager
    def _keeping_what_was_generated(self) -> Iterator[None]:
        """A batch that cannot be filled ends the run; the next start goes on from there."""
        try:
            yield
        except Exhausted as error:
            folder = self._save_unfinished_step()
            raise Exhausted(f"{error} What was generated is saved in {folder}.") from error

    def _save_unfinished_step(self) -> Path:
        """Save with the weights of the update before this step, which is the last that was made."""
        checkpoint = self.collector_checkpoint
        self.collector.put_back()
        self.global_steps -= 1
        if checkpoint.step == self.global_steps:
            checkpoint.save(self.global_steps)  # its weights are there already
        else:
            self.checkpoint_manager.sleep_replicas()
            self._save_checkpoint()
        return checkpoint.folder(self.global_steps)
