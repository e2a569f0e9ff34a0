"""The rows of a batch that are still in play: index, group, reward and length.

Invariant: rows are sorted by group; groups stand in the order of their first occurrence in the batch, and the rows of a
group in the order of the batch. Behind ``valid_rows`` every reward is finite and every response has a token.

A group is a slice ``[start, start + size)``, and a reduction or a sort over all groups is one call on the whole tensor.
Its cost depends on the number of rows, not of groups: no code loops over groups.

Padding fills a batch up with rows that are not trained, in two stages: every incomplete group up to the group size, its
padding right behind it; then the batch up to a multiple of what data-parallel ranks and mini-batches divide it by, at
the end. A padding row is a real row's prompt with an empty response. Its masks, rewards and advantages are zero and its
uid is its own, so it enters no group's mean or standard deviation, and none of its tokens enters a loss. Real rows keep
their values and their order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from goldilocks.errors import require

Uids = Sequence[object] | np.ndarray | Tensor


@dataclass(frozen=True)
class Rows:
    """Rows sorted by group."""

    index: Tensor  # of the row in the batch
    group: Tensor  # its group's number, by first occurrence
    reward: Tensor  # float64
    length: Tensor
    given: Tensor  # how many rows its group had when the batch came in

    @cached_property
    def groups(self) -> Segments:
        return Segments.from_sorted(self.group)

    def __len__(self) -> int:
        return self.index.numel()

    def where(self, kept: Tensor) -> Rows:
        if bool(kept.all()):
            return self
        chosen = kept.nonzero().squeeze(1)
        columns = (self.index, self.group, self.reward, self.length, self.given)
        return Rows(*(values.index_select(0, chosen) for values in columns))

    def where_group(self, kept: Tensor) -> Rows:
        return self if bool(kept.all()) else self.where(self.groups.spread(kept))


def read_rows(batch: Mapping[str, Any], uids: Uids) -> Rows:
    """Return every row of a batch, grouped. Raise ``ValueError`` for a field that is missing or has the wrong shape."""
    reward = row_tensor(batch, "rewards", dim=1)
    require_uids(uids, len(reward))
    length = response_lengths(batch, reward)
    group = first_occurrence_codes(uids).to(reward.device)
    order = torch.arange(reward.numel(), device=reward.device)
    reward = reward.to(torch.float64)
    if not bool((group[1:] >= group[:-1]).all()):
        group, order = torch.sort(group, stable=True)
        reward, length = reward[order], length[order]
    groups = Segments.from_sorted(group)
    return Rows(order, group, reward, length, given=groups.spread(groups.sizes))


def valid_rows(rows: Rows, on_invalid: str) -> Rows:
    """Return the rows with a finite reward and a response; for others raise ``ValueError``, or drop them."""
    finite, empty = rows.reward.isfinite(), rows.length < 1
    valid = finite & ~empty
    if on_invalid == "error" and not bool(valid.all()):
        worst = int(rows.index[~valid].min())
        at = int((rows.index == worst).nonzero())
        field, value, wanted = "rewards", float(rows.reward[at]), "a finite number"
        if bool(finite[at]):
            field, value, wanted = "response_lengths", int(rows.length[at]), "at least one response token"
        accepted = f"{wanted}; with batch_filter.invalid_rows=drop such rows are dropped and counted"
        raise ValueError(f"{field}[{worst}]={value} is not accepted: {accepted}")
    return rows.where(valid)


def require_uids(uids: Uids, rows: int) -> None:
    """Raise a ``ValueError`` unless there is one uid for each row."""
    require(len(uids) == rows, "uids", f"{len(uids)} uids", f"one for each of the {rows} rows")


def row_tensor(batch: Mapping[str, Any], name: str, dim: int, like: Tensor | None = None) -> Tensor:
    """Return a field that must be a tensor of ``dim`` dimensions, with the rows and the device of ``like``."""
    if name not in batch:
        raise ValueError(f"{name} is missing from the batch, which has {sorted(batch)}")
    value = batch[name]
    shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    fits = isinstance(value, Tensor) and value.dim() == dim
    require(fits, name, shape, f"a tensor of {dim} dimension{'s' * (dim > 1)}")
    if like is not None:
        same = len(value) == len(like) and value.device == like.device
        require(same, name, f"{shape} on {value.device}", f"{len(like)} rows on {like.device}, as the other tensors")
    return value  # type: ignore[no-any-return]


def response_lengths(batch: Mapping[str, Any], like: Tensor) -> Tensor:
    """Return the tokens of each response: ``response_lengths`` if given, else counted from ``response_mask``."""
    if "response_lengths" in batch:
        return row_tensor(batch, "response_lengths", 1, like).to(torch.int64)
    if "response_mask" not in batch:
        raise ValueError(f"response_lengths and response_mask are missing from the batch, which has {sorted(batch)}")
    return count_tokens(row_tensor(batch, "response_mask", 2, like))


def count_tokens(mask: Tensor) -> Tensor:
    counts = torch.empty(len(mask), dtype=torch.int64, device=mask.device)
    for block in row_blocks(mask):
        counts[block] = mask[block].sum(-1, dtype=torch.int32)
    return counts


def row_blocks(tokens: Tensor) -> Iterator[slice]:
    """Return slices of rows: temporaries stay small, and on the CPU in cache, whatever the batch."""
    elements = 2**20 if tokens.device.type == "cpu" else 2**22
    step = max(1, elements // max(1, tokens.shape[1]))
    return (slice(start, start + step) for start in range(0, len(tokens), step))


def first_occurrence_codes(uids: Uids) -> Tensor:
    """Return each uid's number, counted from 0 in the order in which uids first appear.

    Rows of a group usually stand together, so a uid is looked up only where it differs from the one before it.
    """
    if isinstance(uids, Tensor):
        array = uids.numpy(force=True)
    else:
        array = uids if isinstance(uids, np.ndarray) else np.fromiter(uids, object, len(uids))
    begins = np.flatnonzero(np.concatenate([np.ones(min(1, len(array)), bool), array[1:] != array[:-1]]))
    number_of: defaultdict[object, int] = defaultdict(count().__next__)
    numbers = np.fromiter(map(number_of.__getitem__, array[begins].tolist()), np.int64, len(begins))
    return torch.from_numpy(numbers.repeat(np.diff(begins, append=len(array))))


def take_rows(batch: Mapping[str, Any], index: Tensor, rows: int) -> dict[str, Any]:
    """Return the rows at ``index`` of every field: tensors, numpy arrays and lists of ``rows`` rows."""
    taken: dict[str, Any] = {}
    for name, value in batch.items():
        found = f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else type(value).__name__
        fits = isinstance(value, (Tensor, np.ndarray, list)) and len(value) == rows
        require(fits, name, found, f"a tensor, a numpy array or a list of {rows} rows")
        if isinstance(value, Tensor):
            taken[name] = value.index_select(0, index.to(value.device))
        elif isinstance(value, np.ndarray):
            taken[name] = value[index.cpu().numpy()]
        else:
            taken[name] = [value[row] for row in index.tolist()]
    return taken


@dataclass(frozen=True)
class Segments:
    """Runs of equal keys in a sorted tensor."""

    of_row: Tensor  # the run each row belongs to, counted from 0
    starts: Tensor
    sizes: Tensor

    @classmethod
    def from_sorted(cls, keys: Tensor) -> Segments:
        first = torch.ones_like(keys, dtype=torch.bool)
        torch.ne(keys[1:], keys[:-1], out=first[1:])
        starts = first.nonzero().squeeze(1)
        return cls(first.cumsum(0) - 1, starts, starts.diff(append=starts.new_full((1,), keys.numel())))

    def __len__(self) -> int:
        return self.starts.numel()

    @cached_property
    def position(self) -> Tensor:
        """The place of each row in its run, from 0."""
        return torch.arange(self.of_row.numel(), device=self.of_row.device).sub_(self.spread(self.starts))

    def spread(self, values: Tensor) -> Tensor:
        """Return each run's value at every row of the run."""
        return values.index_select(0, self.of_row)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over each run; exact for integers and booleans."""
        if values.is_floating_point():
            return self._reduce(values, "sum")
        total = torch.cat([values.new_zeros(1, dtype=torch.int64), values.cumsum(0, dtype=torch.int64)])
        return total[self.starts + self.sizes] - total[self.starts]

    def min(self, values: Tensor) -> Tensor:
        return self._reduce(values, "min")

    def max(self, values: Tensor) -> Tensor:
        return self._reduce(values, "max")

    def std(self, values: Tensor) -> Tensor:
        """Return the unbiased standard deviation of each run; NaN for a run of one, exactly zero for equal values."""
        offset = values - self.spread(self.min(values))
        mean = self.sum(offset) / self.sizes
        squares = offset.sub_(self.spread(mean)).square_()
        return (self.sum(squares) / (self.sizes - 1)).sqrt_()

    def sort_within(self, keys: Tensor) -> Tensor:
        """Return the permutation that sorts each run by ``keys``, ascending and stable; runs stay in place.

        Keys are compared in single precision, so that a run's number and a key fit one integer and one radix sort does.
        Runs of one size are the rows of a matrix, which torch sorts several times faster, to the same order.
        """
        keys = keys.to(torch.float32)
        if len(self) and bool((self.sizes == self.sizes[0]).all()):
            within = torch.sort(keys.view(len(self), -1), dim=1, stable=True).indices
            return within.add_(self.starts[:, None]).flatten()
        bits = (keys + 0.0).view(torch.int32)  # + 0.0: one zero, not two
        bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)  # negative numbers' bits count downwards: now integers sort alike
        return torch.sort((self.of_row << 32).add_(bits), stable=True).indices

    def _reduce(self, values: Tensor, how: str) -> Tensor:
        if not len(self):
            return values.new_empty(0)
        return torch.segment_reduce(values, how, lengths=self.sizes, unsafe=True)


# -- padding -----------------------------------------------------------------------------------------------------------

PADDING_UID = "__padding__"

# Fields that are zero in a padding row: which tokens count, and what they count for.
ZEROED = (
    "response_mask", "loss_mask", "response_lengths", "rewards", "rm_scores", "token_level_scores",
    "token_level_rewards", "advantages", "returns",
)  # fmt: skip


@dataclass(frozen=True)
class PaddedBatch:
    """A batch with padding rows."""

    batch: dict[str, Any]
    uids: list[object]
    is_padding: Tensor


def pad_batch(batch: Mapping[str, Any], uids: Uids, group_size: int | None, divisor: int) -> PaddedBatch:
    """Fill incomplete groups up to ``group_size`` (None: leave groups as they are) and the batch up to ``divisor``.

    Groups come out in the order of first occurrence, each in one piece. Padding rows copy the row with the fewest
    response tokens, then ``ZEROED`` fields are zero and the response's part of ``attention_mask`` is too. Each has a
    uid of its own, so that it shifts no baseline.
    """
    require(divisor >= 1, "divisor", divisor, "1 or more")
    mask = row_tensor(batch, "response_mask", 2)
    require_uids(uids, len(mask))
    require(len(mask) > 0, "response_mask", "no rows", "at least one row: a padding row is made from a real one")
    group, rows = torch.sort(first_occurrence_codes(uids), stable=True)
    place, total = torch.arange(len(rows)), len(rows)
    if group_size is not None:
        groups = Segments.from_sorted(group)
        largest = int(groups.sizes.max())
        require(group_size >= largest, "group_size", group_size, f"{largest} or more, the size of the largest group")
        place, total = groups.of_row * group_size + groups.position, len(groups) * group_size
    total = -(-total // divisor) * divisor
    is_padding = torch.ones(total, dtype=torch.bool).index_fill_(0, place, False)
    source = torch.full((total,), int(mask.sum(-1).argmin())).index_copy_(0, place, rows)
    padded = take_rows(batch, source, len(mask))
    for name in set(ZEROED) & padded.keys():
        column = padded[name]
        fits = isinstance(column, (Tensor, np.ndarray))
        require(fits, name, type(column).__name__, "a tensor or a numpy array, which padding can zero")
        column[is_padding if isinstance(column, Tensor) else is_padding.numpy()] = 0
    if "attention_mask" in padded:
        padded["attention_mask"][is_padding, -mask.shape[1] :] = 0
    values = uids.tolist() if isinstance(uids, (np.ndarray, Tensor)) else uids
    made = zip(source.tolist(), is_padding.tolist(), strict=True)
    named = [f"{PADDING_UID}{at}" if padding else values[row] for at, (row, padding) in enumerate(made)]
    return PaddedBatch(padded, named, is_padding.to(mask.device))
