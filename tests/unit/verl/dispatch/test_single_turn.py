"""Rollouts are made many at a time only where verl's own single-turn loop makes them and nothing else takes part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from verl.experimental.agent_loop import agent_loop
from verl.workers.config import RolloutConfig
from verl_world import ROLLOUT, Worker

from goldilocks.engine.cpu import PATCHES_VARIABLE
from goldilocks.verl.dispatch.single_turn import AGENT, SingleTurn


def chosen(change: Callable[[Any], None]) -> bool:
    async def main() -> bool:
        worker = Worker(whole=False)
        change(worker)
        return SingleTurn.of(worker) is not None

    return asyncio.run(main())


def unset(worker: Any) -> None:
    worker.reward_loop_worker_handles = None


def traced(worker: Any) -> None:
    object.__setattr__(worker.rollout_config, "trace", {"backend": "weave"})


def on_vllm(**keys: Any) -> Callable[[Any], None]:
    def change(worker: Any) -> None:
        worker.rollout_config = RolloutConfig(**{**ROLLOUT, "name": "vllm"}, **keys)

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda worker: None, True),
        (lambda worker: setattr(worker, "processor", object()), False),
        (lambda worker: setattr(worker, "distillation_enabled", True), False),
        (lambda worker: worker.config.reward.reward_model.update(enable=True), False),
        (unset, False),
        (lambda worker: worker.config.merge_with({"algorithm": {"filter_groups": {"on_full": "partial"}}}), False),
        (lambda worker: worker.config.merge_with({"trainer": {"v1": {"trainer_mode": "goldilocks_async"}}}), False),
        (traced, False),
        (on_vllm(), True),
        (on_vllm(full_determinism=True), False),
        (on_vllm(enable_rollout_routing_replay=True), False),
    ],
    ids=[
        "text",
        "pictures",
        "teacher",
        "reward model",
        "rewards later",
        "partial",
        "async",
        "traced",
        "vllm",
        "ordered",
        "routed",
    ],
)
def test_what_takes_part_in_a_rollout_decides(
    change: Callable[[Any], None], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PATCHES_VARIABLE, "speed")
    assert chosen(change) is expected


def test_a_loop_that_a_user_registers_under_verls_name_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATCHES_VARIABLE, "all")
    monkeypatch.setitem(agent_loop._agent_loop_registry, AGENT, {"_target_": "theirs.Loop"})
    assert not chosen(lambda worker: None)


def test_with_patches_switched_off_verl_makes_its_rollouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATCHES_VARIABLE, "none")
    assert not chosen(lambda worker: None)
