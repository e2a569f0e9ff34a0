"""Rejection inside the refill loop: what a gate refuses is replaced, not masked.

Invariant: every fresh group of a batch is judged once. Groups that are trained again passed when they were fresh, and
dropped ones that fill the batch up are known to teach nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from goldilocks.core import Collector, Exhausted
from goldilocks.drive.gate import Judgement
from goldilocks.filtering.batch_filter import combined_metrics
from goldilocks.types import Group

MAX_REFILLS = 32  # of one batch: a gate that rejects this often rejects everything

Judge = Callable[[Sequence[Group]], Judgement]


class Refills:
    """The judgements of one batch: of what was taken first, and of what took the place of rejected groups."""

    def __init__(self, collector: Collector, reason: str, *, flat: bool) -> None:
        """``reason`` names the gate in the accounts; ``flat``: what it refuses has no gradient."""
        self._collector = collector
        self._reason, self._flat = reason, flat
        self._takes = 0
        self._judgements: list[dict[str, float]] = []

    def judge(self, groups: Iterable[Group], judge: Judge) -> None:
        """Reject what ``judge`` refuses of groups that were just taken.

        Raises ``Exhausted`` when groups are missing and the batch was refilled often enough.
        """
        self._takes += 1
        backfilled = self._collector.backfilled
        fresh = [group for group in groups if not group.replays and group.uid not in backfilled]
        if fresh:
            refused, cut, metrics = judge(fresh)
            lost = self._collector.reject(refused, self._reason, flat=self._flat)
            self._collector.trim({uid: indices for uid, indices in cut.items() if uid not in lost})
            self._judgements.append(metrics)
        if self._collector.owed and self._takes > MAX_REFILLS:
            raise Exhausted(
                f"After {MAX_REFILLS} refills {self._collector.owed} groups are missing: the gate rejects too much. "
                "Look at its metrics and thresholds; algorithm.filter_groups.max_num_gen_batches bounds generation."
            )

    def replacements(self, fill: Callable[[], None]) -> Iterator[Sequence[Group]]:
        """Yield groups in the place of those rejected, until none is missing.

        The caller has each judged before it asks for more. ``fill`` runs the collector's loop until it is ready.
        """
        while self._collector.owed:
            if not self._collector.ready:  # surplus may suffice
                fill()
            groups = self._collector.take()
            if groups:  # none where the limits leave the batch as it is
                yield groups

    @property
    def metrics(self) -> dict[str, float]:
        """What all judgements of the batch say together."""
        return combined_metrics(self._judgements)
