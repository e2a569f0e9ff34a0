"""The guard for old weights on verl: the gap of rows in the queue, and when a gap is judged."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from transformers import MixtralConfig, Qwen2Config
from verl_world import Queue

from goldilocks.losses.log_probs import FP32, HALF, StaleWeights
from goldilocks.verl.store import VERSIONS, tensor_fields
from goldilocks.verl.update.log_probs import ROWS, gap_of_rows, gap_of_waiting_rows, has_fresh_token, weights_guard

POLICY = 4


def add_rows(queue: Queue, *versions: int) -> None:
    """Add rows by these versions; the trainer's log-probs are a tenth above those of a row's age, squared."""
    for number, version in enumerate(versions):
        away = 0.1 + (POLICY - version) ** 2
        queue.add(f"g{number}_0_0", version, 2 + number, old_log_probs=-1.0, rollout_log_probs=-1.0 - away)


def test_only_rows_of_the_newest_policy_count(queue: Queue) -> None:
    add_rows(queue, POLICY, POLICY - 1, POLICY, POLICY - 2)
    paused = queue.tags["g3_0_0"]
    paused[VERSIONS] = [[POLICY - 2, 1], [POLICY, 4]]  # written by two policies, the last part by the newest
    queue.add("pad_0_0", POLICY, 1, old_log_probs=0.0, rollout_log_probs=-9.0)
    queue.tags["pad_0_0"]["is_padding"] = True
    assert gap_of_rows(queue.batch(), POLICY, None) == pytest.approx(0.1)


def test_where_no_row_is_fresh_the_tokens_count_that_the_newest_policy_wrote_of_paused_ones(queue: Queue) -> None:
    add_rows(queue, POLICY - 1, POLICY - 2)
    queue.tags["g1_0_0"][VERSIONS] = [[POLICY - 2, 1], [POLICY, 1]]
    queue.rows["g1_0_0"]["response_mask"] = torch.tensor([1, 0, 1])  # a tool wrote the second token
    queue.rows["g1_0_0"]["rollout_log_probs"] = torch.tensor([-5.0, 0.0, -1.3])
    assert has_fresh_token(queue.batch(), POLICY)
    assert not has_fresh_token(queue.batch(), POLICY + 1)
    assert gap_of_rows(queue.batch(), POLICY, None) == pytest.approx(0.3)


class Trainer:
    """Computes the trainer's log-probs of rows in the queue: -1 for each token."""

    def __init__(self, queue: Queue) -> None:
        self.queue, self.computed = queue, 0
        self.fields: set[str] = set()  # of the rows that were computed

    def log_probs(self, rows: KVBatchMeta) -> None:
        self.computed = len(rows.keys)
        self.fields = {name for key in rows.keys for name in self.queue.rows[key]}
        for key in rows.keys:
            row = self.queue.rows[key]
            row["old_log_probs"] = torch.full_like(row["rollout_log_probs"], -1.0)


def add_waiting(queue: Queue, *versions: int) -> None:
    add_rows(queue, *versions)
    for row in queue.rows.values():
        del row["old_log_probs"]


def gap(queue: Queue, multiple: int, trainer: Trainer) -> float | None:
    return gap_of_waiting_rows(queue.batch(), POLICY, multiple, tensor_fields, trainer.log_probs)


@pytest.mark.parametrize(("ranks", "computed"), [(1, 3), (2, 2), (3, 3)])
def test_the_gap_of_rows_that_wait_is_computed_on_copies_of_fresh_ones(queue: Queue, ranks: int, computed: int) -> None:
    add_waiting(queue, POLICY, POLICY - 1, POLICY, POLICY)
    before = {key: set(row) for key, row in queue.rows.items()}
    trainer = Trainer(queue)
    assert gap(queue, ranks, trainer) == pytest.approx(0.1)
    assert trainer.computed == computed
    assert trainer.fields == {"response_mask", "rm_scores", "rollout_log_probs"}  # no text is copied
    assert {key: set(row) for key, row in queue.rows.items()} == before


@pytest.mark.parametrize(("versions", "ranks"), [([POLICY - 1], 1), ([POLICY], 2), ([], 1)])
def test_without_enough_fresh_rows_nothing_is_computed(queue: Queue, versions: list[int], ranks: int) -> None:
    add_waiting(queue, *versions)
    trainer = Trainer(queue)
    assert gap(queue, ranks, trainer) is None
    assert trainer.computed == 0


@pytest.mark.parametrize(("multiple", "computed"), [(1, ROWS), (ROWS - 1, ROWS - 1), (2 * ROWS, 2 * ROWS)])
def test_of_many_rows_that_wait_some_are_computed_and_never_a_part_of_a_micro_batch(
    queue: Queue, multiple: int, computed: int
) -> None:
    add_waiting(queue, *[POLICY] * (3 * ROWS))
    trainer = Trainer(queue)
    assert gap(queue, multiple, trainer) == pytest.approx(0.1)
    assert trainer.computed == computed


def test_tokens_that_no_policy_wrote_do_not_count(queue: Queue) -> None:
    add_rows(queue, POLICY)
    row = queue.rows["g0_0_0"]
    row["response_mask"], row["rollout_log_probs"] = torch.tensor([1, 0]), torch.tensor([-1.2, 0.0])
    assert gap_of_rows(queue.batch(), POLICY, None) == pytest.approx(0.2)


@pytest.mark.parametrize("correction", [None, {"bypass_mode": True}])
def test_without_log_probs_of_both_sides_there_is_no_gap(queue: Queue, correction: Any) -> None:
    add_rows(queue, POLICY, POLICY)
    if correction is None:
        for row in queue.rows.values():
            del row["rollout_log_probs"]
    assert gap_of_rows(queue.batch(), POLICY, correction) is None


def test_of_many_rows_some_are_read(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    add_rows(queue, *[POLICY] * (3 * ROWS))
    asked: list[int] = []
    read = queue.kv_batch_get

    def counted(keys: list[str], **rest: Any) -> Any:
        asked.append(len(keys))
        return read(keys, **rest)

    monkeypatch.setattr("transfer_queue.kv_batch_get", counted)
    assert gap_of_rows(queue.batch(), POLICY, None) == pytest.approx(0.1)
    assert asked == [ROWS]


@pytest.mark.parametrize(
    ("rollout", "trained", "limit"),
    [("float32", "fp32", FP32[1]), ("bfloat16", "fp32", HALF[1]), ("float32", None, HALF[1])],
)
def test_the_precision_of_both_sides_decides_what_rounding_explains(rollout: str, trained: Any, limit: float) -> None:
    precision = None if trained is None else {"param_dtype": trained}  # verl's default is bf16
    actor = {"fsdp_config": {"mixed_precision": precision}}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"dtype": rollout}, "actor": actor}})
    assert weights_guard(config, "warn").limit == limit


@pytest.mark.parametrize(
    "other",
    [
        {"top_p": 0.9},
        {"top_k": 20},
        {"logprobs_mode": "raw_logprobs", "temperature": 0.7},
        {"quantization": "fp8"},
        {"calculate_log_probs": False},
        {"bypass_mode": True},
    ],
    ids=str,
)
def test_log_probs_that_differ_by_design_or_are_not_there_are_not_judged_which_is_said(
    other: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    parts = {"rollout": {"dtype": "float32", **other}, "actor": {}}
    algorithm = {"rollout_correction": {"bypass_mode": other.get("bypass_mode", False)}}
    guard = weights_guard(OmegaConf.create({"actor_rollout_ref": parts, "algorithm": algorithm}), "error")
    assert "goldilocks.on_stale_weights=error has no effect" in caplog.text
    assert [guard.observe(1.0) for _ in range(3)] == [{"rollout/weights_gap": 1.0}] * 3


@pytest.mark.parametrize(
    ("model", "replays", "judged"),
    [
        (Qwen2Config(), False, True),
        (MixtralConfig(), False, False),
        (MixtralConfig(), True, True),
        (None, False, True),  # not on this machine: nothing is known
    ],
)
def test_experts_are_judged_where_the_trainer_replays_those_of_the_engine(
    tmp_path: Path, model: Any, replays: bool, judged: bool
) -> None:
    if model is not None:
        model.save_pretrained(tmp_path)
    rollout = {"dtype": "float32", "enable_rollout_routing_replay": replays}
    parts = {"rollout": rollout, "actor": {}, "model": {"path": str(tmp_path)}}
    guard = weights_guard(OmegaConf.create({"actor_rollout_ref": parts}), "error")
    guard.observe(1.0)
    with pytest.raises(StaleWeights) if judged else nullcontext():
        guard.observe(1.0)
