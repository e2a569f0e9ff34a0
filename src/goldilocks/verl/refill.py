"""Rejection inside the refill loop: what a gate refuses is replaced, not masked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from goldilocks.core import Collector, Exhausted
from goldilocks.types import Group

MAX_REFILLS = 32  # of one batch: a gate that rejects this often rejects everything


def replacements(collector: Collector, fill: Callable[[], None]) -> Iterator[Sequence[Group]]:
    """Yield groups in the place of those rejected from the batch in hand, until none is missing.

    The caller judges what it is given before it asks for more. ``fill`` runs the collector's loop until it is ready.
    """
    for _ in range(MAX_REFILLS):
        if not collector.owed:
            return
        if not collector.ready:  # surplus may suffice
            fill()
        groups = collector.take()
        if groups:  # none where the limits leave the batch as it is
            yield groups
    if collector.owed:
        raise Exhausted(
            f"After {MAX_REFILLS} refills {collector.owed} groups are missing: the gate rejects too much. "
            "Look at its metrics and thresholds; algorithm.filter_groups.max_num_gen_batches bounds generation."
        )
