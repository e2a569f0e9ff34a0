"""What both of verl's trainers share: data as prompts, the driver in checkpoints and at the end, validation by column.

Invariant: the state lies in the folder of the weights it belongs to, ``global_step_N``, and nowhere else. A run that
ends because a batch cannot be filled saves the weights of its last update, with everything generated since; so the
newest checkpoint is always the newest consistent state, whatever ``trainer.save_freq`` is.

How many updates the epochs make is known only when they are over: each dropped group costs a prompt and trains nothing.
verl counts the updates as if no group were dropped: an upper bound.

Validation adds accuracy by the columns of ``goldilocks.validate_by`` and, on V1, how many answers failed. verl names an
answer by the uid of its prompt and does not keep the row of the data. So a data loader remembers the rows: verl 0.9.1
writes the uid into them (V1) or takes the uid that they have (V0).
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from omegaconf import DictConfig, open_dict
from torch.utils.data import SequentialSampler

from goldilocks.config.settings import Settings
from goldilocks.core import Collector, Exhausted
from goldilocks.core.source import TablePrompts
from goldilocks.dotted_keys import value_at
from goldilocks.drive.driver import Driver, Epochs
from goldilocks.drive.rehearsal import rehearse
from goldilocks.errors import require
from goldilocks.hashing import MEDIA
from goldilocks.runs.checkpoints import FILE
from goldilocks.runs.history import accuracy_by, value_of
from goldilocks.verl.store import check_columns
from goldilocks.verl.tested import untested
from goldilocks.verl.validation import validation_figures

logger = logging.getLogger(__name__)

Batch = dict[str, Any]
FEW = 8  # rows that are looked at of a column with times
TIMES = re.compile(r"(duration|time32|time64)\[")  # in the names of Arrow's types: only these may have no JSON


class DatasetSource(TablePrompts):
    """The prompts of verl's data set."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.table = getattr(dataset, "dataframe", None)
        self._kinds: dict[tuple[str, type], tuple[str, Any]] = {}  # without a table: a value of each type in a column
        super().__init__(len(dataset))

    def messages(self) -> Iterable[Any]:
        """The chat messages of each prompt, without building training rows if the data set allows it."""
        key = getattr(self.dataset, "prompt_key", None)
        if self.table is not None and key is not None:
            yield from self.table[key]
            return
        for index in range(len(self.dataset)):
            row = self.dataset[index]
            for name, value in row.items():
                self._kinds.setdefault((name, type(value)), (name, value))
            yield row["raw_prompt"]

    def values(self) -> Iterator[tuple[str, Any]]:
        """Yield values with their columns: the first row's, each type's where there is no table, else some times."""
        yield from (*(first := self.dataset[0]).items(), *self._kinds.values())
        schema = getattr(getattr(self.table, "features", None), "arrow_schema", ())
        if names := [one.name for one in schema if one.name in first and TIMES.search(str(one.type))]:
            parts = self.table.select_columns(names).with_format("arrow")[:].flatten().flatten()  # structs in structs
            for name in (name for name in parts.column_names if TIMES.search(str(parts[name].type))):
                for place in np.flatnonzero(parts[name].is_valid().to_numpy())[:FEW].tolist():
                    yield from self.dataset[place].items()  # as the data set makes it of what is stored

    def media(self) -> Sequence[str]:
        if getattr(self.dataset, "prompt_key", None) is None:
            return ()  # the messages are whole
        names = (getattr(self.dataset, key, None) for key in MEDIA)
        return [str(name) for name in names if name in getattr(self.table, "column_names", ())]


def loader_order(sampler: Any) -> Callable[[int], np.ndarray]:
    """Return a function from the epoch to the order in which a data loader with this sampler visits the data.

    The order of any epoch must be known without going through the epochs before it: only samplers that depend on
    nothing but their seed are accepted.
    """
    from torchdata.stateful_dataloader.sampler import RandomSampler

    size = len(sampler)
    if isinstance(sampler, SequentialSampler):
        return lambda epoch: np.arange(size)
    if not (type(sampler) is RandomSampler and not sampler.replacement and size == len(sampler.data_source)):
        raise ValueError(
            f"train_sampler={type(sampler).__name__} is not accepted: a SequentialSampler, or torchdata's "
            "RandomSampler over all data. To choose prompts, write a selector (goldilocks.selector)"
        )
    state = sampler.generator.get_state()

    def order(epoch: int) -> np.ndarray:
        generator = torch.Generator()
        generator.set_state(state)
        for _ in range(epoch):
            torch.randperm(size, generator=generator)
        return torch.randperm(size, generator=generator).numpy()

    return order


class Driven:
    """Mixed into one of verl's trainers: its batches are a driver's, which ends the run and is saved with verl's
    checkpoints; and it validates by column."""

    if TYPE_CHECKING:
        config: Any
        settings: Settings
        train_dataset: Any
        train_dataloader: Any
        val_dataloader: Any
        total_training_steps: int
        global_steps: int
        checkpoint_manager: Any

    collector: Collector
    driver: Driver
    _saved_step: int | None = None  # of the newest checkpoint whose weights are in its folder for certain

    def _collect(self) -> None:
        """Rehearse the config, and make the collector of the trainer's data in the order of its loader."""
        print(self.settings.summary(), flush=True)
        source = DatasetSource(self.train_dataset)
        rehearse(self.settings, source)
        if self.settings.carries_groups and self.config.trainer.save_freq > 0:
            check_columns(source.values())
        self.collector = self.settings.collector(source, loader_order(self.train_dataloader.sampler))
        for note in (schedule_note(self.config, self.settings, self.total_training_steps), untested("verl")):
            if note:
                print(note)

    def _mini_batches(self, section: Any) -> int:
        """How many mini-batches of the actor's or the critic's section are a batch, a last smaller one counted too."""
        return int(-(-self.config.data.train_batch_size // section.ppo_mini_batch_size))  # both counted in prompts

    def _end_if_over(self, metrics: dict[str, float]) -> bool:
        """Return whether this update is the last: the budget is spent, or the epochs are over.

        verl asks before an update whether it is the last one. That is known only after it, so what verl does at the
        end, validate and save, is asked for by the frequencies it looks at next.
        """
        trainer, meter, last = self.config.trainer, self.driver.meter, self.driver.over
        if meter.budget.costs:
            metrics["budget/spent"] = meter.share
        if meter.budget.validations is not None:
            trainer.test_freq = self.global_steps if meter.validation_due() or last else 0
        if last:
            for key in ("test_freq", "save_freq"):
                trainer[key] = self.global_steps if trainer[key] > 0 else trainer[key]
        return last

    @property
    def _checkpoint(self) -> Path:
        return Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"

    def _save_checkpoint(self) -> None:
        """The driver's state first: verl writes the file that makes the checkpoint count last."""
        self.driver.save(self._checkpoint)
        self._saved_step = self.global_steps
        super()._save_checkpoint()  # type: ignore[misc]

    def _load_checkpoint(self) -> None:
        """Load the state that belongs to the weights verl has loaded, and say what was found."""
        super()._load_checkpoint()  # type: ignore[misc]
        trainer = self.config.trainer
        if trainer.resume_mode == "disable":
            return
        folder = Path(trainer.resume_from_path) if trainer.resume_mode == "resume_path" else self._checkpoint
        if (folder / FILE).exists():
            self.driver.load(folder)
            if folder.resolve() == self._checkpoint.resolve() and not trainer.del_local_ckpt_after_load:
                self._saved_step = self.global_steps
            collector = self.collector
            paused = f", {len(collector.paused)} rollouts go on from what they had written" if collector.paused else ""
            print(
                f"Goldilocks goes on from {folder}: {collector.prompts_issued} prompts issued, {len(collector.kept)} "
                f"groups wait to be trained, {len(collector.waiting_rollouts)} rollouts are kept{paused}"
            )
        elif folder.is_dir():
            print(
                f"Goldilocks finds no {FILE} in {folder}, a checkpoint of verl's own trainer: its weights are "
                "taken up; the data begin anew with the first prompt of the first epoch, and every count at 0"
            )

    @contextmanager
    def _keeping_what_was_generated(self) -> Iterator[None]:
        """A batch that cannot be filled ends the run; the next start goes on from there."""
        try:
            yield
        except Exhausted as error:
            self.driver.put_back()
            self.global_steps -= 1  # the weights are those of the update before this step, the last that was made
            if self._saved_step == self.global_steps:
                self.driver.save(self._checkpoint)  # its weights are there already
            else:
                self.checkpoint_manager.sleep_replicas()
                self._save_checkpoint()
            raise Exhausted(f"{error} What was generated is saved in {self._checkpoint}.") from error

    def _validate(self, *args: Any, **kwargs: Any) -> Any:
        loader = self.val_dataloader
        if self.settings.policies.validate_by:
            self.val_dataloader = self._validated = RememberingLoader(loader)
        try:
            return super()._validate(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.val_dataloader = loader

    def _val_metrics_update(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        sources, uids, infos, turns = args
        expected: Mapping[Any, int] | None = kwargs.get("expected_acc_counts")  # how many each prompt was asked for
        ours = validation_figures(sources, uids, infos, expected or {})
        left = args if ours is None else ([], [], {}, turns)  # verl then counts the turns alone
        metrics = (ours or {}) | super()._val_metrics_update(*left, **kwargs)  # type: ignore[misc]
        columns = self.settings.policies.validate_by
        right = infos.get("acc") or infos["reward"]
        rows = self._validated.rows() if columns else {}
        for column in columns:
            values = [value_of(rows[str(uid)], column) for uid in uids]
            metrics |= accuracy_by(column, values, [float(one or 0.0) for one in right])
        if expected is not None:  # on V0 a failure ends the run
            failed = metrics["val/failed_answers"] = sum(expected.values()) - len(uids)
            if failed:  # though it may be the reward function that failed
                said = "%d of %d answers of the validation failed: verl's acc counts them as wrong"
                logger.warning(said, failed, failed + len(uids))
        self.collector.beliefs.tell(metrics)
        return metrics


@contextmanager
def changed(section: DictConfig, **values: Any) -> Iterator[None]:
    """Set keys of a section of the config within the block."""
    before = {key: section.get(key) for key in values}
    with open_dict(section):
        section.update(values)
        try:
            yield
        finally:
            section.update(before)


class UpdatesPerEpoch(Epochs):
    """The epochs of ``trainer.total_epochs``, unless ``trainer.total_training_steps`` ends the run."""

    def __init__(self, trainer: Any, collector: Collector) -> None:
        steps, epochs, batch = trainer.total_training_steps, trainer.total_epochs, collector.target_groups
        super().__init__(collector, epochs if steps is None else None)
        self._last = epochs - 1
        accepted = f"at most {self.size}, the prompts there are: without trainer.total_training_steps no update is made"
        fits = steps is not None or batch <= self.size or trainer.get("val_only", False)
        require(fits, "data.train_batch_size", batch, accepted)
        if 0 < self.size // batch * epochs < (steps or 0):
            print(f"Goldilocks: total_training_steps={steps} ends this run; verl's ends with total_epochs={epochs}")

    def __rfloordiv__(self, updates: int) -> int:
        """verl asks for ``updates // updates_per_epoch`` and ends at ``total_epochs``; ``over`` decides the end."""
        return int(min(self.current, self._last))


def schedule_note(config: Any, settings: Settings, updates: int) -> str | None:
    """Return a note on a learning rate that is scheduled over ``updates``, if epochs end the run and groups drop."""
    if config.trainer.total_training_steps is not None or not settings.drops_groups:
        return None
    for section in ("actor_rollout_ref.actor.optim", "critic.optim"):
        optim = value_at(config, section) or {}
        kind = optim.get("lr_scheduler_type", optim.get("lr_decay_style", "constant"))
        if kind != "constant" or optim.get("lr_warmup_steps_ratio", 0):
            return (
                f"Goldilocks: trainer.total_epochs={config.trainer.total_epochs} makes {updates} updates at most, "
                f"fewer where groups are dropped. The learning rate of {section} ({kind}) is scheduled over {updates}: "
                "set trainer.total_training_steps to the number of updates that you expect"
            )
    return None


class RememberingLoader:
    """A data loader whose batches are remembered, each row under its uid."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._batches: list[Batch] = []

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._loader:
            batch.setdefault("uid", np.array([str(uuid.uuid4()) for _ in next(iter(batch.values()))], dtype=object))
            self._batches.append(batch)
            yield batch

    def rows(self) -> dict[str, Batch]:
        """Return the columns of each row, without tensors, by the row's uid."""
        return {
            str(uid): {name: values[place] for name, values in batch.items() if isinstance(values, np.ndarray | list)}
            for batch in self._batches
            for place, uid in enumerate(batch["uid"])
        }
