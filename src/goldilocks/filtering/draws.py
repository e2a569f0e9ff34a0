"""Random numbers that follow the data: the same rows get the same numbers wherever they stand in the batch.

Invariant: what is drawn for a row depends on the call's salt, on its group's rewards and lengths and on its place in
the group; not on the group's place in the batch, the uid's spelling (verl's are random), the device or the process. So
permuting groups permutes the selection. Groups that are equal row for row are told apart by their order alone.

The numbers are SplitMix64 of those integers: 64-bit integer arithmetic, the same to the bit on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from goldilocks.filtering.segments import Segments


@dataclass(frozen=True)
class Draws:
    """One draw per row and one per group."""

    row: Tensor  # float64, uniform in (0, 1)
    group: Tensor

    @classmethod
    def keyed_by_content(cls, salt: int, reward: Tensor, length: Tensor, groups: Segments) -> Draws:
        """Draw for every row and group of a sorted batch."""
        position = groups.position
        content = (reward + 0.0).view(torch.int64) * _REWARD  # + 0.0: one zero, not two
        content += length * _LENGTH
        content += position * _POSITION
        group_key = groups.sum(_mix(content)) ^ salt
        group_key = _mix(group_key + _rank_among_equals(group_key) * _POSITION)
        row_key = groups.spread(group_key).add_((position + 1).mul_(_POSITION))
        return cls(_uniform(_mix(row_key)), _uniform(group_key))


def _rank_among_equals(keys: Tensor) -> Tensor:
    """For each key, how many equal ones stand before it."""
    ordered, order = torch.sort(keys, stable=True)
    rank = torch.empty_like(keys)
    rank[order] = Segments.from_sorted(ordered).position
    return rank


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_POSITION = _signed(0x9E3779B97F4A7C15)  # SplitMix64's own increment
_REWARD = _signed(0xD1342543DE82EF95)
_LENGTH = _signed(0xDA942042E4DD58B5)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finalizer, in place: every output bit depends on every input bit."""
    for shift, factor in ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB))):
        x ^= (x >> shift).bitwise_and_((1 << (64 - shift)) - 1)  # torch shifts in the sign, SplitMix64 zeros
        x *= factor
    x ^= (x >> 31).bitwise_and_((1 << 33) - 1)
    return x


def _uniform(bits: Tensor) -> Tensor:
    """The upper 53 bits as a number in the open interval (0, 1)."""
    return (bits >> 11).bitwise_and_((1 << 53) - 1).to(torch.float64).add_(0.5).mul_(2.0**-53)
