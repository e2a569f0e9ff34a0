"""The refill loop of one batch: who is judged, how often, and what is logged of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from builders import fill, plain_collector

from goldilocks.core import Collector, Exhausted, Limits
from goldilocks.core.filters import Everything
from goldilocks.core.replay import Replay
from goldilocks.drive.gate import Judgement
from goldilocks.drive.refill import MAX_REFILLS, Refills
from goldilocks.filtering.step_metrics import Mean
from goldilocks.types import Group, OnExhausted, Rollout, Verdict


class Gate:
    """Refuses the groups that it is told to; every call is written down."""

    def __init__(self, *refused: str, everything: bool = False) -> None:
        self.refused, self.everything = refused, everything
        self.calls: list[list[str]] = []

    def __call__(self, groups: Sequence[Group]) -> Judgement:
        self.calls.append([group.uid for group in groups])
        out = [group for group in groups if self.everything or group.uid in self.refused]
        metrics = {"batch/total_groups_generated": len(groups), "rejection/rate": Mean(len(out), len(groups))}
        return Judgement({group.uid: [0, 1] for group in out}, {}, metrics)


def batch(of: Collector, gate: Gate) -> Refills:
    fill(of)
    refills = Refills(of, "gate", flat=False)
    refills.judge(of.take(), gate)
    for groups in refills.replacements(lambda: fill(of)):
        refills.judge(groups, gate)
    return refills


def test_what_is_refused_is_replaced_and_all_judgements_are_logged_as_one() -> None:
    of, gate = plain_collector(), Gate("g0", "g2")
    refills = batch(of, gate)
    assert gate.calls == [["g0", "g1"], ["g2"], ["g3"]]
    assert [group.uid for group in of.in_hand] == ["g1", "g3"]
    assert refills.metrics["batch/total_groups_generated"] == 4
    assert refills.metrics["rejection/rate"] == 0.5


def test_a_gate_that_refuses_everything_ends_the_batch_after_so_many_refills() -> None:
    of, gate = plain_collector(target_groups=3), Gate(everything=True)
    with pytest.raises(Exhausted, match=rf"After {MAX_REFILLS} refills 3 groups are missing"):
        batch(of, gate)
    assert len(gate.calls) == 1 + MAX_REFILLS
    assert of.metrics()["accounts/rejected_rollouts"] == 3 * 2 * (1 + MAX_REFILLS)


def test_groups_that_are_trained_again_are_not_judged_again() -> None:
    of, gate = plain_collector(replay=Replay(groups=2)), Gate()
    batch(of, gate)
    gate.refused = ("g0", "g1")
    batch(of, gate)
    assert gate.calls == [["g0", "g1"], ["g2", "g3"]]
    assert [(group.uid, group.replays) for group in of.in_hand] == [("g2", 0), ("g3", 0), ("g0", 1), ("g1", 1)]


def test_dropped_groups_that_fill_a_batch_up_are_not_judged() -> None:
    class Nothing(Everything):
        def judge(self, group: Group) -> Verdict:
            return Verdict(False, "dull")

    limits = Limits(max_num_gen_batches=1, on_exhausted=OnExhausted.BACKFILL)
    of, gate = plain_collector(limits=limits, filter=Nothing()), Gate(everything=True)
    batch(of, gate)
    assert gate.calls == []
    assert len(of.in_hand) == 2


def test_the_fresh_score_leaves_out_what_is_trained_again() -> None:
    of = plain_collector(target_groups=1, replay=Replay(groups=1))
    for rewards, score in (([0.0, 1.0], 0.5), ([1.0, 1.0], 1.0)):
        for request in of.requests():
            for index, reward in enumerate(rewards):
                of.observe(Rollout(request.uid, index, reward, 3))
        of.take()
        assert of.metrics()["train/fresh_score"] == score
    assert [group.replays for group in of.in_hand] == [0, 1]
