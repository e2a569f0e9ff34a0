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


def on_vllm(**keys: Any) -> Callable[[Any], None]:
    def change(worker: Any) -> None:
        worker.rollout_config = RolloutConfig(**{**ROLLOUT, "name": "vllm"}, **keys)

    return change


MADE = {"text": lambda worker: None, "vllm": on_vllm()}
LEFT = {
    "pictures": lambda worker: setattr(worker, "processor", object()),
    "teacher": lambda worker: setattr(worker, "distillation_enabled", True),
    "reward model": lambda worker: worker.config.reward.reward_model.update(enable=True),
    "rewards later": lambda worker: setattr(worker, "reward_loop_worker_handles", None),
    "partial": lambda worker: worker.config.merge_with({"algorithm": {"filter_groups": {"on_full": "partial"}}}),
    "async": lambda worker: worker.config.merge_with({"trainer": {"v1": {"trainer_mode": "goldilocks_async"}}}),
    "traced": lambda worker: object.__setattr__(worker.rollout_config, "trace", {"backend": "weave"}),
    "ordered": on_vllm(full_determinism=True),
    "routed": on_vllm(enable_rollout_routing_replay=True),
}


@pytest.mark.parametrize("name", [*MADE, *LEFT])
def test_what_takes_part_in_a_rollout_decides(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATCHES_VARIABLE, "speed")
    assert chosen((MADE | LEFT)[name]) is (name in MADE)


def test_a_loop_that_a_user_registers_under_verls_name_is_theirs_and_without_patches_verls_own_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(PATCHES_VARIABLE, "none")
    assert not chosen(lambda worker: None)
    monkeypatch.setenv(PATCHES_VARIABLE, "all")
    monkeypatch.setitem(agent_loop._agent_loop_registry, AGENT, {"_target_": "theirs.Loop"})
    assert not chosen(lambda worker: None)
