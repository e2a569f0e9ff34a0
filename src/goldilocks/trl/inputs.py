"""What a trainer of TRL's is given, as the core reads it: sections with verl's keys, and the data as prompts.

The keys and defaults are those of verl's config, from one definition. Batch sizes, the seed and the longest answer come
from ``GRPOConfig``. The order of the prompts is that of TRL's own sampler.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from trl.trainer.utils import RepeatSampler

from goldilocks.config.settings import Settings, reward_calls
from goldilocks.core.source import TablePrompts
from goldilocks.errors import require
from goldilocks.trl.rows import splits_images
from goldilocks.types import OnFull

IMAGES = ("images", "image")  # TRL reads the first of them that is there


class DatasetPrompts(TablePrompts):
    """The prompts of TRL's data set."""

    def __init__(self, dataset: Any) -> None:
        random_access = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        require(random_access, "train_dataset", type(dataset).__name__, "a data set with a length and random access")
        columns = getattr(dataset, "column_names", None) or list(dataset[0])
        require("prompt" in columns, "train_dataset", columns, "a data set with the column 'prompt'")
        self.images = next((column for column in columns if column in IMAGES), None)
        known = self.images is None or splits_images()
        require(known, "train_dataset", self.images, "no images, unless every section is left out, with this TRL")
        self._dataset = self.table = dataset
        super().__init__(len(dataset))

    def media(self) -> Sequence[str]:
        return () if self.images is None else (self.images,)

    def messages(self) -> Iterable[Any]:
        named = hasattr(self._dataset, "column_names")
        return self._dataset["prompt"] if named else (row["prompt"] for row in self._dataset)

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return a row of the data set for each index; equal indices have rows of their own, since TRL writes there."""
        distinct = list(dict.fromkeys(indices))  # reading a row is dear, copying it is not
        together = getattr(self._dataset, "__getitems__", None)
        fetched = together(distinct) if together else [self._dataset[index] for index in distinct]
        row = dict(zip(distinct, fetched, strict=True))
        return [_copied(row[index]) for index in indices]


def _copied(value: Any) -> Any:
    """Return a copy of a row as data sets have them, for a tenth of what ``copy.deepcopy`` takes."""
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_copied(one) for one in value]
    shared = isinstance(value, str | int | float | None) or hasattr(value, "tobytes")  # nobody writes into an image
    return value if shared else copy.deepcopy(value)


class SamplerOrder:
    """The order in which TRL's sampler goes through the data, by epoch.

    TRL drops what is left of an epoch when no whole batch can be made of it; so does this.
    """

    def __init__(self, dataset: Any, *, groups: int, shuffle: bool, seed: int) -> None:
        self._make: Callable[[], Any] = lambda: RepeatSampler(
            dataset, mini_repeat_count=1, batch_size=groups, repeat_count=1, shuffle=shuffle, seed=seed
        )
        self._sampler = self._make()
        self._next_epoch = 0
        size = len(dataset)
        require(size >= groups, "train_dataset", f"{size} prompts", f"at least {groups}: one generation batch")

    def __call__(self, epoch: int) -> np.ndarray:
        """Return the indices of an epoch. One generator shuffles all epochs, so they are drawn in turn."""
        if epoch < self._next_epoch:
            self._sampler, self._next_epoch = self._make(), 0
        for _ in range(epoch - self._next_epoch):
            list(self._sampler)
        self._next_epoch = epoch + 1
        return np.array(list(self._sampler), dtype=np.int64)


Section = Mapping[str, Any]


@dataclass(frozen=True)
class Sections:
    """What the trainer was given. Nothing at all leaves the trainer exactly TRL's."""

    filter_groups: Section | None = None
    adaptive_rollout: Section | None = None
    goldilocks: Section | None = None
    batch_filter: Section | None = None
    gen_batch_size: int | None = None

    @property
    def given(self) -> bool:
        """Whether the user asked for anything."""
        return any(value is not None for value in asdict(self).values())

    def config(self, args: Any) -> dict[str, Any]:
        """Return the config that verl would have for this: what ``Settings`` reads, and what a report shows."""
        return {
            "data": {
                "train_batch_size": args.generation_batch_size // args.num_generations,
                "gen_batch_size": self.gen_batch_size,
                "max_response_length": args.max_completion_length,
                "seed": args.seed,
            },
            "actor_rollout_ref": {"rollout": {"n": args.num_generations}},
            "algorithm": {"use_kl_in_reward": False, "filter_groups": dict(self.filter_groups or {})},
            "adaptive_rollout": dict(self.adaptive_rollout or {}),
            "goldilocks": dict(self.goldilocks or {}),
            "batch_filter": None if self.batch_filter is None else dict(self.batch_filter),
        }

    def settings(self, args: Any) -> Settings:
        """Read and check; every error names the key, the value and what is accepted."""
        settings = Settings.from_config(self.config(args))
        aggregation = settings.policies.loss_agg
        on_full = settings.surplus().on_full
        accepted = "finish or requeue on TRL; verl's V1 trainer has partial"
        require(on_full is not OnFull.PARTIAL, "filter_groups.on_full", on_full, accepted)
        require(aggregation is None, "goldilocks.loss_agg", aggregation, "none on TRL; GRPOConfig.loss_type decides it")
        self.refuse_rewards()
        return settings

    def refuse_rewards(self) -> None:
        """Refuse ``goldilocks.rewards``, which TRL's reward functions know nothing of."""
        given = self.goldilocks or {}
        used = reward_calls({"goldilocks": given}).in_use
        accepted = "no key on TRL, which has reward_funcs and reward_weights; "
        accepted += "goldilocks.rewards.judge makes a reward_func"
        require(not used, "goldilocks.rewards", given.get("rewards"), accepted)
