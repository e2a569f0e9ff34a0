"""A run goes on from the last checkpoint that was written to its end, whichever trainer of TRL's wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from goldilocks.errors import require
from goldilocks.runs import checkpoints

if TYPE_CHECKING:
    Base = Any  # a trainer of TRL's, which comes behind the mixin
else:
    Base = object


class WholeCheckpoints(Base):  # type: ignore[misc]
    """A mixin for a trainer of TRL's."""

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """TRL's; ``resume_from_checkpoint=True`` takes the last checkpoint that was written to its end."""
        if resume_from_checkpoint is True:
            root = self.args.output_dir
            found = checkpoints.last_whole(Path(root))
            require(found is not None, "resume_from_checkpoint", True, f"False: {root} has no whole checkpoint")
            resume_from_checkpoint = str(found)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _checkpoint_folder(self, trial: Any) -> Path:
        return Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
