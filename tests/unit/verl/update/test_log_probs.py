"""Rows older than the policy are trained against the log-probs of the policy that wrote them."""

from __future__ import annotations

from typing import Any

import pytest
from verl_world import Queue

from goldilocks.verl.update.log_probs import use_behaviour_log_probs

NOW, WRITTEN, NAN = -1.0, -1.5, float("nan")
DECOUPLED: dict[str, Any] = {"rollout_is": None, "rollout_rs": None, "bypass_mode": False}  # verl's defaults


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    """In step 4, so that the policy has had 3 updates: two old rows, two new ones, and padding."""
    queue = Queue(monkeypatch)
    queue.add("g1_0_0", 2, 3, old_log_probs=NOW, rollout_log_probs=WRITTEN)
    queue.add("g2_0_0", 3, 2, old_log_probs=NOW, rollout_log_probs=WRITTEN)
    queue.add("g1_1_0", 1, 1, old_log_probs=NOW, rollout_log_probs=-3.0)
    queue.add("g2_1_0", None, 2, step=4, old_log_probs=NOW, rollout_log_probs=WRITTEN)
    queue.add("pad_0_0", 1, 1, old_log_probs=0.0, rollout_log_probs=WRITTEN)
    queue.tags["pad_0_0"]["is_padding"] = True
    return queue


def trained_against(queue: Queue) -> list[list[float]]:
    return [row["old_log_probs"].tolist() for row in queue.rows.values()]


@pytest.mark.parametrize("correction", [None, DECOUPLED, {**DECOUPLED, "rollout_rs": "seq_mean_k3"}])
def test_stale_rows_get_the_log_probs_that_were_stored_with_them(queue: Queue, correction: Any) -> None:
    metrics = use_behaviour_log_probs(queue.batch(), 3, correction)
    assert trained_against(queue) == [[WRITTEN] * 3, [NOW] * 2, [-3.0], [NOW] * 2, [0.0]]
    assert metrics["train/stale_rows"] == 2
    assert metrics["train/stale_log_prob_diff_mean"] == pytest.approx((3 * 0.5 + 2.0) / 4)


def test_verls_weights_correct_for_stale_rows_themselves(queue: Queue) -> None:
    metrics = use_behaviour_log_probs(queue.batch(), 3, {**DECOUPLED, "rollout_is": "token"})
    assert trained_against(queue) == [[NOW] * 3, [NOW] * 2, [NOW], [NOW] * 2, [0.0]]
    assert metrics["train/stale_rows"] == 2


def test_where_verl_recomputes_nothing_there_is_no_difference_to_tell(queue: Queue) -> None:
    for row in queue.rows.values():
        row["old_log_probs"] = row["rollout_log_probs"]
    before = trained_against(queue)
    assert use_behaviour_log_probs(queue.batch(), 3, {**DECOUPLED, "bypass_mode": True}) == {
        "train/stale_rows": 2,
        "train/stale_tokens": 4,
    }
    assert trained_against(queue) == before


def test_with_nothing_stale_nothing_is_touched_and_the_update_needs_no_log_probs_at_all(queue: Queue) -> None:
    assert use_behaviour_log_probs(queue.batch(), 1, None) == {"train/stale_rows": 0}
    assert trained_against(queue) == [[NOW] * 3, [NOW] * 2, [NOW], [NOW] * 2, [0.0]]
    del queue.rows["g2_0_0"]["old_log_probs"]
    assert use_behaviour_log_probs(queue.batch(), 1, None, own=True) == {"train/stale_rows": 0}
    assert "old_log_probs" not in queue.rows["g2_0_0"]


def test_a_server_that_says_no_version_had_the_policy_of_its_step(queue: Queue) -> None:
    assert use_behaviour_log_probs(queue.batch(), 4, None)["train/stale_rows"] == 4
    assert trained_against(queue)[3] == [WRITTEN] * 2


def test_stale_rows_without_stored_log_probs_are_an_error_that_says_what_to_set(queue: Queue) -> None:
    for row in queue.rows.values():
        del row["rollout_log_probs"]
    with pytest.raises(ValueError, match=r"missing in 2 rows older than the policy.*max_carry_steps=0"):
        use_behaviour_log_probs(queue.batch(), 3, None)


def test_of_a_row_by_several_policies_only_the_tokens_of_older_ones_get_the_stored_log_probs(queue: Queue) -> None:
    queue.add("g3_0_0", 1, 6, old_log_probs=NOW, rollout_log_probs=WRITTEN)
    queue.tags["g3_0_0"]["versions"] = [[1, 2], [2, 1], [3, 2]]  # the row has one token that no policy wrote
    queue.rows["g3_0_0"]["response_mask"][1] = 0
    metrics = use_behaviour_log_probs(queue.batch(), 3, None)
    assert trained_against(queue)[-1] == [WRITTEN, NOW, WRITTEN, WRITTEN, NOW, NOW]
    assert (metrics["train/stale_rows"], metrics["train/stale_tokens"]) == (3, 3 + 1 + 3)


def test_where_the_update_computes_its_own_nothing_was_recomputed(queue: Queue) -> None:
    """Tokens of the current policy are NaN, by which the update takes its own; stale ones have what was stored."""
    queue.add("g3_0_0", 1, 3, old_log_probs=NOW, rollout_log_probs=WRITTEN)
    queue.tags["g3_0_0"]["versions"] = [[1, 1], [3, 2]]
    for key in ("g1_0_0", "g2_0_0", "g2_1_0"):  # the others were trained before, and have those of that update
        del queue.rows[key]["old_log_probs"]
    metrics = use_behaviour_log_probs(queue.batch(), 3, DECOUPLED, own=True)
    expected = [[WRITTEN] * 3, [NAN] * 2, [-3.0], [NAN] * 2, [NAN], [WRITTEN, NAN, NAN]]
    assert repr(trained_against(queue)) == repr(expected)
    assert metrics == {"train/stale_rows": 3, "train/stale_tokens": 5}


def test_padding_that_has_the_tag_of_a_row_that_paused_has_no_age(queue: Queue) -> None:
    """verl's padding is a copy of the first row, with a mask of zeros."""
    for key in ("g1_0_0", "pad_0_0"):
        queue.tags[key]["versions"] = [[1, 1], [2, 2]]
    queue.rows["pad_0_0"]["response_mask"][:] = 0
    assert use_behaviour_log_probs(queue.batch(), 3, DECOUPLED, own=True)["train/stale_rows"] == 2
    assert repr(trained_against(queue)[-1]) == repr([NAN])


def test_only_rows_of_an_older_policy_need_log_probs_of_the_engine(queue: Queue) -> None:
    """Another agent loop may have returned none with its rows."""
    for key in ("g2_0_0", "g2_1_0"):
        del queue.rows[key]["rollout_log_probs"]
    batch = queue.batch()
    batch = batch.select_keys(["g2_0_0", "g1_0_0", "g1_1_0", "g2_1_0"])  # the world has the fields of the first
    metrics = use_behaviour_log_probs(batch, 3, DECOUPLED, own=True)
    assert repr(trained_against(queue)[:4]) == repr([[WRITTEN] * 3, [NAN] * 2, [-3.0], [NAN] * 2])
    assert metrics["train/stale_tokens"] == 4
