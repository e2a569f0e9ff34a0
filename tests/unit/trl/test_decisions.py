"""The decisions of the first process, without a model."""

from __future__ import annotations

from builders import plain_collector

from goldilocks.trl.decisions import Decisions, Round
from goldilocks.trl.rows import RowStore


def test_no_two_rollouts_of_a_round_that_spans_two_epochs_draw_the_same_noise() -> None:
    decided = Decisions(plain_collector(3, target_groups=8), RowStore(), None, room=16, seed=1).next()
    assert isinstance(decided, Round)
    assert len(decided.seeds) == len(set(decided.seeds)) == 16
