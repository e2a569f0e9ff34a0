"""A run goes on from the last checkpoint that was written to its end, whichever trainer of TRL's wrote it.

One that ends because its batch cannot be filled writes a checkpoint first.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from goldilocks.core import Exhausted
from goldilocks.errors import require
from goldilocks.runs import checkpoints

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
