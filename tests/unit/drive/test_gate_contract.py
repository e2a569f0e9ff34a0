"""``check_gate`` passes the gates of this package and finds out those that judge what they were not shown."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from builders import source

from goldilocks.drive.filter_gate import FilterGate
from goldilocks.drive.gate import Gate, Judgement
from goldilocks.filtering import PPOFilterConfig
from goldilocks.testing import check_gate
from goldilocks.types import Group, Rollout

PROMPTS = source(6)


def group(number: int, rollouts: int = 6) -> Group:
    uid = f"g{number}"
    answers = tuple(Rollout(uid, index, float((index + number) % 2), 3 + index) for index in range(rollouts))
    return Group(uid, PROMPTS[number], answers, trained=answers)


GROUPS = [group(number) for number in range(6)]


class Drawn(FilterGate):
    """The batch filter, which draws the rows that it cuts."""

    forgets = False

    def judge(self, groups: Sequence[Group]) -> Judgement:
        rollouts = [rollout for group in groups for rollout in group.trained]
        data = {
            "rewards": torch.tensor([rollout.reward for rollout in rollouts]),
            "response_mask": torch.ones(len(rollouts), 9, dtype=torch.long),
        }
        return self.judge_rows([(rollout.uid, rollout.index) for rollout in rollouts], data)

    def state_dict(self) -> dict[str, object]:
        return {} if self.forgets else super().state_dict()


class Everywhere(Gate):
    reason = "everywhere"

    def judge(self, groups: Sequence[Group]) -> Judgement:
        return Judgement({"g9": [0]}, {}, {})


def drawn(forgets: bool = False) -> Drawn:
    gate = Drawn(PPOFilterConfig(target_group_size=3, sample_selection_strategy="uniform"), seed=1)
    gate.forgets = forgets
    return gate


def test_the_batch_filter_keeps_the_contract() -> None:
    check_gate(drawn, GROUPS)


def test_a_gate_that_forgets_its_generator_or_judges_what_it_was_not_shown_is_found_out() -> None:
    with pytest.raises(AssertionError, match="saved and loaded, it judges otherwise"):
        check_gate(lambda: drawn(forgets=True), GROUPS)
    with pytest.raises(AssertionError, match="it names rollouts that it was not shown"):
        check_gate(Everywhere, GROUPS)
