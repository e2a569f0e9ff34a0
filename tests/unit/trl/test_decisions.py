"""The decisions of the first process, without a model."""

from __future__ import annotations

from goldilocks.core import Collector, ListSource
from goldilocks.core.allocators import Fixed
from goldilocks.core.filters import Everything
from goldilocks.core.selectors import Uniform
from goldilocks.trl.decisions import Decisions, Round
from goldilocks.trl.rows import RowStore


def test_no_two_rollouts_of_a_round_that_spans_two_epochs_draw_the_same_noise() -> None:
    source = ListSource([f"prompt {index}" for index in range(3)])
    collector = Collector(source, Uniform(), Fixed(2), Everything(), target_groups=8)
    decided = Decisions(collector, RowStore(), None, room=16, seed=1).next()
    assert isinstance(decided, Round)
    assert len(decided.seeds) == len(set(decided.seeds)) == 16
