"""Which samples of a group with too many are trained, and the random numbers that decide it.

A strategy puts each group's samples in an order and says how many to keep of its head and of its tail. It keeps
``target`` samples of a group that has more, and all of a group that has no more.

Random numbers follow the data: the number of a row depends on the call's salt, on its group's rewards and lengths and
on its place in the group; not on the group's place in the batch, the uid's spelling (verl's are random), the device or
the process. So permuting groups permutes the selection. Groups that are equal row for row are told apart by their order
alone. The numbers are SplitMix64 of those integers: 64-bit integer arithmetic, the same to the bit on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from goldilocks.filtering.rows import Segments


@dataclass(frozen=True)
class Draws:
    """One draw per row and one per group."""

    row: Tensor  # float64, uniform in (0, 1)
    group: Tensor

    @classmethod
    def keyed_by_content(cls, salt: int, reward: Tensor, length: Tensor, groups: Segments) -> Draws:
        """Return the draws of every row and group of a sorted batch."""
        position = groups.position
        content = (reward + 0.0).view(torch.int64) * _REWARD  # + 0.0: one zero, not two
        content += length * _LENGTH
        content += position * _POSITION
        group_key = groups.sum(_mix(content)) ^ salt
        ordered, order = torch.sort(group_key, stable=True)
        rank = torch.empty_like(group_key)  # of a group among those that are equal to it
        rank[order] = Segments.from_sorted(ordered).position
        group_key = _mix(group_key + rank * _POSITION)
        row_key = groups.spread(group_key).add_((position + 1).mul_(_POSITION))
        return cls(_uniform(_mix(row_key)), _uniform(group_key))


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
    """Return the upper 53 bits as a number in the open interval (0, 1)."""
    return (bits >> 11).bitwise_and_((1 << 53) - 1).to(torch.float64).add_(0.5).mul_(2.0**-53)


@dataclass(frozen=True)
class Samples:
    """What a strategy sees: samples sorted by group."""

    groups: Segments
    reward: Tensor  # float64
    length: Tensor
    draw: Tensor  # uniform in (0, 1), one per sample

    @cached_property
    def positive(self) -> Tensor:
        """True for samples with a reward above zero."""
        return self.reward > 0

    @cached_property
    def positives(self) -> Tensor:
        """How many positive samples each group has."""
        return self.groups.sum(self.positive)


@dataclass(frozen=True)
class Order:
    """Samples in order within their groups, and how many of each group's head and tail to keep."""

    rows: Tensor
    head: Tensor
    tail: Tensor


def cut(strategy: str, samples: Samples, target: int, temperature: float) -> Tensor:
    """Return which samples to keep: ``target`` of each group that has more, every sample of the others."""
    order = _STRATEGIES[strategy](samples, target, temperature)
    groups, whole = samples.groups, samples.groups.sizes <= target
    kept = groups.position < groups.spread(torch.where(whole, groups.sizes, order.head))
    kept |= groups.position >= groups.spread(groups.sizes - order.tail)
    return torch.empty_like(kept).index_put_((order.rows,), kept)


def uniform(samples: Samples, target: int, temperature: float) -> Order:
    """Every subset of ``target`` samples is as likely as any other."""
    head = torch.full_like(samples.groups.sizes, target)
    return Order(samples.groups.sort_within(samples.draw), head, torch.zeros_like(head))


def efficiency(samples: Samples, target: int, temperature: float) -> Order:
    """Positives and negatives in their natural ratio: the most reward per token, and the shortest."""
    order = samples.groups.sort_within(_from_both_ends(samples.positive, _efficiency(samples)))
    return Order(order, *_natural_ratio(samples, target))


def efficiency_stochastic(samples: Samples, target: int, temperature: float) -> Order:
    """As ``efficiency``, but drawn: a sample's weight falls by e for each ``temperature`` of the way down the ranks.

    Weights come from ranks, not from reward per token, so no scale of rewards or lengths makes them flat or greedy.
    Drawing without replacement by weight is sorting by log-weight plus Gumbel noise (Kool et al., 2019).
    """
    groups, place = samples.groups, samples.groups.position
    order = groups.sort_within(_from_both_ends(samples.positive, _efficiency(samples)))
    positives, size = groups.spread(samples.positives), groups.spread(groups.sizes)
    positive = place < positives  # of the sorted samples: a draw belongs to a place, not to a sample
    depth = torch.where(positive, place / positives, (size - 1 - place) / (size - positives))
    gumbel = samples.draw.log().neg_().log_().neg_()
    positive_anyway = 64 + 1 / temperature  # Gumbel noise of 53 bits is above -4, and a depth is below 1
    score = gumbel.sub_(depth, alpha=1 / temperature).add_(positive_anyway)
    drawn = groups.sort_within(_from_both_ends(positive, score))
    return Order(order.index_select(0, drawn), *_natural_ratio(samples, target))


def max_variance(samples: Samples, target: int, temperature: float) -> Order:
    """The ``target`` samples whose rewards vary most: the top i and the bottom target − i, for the best i.

    Rewards are put on an integer grid between a group's smallest and largest, so that sums are exact and a tie is a tie
    on every device; it goes to the most even split.
    """
    groups = samples.groups
    bits = max(1, min(20, 30 - target.bit_length()))  # target² × grid² stays below 2⁶²
    low, high = groups.min(samples.reward), groups.max(samples.reward)
    share = (samples.reward - groups.spread(low)) / groups.spread(torch.where(high > low, high - low, 1.0))
    grid = (share * (2**bits - 1)).round_().to(torch.int64)
    order = groups.sort_within(-grid)
    grid = grid.index_select(0, order)
    over = (groups.sizes > target).nonzero().squeeze(1)
    start, end = groups.starts[over, None], (groups.starts + groups.sizes)[over, None]
    top = torch.arange(target + 1, device=grid.device)

    def of_each_split(values: Tensor) -> Tensor:
        before = torch.cat([values.new_zeros(1), values.cumsum(0)])
        return before[start + top] - before[start] + before[end] - before[end - target + top]

    spread = target * of_each_split(grid * grid) - of_each_split(grid).square()
    even_first = (2 * top - target).abs().argsort(stable=True)
    head = torch.full_like(groups.sizes, target)
    head[over] = even_first[spread[:, even_first].argmax(dim=1)]
    return Order(order, head, target - head)


def _efficiency(samples: Samples) -> Tensor:
    """Return the reward per token of a positive, and 1 / tokens of a negative."""
    return torch.where(samples.positive, samples.reward, 1.0).div_(samples.length)


def _from_both_ends(positive: Tensor, score: Tensor) -> Tensor:
    """Return keys that sort positives to the head, best first, and negatives to the tail, best last; scores > 0."""
    return torch.where(positive, -score, score)


def _natural_ratio(samples: Samples, target: int) -> tuple[Tensor, Tensor]:
    """Return how many positives and negatives to keep: the group's ratio, rounded, and at least one of each present."""
    sizes, positives = samples.groups.sizes, samples.positives
    head = (2 * target * positives + sizes) // (2 * sizes)
    both = (positives > 0) & (positives < sizes)
    head = torch.where(both, head.clamp(min(1, target - 1), max(1, target - 1)), head)
    return head, target - head


Strategy = Callable[[Samples, int, float], Order]
_STRATEGIES: dict[str, Strategy] = {
    strategy.__name__: strategy for strategy in (uniform, efficiency, efficiency_stochastic, max_variance)
}
