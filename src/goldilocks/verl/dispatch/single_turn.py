"""verl's single-turn agent loop for many rollouts at a time.

verl runs every rollout as a task of its own: it renders the prompt's template once per rollout, builds an agent loop,
hops between threads, validates objects, and builds eight tensors. Here a prompt is rendered once for all its rollouts,
rollouts go to the server in one message, and those that end together are graded and stored together. The rows are the
same, field by field; where verl's loop is not the one that this was written for, verl's own is run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from omegaconf import OmegaConf
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from goldilocks.engine.request import Generation
from goldilocks.hashing import digest
from goldilocks.types import OnFull
from goldilocks.verl.dispatch.session import Reply, Versions
from goldilocks.verl.patches.rewards import grade, manager_of
from goldilocks.verl.patches.switch import in_force
from goldilocks.verl.patches.table import REWARDS_HERE
from goldilocks.verl.serve.limits import NAME as OUR_SERVER

AGENT = "single_turn_agent"  # verl's name of its single-turn loop

# The functions of verl that are done here for many rollouts at once, and the digests of their sources.
WORKER = AgentLoopWorkerTQ.__ray_metadata__.modified_class  # type: ignore[attr-defined]  # Ray's
FOLLOWED = (
    (SingleTurnAgentLoop.run, "1baec41cee2de25f"),
    (agent_loop.AgentLoopBase.ct_build_initial_tokens, "cc0ef93a0db8638f"),
    (agent_loop.AgentLoopBase.ct_merge_assistant_token, "d8cbb98f7358747f"),
    (agent_loop.AgentLoopOutput.as_dict, "1d98e658b0e8de41"),
    (WORKER._agent_loop_postprocess, "523edacbff73640d"),
    (WORKER._compute_position_ids, "f5bb787c5f984d37"),
)


@dataclass
class Output:
    """The attributes of verl's ``AgentLoopOutput`` that a rollout of one turn has."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None
    extra_fields: dict[str, Any]
    metrics: dict[str, float]
    reward_score: float | None = None
    num_turns: int = 2

    @property
    def versions(self) -> Versions:
        """The policy that wrote it, and how many tokens."""
        return [[self.extra_fields["global_steps"], len(self.response_ids)]]


class SingleTurn:
    """Renders prompts, and makes outputs of answers and rows of outputs, for the worker's model and config."""

    def __init__(self, worker: Any) -> None:
        loop = worker._agent_loop(AGENT)
        self._loop, self._builder = loop, loop.continuous_token_builder
        self._limit = loop.response_length
        self._rewards = manager_of(worker)

    @classmethod
    def of(cls, worker: Any) -> SingleTurn | None:
        """None where rollouts of this worker are verl's to make."""
        return cls(worker) if _is_known(worker) and manager_of(worker) is not None else None

    def prompt_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """As verl's ``ct_build_initial_tokens``."""
        ids: list[int] = self._loop._cap_text_prompt_length(self._builder.build_initial_tokens(list(messages)))
        return ids

    def output(self, reply: Reply, seconds: float) -> Output:
        """As the second half of verl's ``SingleTurnAgentLoop.run``."""
        assert isinstance(reply.outcome, Generation)
        made, prompt = reply.outcome, reply.turn.prompt_ids
        log_probs = made.log_probs if reply.turn.params.get("logprobs") and made.log_probs else None
        merged = self._builder.merge_assistant_tokens(prompt, made.token_ids)
        mask, aligned = self._builder.align_response_metadata(
            merged, [], None if log_probs is None else [], assistant_logprobs=log_probs
        )
        start = len(merged.token_ids) - len(mask)
        about = {
            "global_steps": reply.global_steps,
            "top_log_probs": made.top_log_probs,
            "min_global_steps": reply.global_steps,
            "max_global_steps": reply.global_steps,
            "turn_scores": [],
            "tool_rewards": [],
        }
        return Output(
            prompt_ids=merged.token_ids[:start],
            response_ids=merged.token_ids[start:][: self._limit],
            response_mask=mask[: self._limit],
            response_logprobs=aligned[: self._limit] if aligned else None,
            extra_fields=about,
            metrics={"generate_sequences": seconds, "num_preempted": 0},
        )

    async def grade(self, outputs: list[Output], prompts: list[dict[str, Any]]) -> list[BaseException | None]:
        """Give each output its reward; what kept one from getting it stands in its place."""
        grades = (self._grade(output, prompt) for output, prompt in zip(outputs, prompts, strict=True))
        return await asyncio.gather(*grades, return_exceptions=True)

    async def _grade(self, output: Output, prompt: dict[str, Any]) -> None:
        started = time.perf_counter()
        output.reward_score, output.extra_fields["reward_extra_info"] = await grade(self._rewards, output, prompt)
        output.metrics["compute_score"] = time.perf_counter() - started


def rows(outputs: Sequence[Output], prompts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fields of each row, as verl's ``_agent_loop_postprocess`` stores them."""
    columns = _columns(outputs)
    return [
        {
            **_NO_PICTURES,
            "num_turns": one.num_turns,
            "metrics": one.metrics,
            "extra_fields": one.extra_fields,
            **prompt,
            **{name: column[place] for name, column in columns.items()},
        }
        for place, (one, prompt) in enumerate(zip(outputs, prompts, strict=True))
    ]


_NO_PICTURES: dict[str, Any] = {"mm_processor_kwargs": {}, "mm_processor_output": None, "multi_modal_inputs": {}}


def _columns(outputs: Sequence[Output]) -> dict[str, list[torch.Tensor]]:
    sequences = [one.prompt_ids + one.response_ids for one in outputs]
    masks = tensors([one.response_mask for one in outputs], torch.int64)
    columns = {
        "prompts": tensors([one.prompt_ids for one in outputs], torch.int64),
        "responses": tensors([one.response_ids for one in outputs], torch.int64),
        "response_mask": masks,
        "loss_mask": masks,
        "input_ids": tensors(sequences, torch.int64),
        "position_ids": tensors([range(len(sequence)) for sequence in sequences], torch.int64),
        "rm_scores": [torch.zeros_like(mask, dtype=torch.float32) for mask in masks],
    }
    for scores, one in zip(columns["rm_scores"], outputs, strict=True):
        assert one.reward_score is not None
        scores[-1] = one.reward_score
    log_probs = [one.response_logprobs for one in outputs if one.response_logprobs is not None]
    return columns | ({"rollout_log_probs": tensors(log_probs, torch.float32)} if log_probs else {})


def tensors(values: Sequence[Sequence[float]], dtype: torch.dtype) -> list[torch.Tensor]:
    """A tensor of each sequence: views of one that was made of all."""
    flat = torch.tensor(list(chain.from_iterable(values)), dtype=dtype)
    return list(flat.split([len(value) for value in values]))


def _is_known(worker: Any) -> bool:
    rollout = worker.rollout_config
    loop = SingleTurnAgentLoop
    registered = agent_loop._agent_loop_registry.get(AGENT) == {"_target_": f"{loop.__module__}.{loop.__qualname__}"}
    text_alone = worker.processor is None and not worker.distillation_enabled and not rollout.trace.get("backend")
    rewards = worker.reward_loop_worker_handles is not None and in_force(REWARDS_HERE)
    partial = OmegaConf.select(worker.config, "algorithm.filter_groups.on_full") == OnFull.PARTIAL
    pauses = partial or OmegaConf.select(worker.config, "trainer.v1.trainer_mode") == "goldilocks_async"
    as_followed = all(digest(function) == known for function, known in FOLLOWED)
    return rollout.name == OUR_SERVER and registered and text_alone and rewards and not pauses and as_followed
