"""The decisions of the first process, without a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import trl_world as world
from builders import plain_collector

from goldilocks.trl.decisions import Round


def test_no_two_rollouts_of_a_round_that_spans_two_epochs_draw_the_same_noise() -> None:
    decided = Round.of(tuple(plain_collector(3, target_groups=8).requests(16)), seed=1)
    assert len(decided.seeds) == len(set(decided.seeds)) == 16


def test_a_policy_of_the_users_own_is_rehearsed_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = "from goldilocks.core.selectors import Uniform\nclass Broken(Uniform):\n    choose = None\n"
    (tmp_path / "trl_policy.py").write_text(policy)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"selector='trl_policy:Broken': in a rehearsal it raised TypeError"):
        world.trainer(tmp_path, sections={"goldilocks": {"selector": "trl_policy:Broken"}})
