"""The rows of a trainer of TRL's: its sections and data as the core reads them, and its rollouts as TRL returned them.

The sections have the keys and defaults of verl's config, from one definition. Batch sizes, the seed and the longest
answer come from ``GRPOConfig``. The order of the prompts is that of TRL's own sampler.

A rollout is one row, without padding, kept until it is trained or let go. Every process holds the rows of all
processes, so that each can cut its own part of any batch. ``batch_filter.*`` judges rows inside the refill loop.

TRL keeps the images of a batch in columns as long as all images, tiles or patches together, and counts how many of them
each row has. A row keeps its own part, so that rows of several rounds, and of earlier steps, make a batch.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.utils import RepeatSampler, split_pixel_values_by_grid

from goldilocks.config.sections import reward_calls
from goldilocks.config.settings import Settings
from goldilocks.core.source import TablePrompts
from goldilocks.drive.filter_gate import FilterGate
from goldilocks.drive.gate import Judgement
from goldilocks.drive.rows import MemoryRows
from goldilocks.errors import require
from goldilocks.filtering import PPOFilterConfig
from goldilocks.runs.checkpoints import load_state, save_state
from goldilocks.types import Group, OnFull, Rollout

PROMPT = ("prompt_ids", "prompt_mask")  # padded on the left; everything else on the right
LOG_PROBS = "old_per_token_logps"
SAMPLED = "sampling_per_token_logps"  # of the engine that generated
LOG_PROB = "old_logps"  # of a whole completion, where the loss has one ratio a completion
OWN = ("advantages", "num_items_in_batch")  # computed for each batch
FILE = "rows.npz"
OTHERS = ("prompt", "completion", "truncated", "tool_tokens")  # fields of a row that are written as they are
COUNTS = ("num_images", "num_tiles")  # lists with a number for each row
BY_TOKEN = ("token_type_ids", "mm_token_type_ids")  # over prompt and completion
FIELDS = (
    "pixel_values", "image_grid_thw", "pixel_attention_mask", "spatial_shapes", "image_sizes", "image_position_ids",
)  # fmt: skip
IMAGES = frozenset({*COUNTS, *BY_TOKEN, *FIELDS})
IMAGE_COLUMNS = ("images", "image")  # TRL reads the first of them that is there
Section = Mapping[str, Any]


@dataclass(frozen=True)
class CompletionRow:
    """One rollout: its tensors by TRL's names, the value of each reward function, and both texts."""

    tensors: Mapping[str, Tensor]
    rewards: tuple[float, ...]
    prompt: Any
    completion: Any
    truncated: bool = False
    tool_tokens: int = 0

    @property
    def tokens(self) -> int:
        """How many tokens the model wrote; those of tools are not its own."""
        return len(self.tensors["completion_ids"]) - self.tool_tokens

    @property
    def loss_mask(self) -> Tensor:
        mask = self.tensors["completion_mask"]
        return mask * self.tensors["tool_mask"] if "tool_mask" in self.tensors else mask

    def reward(self, weights: Sequence[float]) -> float:
        """Return the weighted sum of the reward functions that apply; NaN where none does."""
        applied = [w * r for w, r in zip(weights, self.rewards, strict=True) if not math.isnan(r)]
        return math.fsum(applied) if applied else math.nan

    def silent(self) -> CompletionRow:
        """Return a row of the same shape that trains nothing: it fills a batch up."""
        emptied = [name for name in ("completion_mask", LOG_PROB) if name in self.tensors]
        return replace(self, tensors={**self.tensors, **{name: self.tensors[name] * 0 for name in emptied}})

    def with_log_probs(self, log_probs: Tensor) -> CompletionRow:
        return replace(self, tensors={**self.tensors, LOG_PROBS: log_probs})

    def with_own_log_probs(self) -> CompletionRow:
        """Return a row whose log-probs are those of the pass that trains it: NaN until then."""
        return self.with_log_probs(torch.full(self.tensors["completion_ids"].shape, math.nan))


class CompletionRows(MemoryRows[CompletionRow]):
    """The rows of all processes, on every process."""

    def save(self, rollouts: Iterable[Rollout], folder: Path) -> None:
        rows = [
            {
                "uid": uid,
                "index": index,
                "tensors": {  # numpy has no bfloat16
                    name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
                    for name, tensor in row.tensors.items()
                },
                "rewards": np.array(row.rewards, dtype=np.float64),
                **{name: getattr(row, name) for name in OTHERS},
            }
            for (uid, index), row in self.of_groups(rollouts).items()
        ]
        save_state({"rows": rows}, folder / FILE)

    def load(self, folder: Path) -> tuple[()]:
        self.groups = {}
        for packed in load_state(folder / FILE)["rows"]:
            tensors = {name: torch.from_numpy(array) for name, array in packed["tensors"].items()}
            row = CompletionRow(tensors, tuple(packed["rewards"].tolist()), **{name: packed[name] for name in OTHERS})
            self.put((packed["uid"], packed["index"]), row)
        return ()


def split_rows(output: Mapping[str, Any], ids: Sequence[Sequence[int]]) -> list[dict[str, Tensor]]:
    """Return the tensors of each row of what TRL made, without padding. ``ids`` are the completions as lists."""
    tensors = {name: value for name, value in output.items() if isinstance(value, Tensor) and value.ndim > 0}
    columns = {name: value.cpu() for name, value in tensors.items() if name not in OWN and name not in IMAGES}
    by_token = columns["completion_ids"].shape[1:]
    prompts = columns["prompt_mask"].sum(1).tolist()
    rows = []
    for place, (prompt, own) in enumerate(zip(prompts, ids, strict=True)):
        row = {}
        for name, column in columns.items():
            if name in PROMPT:
                part = column[place, column.shape[1] - prompt :]
            else:
                part = column[place, : len(own)] if column.shape[1:] == by_token else column[place]
            row[name] = part.clone()  # a view would be sent to other processes with all rows
        rows.append(row)
    seen = split_images(output, prompts, [len(one) for one in ids])
    return [{**row, **own} for row, own in zip(rows, seen, strict=True)]


def join_rows(rows: Sequence[CompletionRow], pad_token: int, multiple: int | None) -> dict[str, Any]:
    """Return the columns that TRL trains on, padded as TRL pads them."""
    fills = {"prompt_ids": pad_token, "completion_ids": pad_token, "tool_mask": 1}
    names = [name for name in rows[0].tensors if all(name in row.tensors for row in rows)]
    columns: dict[str, Tensor] = {}
    for name in (name for name in names if name not in IMAGES):
        values, fill, left = [row.tensors[name] for row in rows], fills.get(name, 0), name in PROMPT
        if values[0].ndim == 0:
            columns[name] = torch.stack(values)
            continue
        column = pad_sequence(values, True, fill, "left" if left else "right")
        more = -column.shape[1] % multiple if multiple and column.shape[1] > 1 else 0
        columns[name] = pad(column, (more, 0) if left else (0, more), value=fill)
    widths = (columns[name].shape[1] for name in ("prompt_ids", "completion_ids"))
    return {**columns, **join_images([row.tensors for row in rows], *widths)}


# -- rows with a signal: the others are counted in the loss's denominator, and not computed ----------------------------


def with_signal(inputs: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """Return the rows to compute, cut to their longest prompt and completion, and the share of all rows that they are.

    The share is 0 where there is nothing to compute.
    """
    has: Tensor = inputs["advantages"] != 0
    if not has.any():
        return {}, 0.0
    kept = {name: value[has] if _per_row(value, len(has)) else value for name, value in inputs.items()}
    prompt, completion = (max(1, int(kept[f"{part}_mask"].sum(1).max())) for part in ("prompt", "completion"))
    width = kept["completion_mask"].shape[1]
    for name, value in kept.items():
        if name in PROMPT:
            kept[name] = value[:, -prompt:]
        elif isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == width:
            kept[name] = value[:, :completion]
    return kept, float(has.sum()) / len(has)


def signal_first(parts: Sequence[dict[str, Any]], together: int) -> list[dict[str, Any]]:
    """Return micro-batches of the same rows, ``together`` at a time for an update; rows with a signal come first.

    An update is a sum over its rows, so their order does not matter to it: where few have a signal, one micro-batch has
    them all and the others need not be computed. Where an update has parts of two batches, the order is left as it is.
    """
    if len(parts) % together and together % len(parts):
        return list(parts)
    ordered: list[dict[str, Any]] = []
    for start in range(0, len(parts), together):
        update = parts[start : start + together]
        by_row = [name for name, value in update[0].items() if _per_row(value, len(update[0]["advantages"]))]
        order = torch.cat([part["advantages"] for part in update]).eq(0).to(torch.uint8).argsort(stable=True)
        columns = {name: torch.cat([part[name] for part in update])[order].chunk(len(update)) for name in by_row}
        ordered += [{**part, **{name: columns[name][place] for name in by_row}} for place, part in enumerate(update)]
    return ordered


def no_loss(model: nn.Module) -> Tensor:
    """Return a loss of zero whose gradient is zero for every parameter, as that of rows without signal is.

    No gradient at all would be another thing: the optimizer would not move, where its momentum moves it on.
    """
    firsts = [one.view(-1)[:1] for one in model.parameters() if one.requires_grad and one.numel()]
    return 0.0 * torch.cat([one.float() for one in firsts]).sum()


def _per_row(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows


class CompletionGate(FilterGate):
    """``batch_filter.*`` on the rows that TRL returned."""

    def __init__(self, config: PPOFilterConfig, seed: int, rows: CompletionRows) -> None:
        super().__init__(config, seed)
        self._rows = rows

    def judge(self, groups: Sequence[Group]) -> Judgement:
        rollouts = [rollout for group in groups for rollout in group.trained]
        places = [(rollout.uid, rollout.index) for rollout in rollouts]
        joined = join_rows(self._rows.get(places), pad_token=0, multiple=None)
        mask = joined["completion_mask"] * joined.get("tool_mask", 1)
        hidden = ~mask.any(1, keepdim=True)  # as a truncated answer may be: it has a length, and nothing to compare
        data = {
            "rewards": torch.tensor([rollout.reward for rollout in rollouts]),
            "response_lengths": torch.tensor([rollout.tokens for rollout in rollouts]),
            "response_mask": mask + hidden,
        }
        # Both are there when vLLM generates: the gates compare what it and the trainer say of the same tokens.
        if LOG_PROBS in joined and SAMPLED in joined:
            old, sampled = (joined[name].masked_fill(hidden, 0.0) for name in (LOG_PROBS, SAMPLED))
            data |= {"old_log_probs": old, "rollout_log_probs": sampled}
        return self.judge_rows(places, data)


# -- images ------------------------------------------------------------------------------------------------------------


def split_images(
    output: Mapping[str, Any], prompts: Sequence[int], completions: Sequence[int]
) -> list[dict[str, Tensor]]:
    """Return what each row has of the images' columns; ``prompts`` and ``completions`` are the lengths of the rows."""
    if "num_images" not in output:
        return [{} for _ in prompts]
    parts = split_pixel_values_by_grid(dict(output))
    begins = output["prompt_ids"].shape[1]
    rows = []
    for place, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        row = {name: torch.tensor(parts[name][place]) for name in COUNTS if name in parts}
        for name in (name for name in FIELDS if name in parts):  # with a dimension that parts are joined along
            column = parts[name]
            row[name] = (column[place : place + 1] if isinstance(column, Tensor) else column[place]).cpu().clone()
        tokens = slice(begins - prompt, begins + completion)
        row |= {name: parts[name][place, tokens].cpu().clone() for name in BY_TOKEN if name in parts}
        rows.append(row)
    return rows


def join_images(rows: Sequence[Mapping[str, Tensor]], prompt: int, completion: int) -> dict[str, Any]:
    """Return the images' columns of a batch whose prompts and completions are padded to these widths."""
    there = {name for row in rows for name in row if name in IMAGES}
    columns: dict[str, Any] = {name: [int(row.get(name, 0)) for row in rows] for name in COUNTS if name in there}
    columns |= {name: _together([row[name] for row in rows if name in row]) for name in FIELDS if name in there}
    columns |= {name: _by_token(name, rows, prompt, completion) for name in BY_TOKEN if name in there}
    return columns


def _together(parts: Sequence[Tensor]) -> Tensor:
    shape = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    widened = []
    for part in parts:
        missing = [size - own for size, own in zip(shape, part.shape[1:], strict=True)]
        widened.append(pad(part, [one for size in reversed(missing) for one in (0, size)]))
    return torch.cat(widened)


def _by_token(name: str, rows: Sequence[Mapping[str, Tensor]], prompt: int, completion: int) -> Tensor:
    out = torch.zeros(len(rows), prompt + completion, dtype=torch.long)
    for place, row in enumerate(rows):
        if name in row:
            start = prompt - len(row["prompt_ids"])
            out[place, start : start + len(row[name])] = row[name]
    return out


def texts_alone(messages: Any) -> Any:
    """Return a conversation that can be written down: of an image its place is left."""
    if isinstance(messages, str):
        return messages
    found = []
    for message in messages:
        parts = message.get("content")
        if isinstance(parts, list):
            texts = (part["text"] if part.get("type") == "text" else f"<{part.get('type')}>" for part in parts)
            message = {**message, "content": "".join(texts)}
        found.append(message)
    return found


class DatasetPrompts(TablePrompts):
    """The prompts of TRL's data set. Where environments write them, a row without a prompt is what its columns say."""

    def __init__(self, dataset: Any, *, environments: bool = False) -> None:
        random_access = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        require(random_access, "train_dataset", type(dataset).__name__, "a data set with a length and random access")
        columns = list(dataset[0]) if len(dataset) else getattr(dataset, "column_names", [])  # a transform adds some
        self._has_prompts = "prompt" in columns
        known = self._has_prompts or environments
        require(known, "train_dataset", columns, "a data set with the column 'prompt', or an environment_factory")
        self.images = next((column for column in IMAGE_COLUMNS if column in columns), None)
        self._dataset = self.table = dataset
        super().__init__(len(dataset))

    def media(self) -> Sequence[str]:
        return () if self.images is None else (self.images,)

    def messages(self) -> Iterable[Any]:
        if not self._has_prompts:
            texts = (json.dumps(row, sort_keys=True, default=str) for row in self._dataset)
            return ([{"role": "user", "content": text}] for text in texts)
        stored = "prompt" in getattr(self._dataset, "column_names", ())
        return self._dataset["prompt"] if stored else (row["prompt"] for row in self._dataset)

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return a row of the data set for each index; equal indices have rows of their own, since TRL writes there."""
        row = {index: self._dataset[index] for index in dict.fromkeys(indices)}
        return [copy.deepcopy(row[index]) for index in indices]


class SamplerOrder:
    """The order in which TRL's sampler goes through the data, by epoch.

    TRL drops what is left of an epoch when no whole batch can be made of it; so does this.
    """

    def __init__(self, dataset: Any, *, groups: int, shuffle: bool, seed: int) -> None:
        size = len(dataset)
        require(size >= groups, "train_dataset", f"{size} prompts", f"at least {groups}: one generation batch")
        own = {"mini_repeat_count": 1, "batch_size": groups, "repeat_count": 1, "shuffle": shuffle, "seed": seed}
        self._sampler = partial(RepeatSampler, dataset, **own)

    def __call__(self, epoch: int) -> np.ndarray:
        """Return the indices of an epoch. One generator shuffles all epochs, so those before it are drawn first."""
        sampler = self._sampler()
        for _ in range(epoch):
            list(sampler)
        return np.array(list(sampler), dtype=np.int64)


@dataclass(frozen=True)
class Sections:
    """What the trainer was given. Nothing at all leaves the trainer exactly TRL's."""

    filter_groups: Section | None = None
    adaptive_rollout: Section | None = None
    goldilocks: Section | None = None
    batch_filter: Section | None = None
    gen_batch_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("filter_groups", "adaptive_rollout", "goldilocks", "batch_filter"):
            section = getattr(self, name)
            accepted = "a section of keys, such as {'enable': True}"
            require(section is None or isinstance(section, Mapping), name, section, accepted)

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
        on_full = settings.surplus().on_full
        accepted = "finish or requeue on TRL; verl's V1 trainer has partial"
        require(on_full is not OnFull.PARTIAL, "filter_groups.on_full", on_full, accepted)
        self.refuse_rewards()
        return settings

    def refuse_rewards(self) -> None:
        """Refuse ``goldilocks.rewards``, which TRL's reward functions know nothing of."""
        given = self.goldilocks or {}
        used = reward_calls({"goldilocks": given}).in_use
        accepted = "no key on TRL, which has reward_funcs and reward_weights; "
        accepted += "goldilocks.rewards.judge makes a reward_func"
        require(not used, "goldilocks.rewards", given.get("rewards"), accepted)
