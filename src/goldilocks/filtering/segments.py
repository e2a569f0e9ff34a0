"""Groups as runs of rows, so that no code loops over groups.

Rows are sorted by group. A group is a slice ``[start, start + size)``, and a reduction or a sort over all groups is one
call on the whole tensor. Its cost depends on the number of rows, not of groups.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np
import torch
from torch import Tensor


def first_occurrence_codes(uids: Sequence[object] | np.ndarray | Tensor) -> Tensor:
    """Return each uid's number, counted from 0 in the order in which uids first appear.

    Rows of a group usually stand together, so a uid is looked up only where it differs from the one before it.
    """
    array = _as_array(uids)
    begins = np.flatnonzero(np.concatenate([np.ones(min(1, len(array)), bool), array[1:] != array[:-1]]))
    number_of: defaultdict[object, int] = defaultdict(count().__next__)
    numbers = np.fromiter(map(number_of.__getitem__, array[begins].tolist()), np.int64, len(begins))
    return torch.from_numpy(numbers.repeat(np.diff(begins, append=len(array))))


def _as_array(uids: Sequence[object] | np.ndarray | Tensor) -> np.ndarray:
    if isinstance(uids, Tensor):
        return uids.numpy(force=True)
    return uids if isinstance(uids, np.ndarray) else np.fromiter(uids, object, len(uids))


@dataclass(frozen=True)
class Segments:
    """Runs of equal keys in a sorted tensor."""

    of_row: Tensor  # the run each row belongs to, counted from 0
    starts: Tensor
    sizes: Tensor

    @classmethod
    def from_sorted(cls, keys: Tensor) -> Segments:
        """Return the runs of a sorted tensor."""
        first = torch.ones_like(keys, dtype=torch.bool)
        torch.ne(keys[1:], keys[:-1], out=first[1:])
        starts = first.nonzero().squeeze(1)
        ends = torch.cat([starts[1:], starts.new_full((min(1, keys.numel()),), keys.numel())])
        return cls(first.cumsum(0) - 1, starts, ends - starts)

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
