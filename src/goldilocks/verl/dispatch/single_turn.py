"""verl's single-turn agent loop for many rollouts at a time.

verl runs every rollout as a task of its own: it renders the prompt's template once per rollout, builds an agent loop,
hops between threads, and puts its row into the queue by itself. Here a prompt is rendered once for all its rollouts,
rollouts go to each server in one message, and rollouts that end together are graded and stored together. The rows are
the same, field by field. Where verl's loop is not one that this was written for, verl's own loop runs.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import transfer_queue
from omegaconf import OmegaConf
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from goldilocks.engine.verl_server import NAME as OUR_SERVER
from goldilocks.hashing import Sources, is_known
from goldilocks.types import OnFull
from goldilocks.verl.dispatch.backend import ANSWERS, FIRST, ROLLOUTS, VISIT_SEED, rollout_of, seeded
from goldilocks.verl.dispatch.client import Cancelled, Reply, Session, StreamingClient, TurnRequest
from goldilocks.verl.patch import Kind
from goldilocks.verl.plugin import asks_for
from goldilocks.verl.store import PARTITION, Versions

Fields = dict[str, Any]  # of a row

AGENT = "single_turn_agent"  # verl's name of its single-turn loop
MANAGER = "naive"  # verl's name of its default reward manager
NOT_STORED = (ROLLOUTS, FIRST, VISIT_SEED, ANSWERS, "agent_name")  # fields of a prompt that its rows lack
RUN_SINGLE = "89e2c1e4e0d30a79"  # the digest of the default manager's method, which ``grade`` follows

WORKER = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class  # type: ignore[attr-defined]  # Ray's
# What verl's loop sets of a rollout without pictures; not every verl has the second.
NO_PICTURES: Fields = {
    "mm_processor_kwargs": {},
    **dict.fromkeys({"mm_processor_output"} & set(AgentLoopOutput.model_fields)),
}
# The functions of verl whose work is done here for many rollouts at once, and the sources that they may have.
FOLLOWED: tuple[tuple[Callable[..., Any], Sources], ...] = (
    (SingleTurnAgentLoop.run, ("1baec41cee2de25f", "b016f36cb70524a1")),
    (WORKER._agent_loop_postprocess, "523edacbff73640d"),
    (WORKER._compute_position_ids, "f5bb787c5f984d37"),
)


async def grade(manager: Any, output: AgentLoopOutput, row: Fields) -> None:
    """Give a rollout its reward, and what else the function returned: as ``NaiveRewardManager.run_single`` does."""
    started = time.perf_counter()
    known = {**(row.get("extra_info") or {}), **output.extra_fields}
    arguments = {
        "data_source": row["data_source"],
        "solution_str": manager.tokenizer.decode(output.response_ids, skip_special_tokens=True),
        "ground_truth": row["reward_model"]["ground_truth"],
        "extra_info": {**known, "num_turns": output.num_turns, "rollout_reward_scores": row.get("reward_scores", {})},
    }
    if manager.is_async_reward_score:
        result = await manager.compute_score(**arguments)
    else:
        result = await manager.loop.run_in_executor(None, functools.partial(manager.compute_score, **arguments))
    score, info = (result["score"], dict(result)) if isinstance(result, dict) else (result, {"acc": result})
    output.reward_score, output.extra_fields["reward_extra_info"] = score, info
    output.metrics.compute_score = time.perf_counter() - started


def reward_manager_of(worker: Any) -> Any:
    """Return verl's default manager, made once in a worker; None where rewards are another's to give."""
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
    from verl.trainer.ppo.reward import load_reward_manager

    if not hasattr(worker, "_goldilocks_rewards"):
        reward = worker.config.reward
        sandbox = (reward.get("sandbox_fusion") or {}).get("url")
        plain = not reward.reward_model.enable and reward.reward_manager.name == MANAGER and not sandbox
        manager = load_reward_manager(worker.config, worker.tokenizer) if plain else None
        ours = type(manager) is NaiveRewardManager and is_known(NaiveRewardManager.run_single, RUN_SINGLE)
        worker._goldilocks_rewards = manager if ours else None
    return worker._goldilocks_rewards


class SingleTurn:
    """Renders prompts and turns answers into outputs, with the worker's tokenizer and config."""

    def __init__(self, worker: Any) -> None:
        self._loop = SingleTurnAgentLoop(
            trainer_config=agent_loop.DictConfigWrap(config=worker.config),
            server_manager=worker.llm_client,
            tokenizer=worker.tokenizer,
            processor=worker.processor,
            hf_model_type=worker.hf_model_type,
            dataset_cls=worker.dataset_cls,
            data_config=agent_loop.DictConfigWrap(worker.config.data),
            tools=agent_loop.ToolListWrap(worker.tools),
        )
        self._limit = self._loop.response_length
        self.reward_manager = reward_manager_of(worker)

    @classmethod
    def of(cls, worker: Any) -> SingleTurn | None:
        """None where verl makes the rollouts of this worker."""
        return cls(worker) if _gives_verls_rows(worker) and reward_manager_of(worker) is not None else None

    async def prompt_ids(self, prompt: Fields) -> list[int]:
        """The tokens of a prompt."""
        ids: list[int] = await self._loop.ct_build_initial_tokens(list(prompt["raw_prompt"]))
        return ids

    async def output(self, reply: Reply, seconds: float) -> AgentLoopOutput:
        """Do what the second half of verl's ``SingleTurnAgentLoop.run`` does with an answer."""
        made, prompt = reply.outcome, reply.turn.prompt_ids
        assert not isinstance(made, BaseException)
        log_probs = made.log_probs or None
        merged, mask, aligned = await self._loop.ct_merge_assistant_token(
            prompt, made.token_ids, [], None if log_probs is None else [], assistant_logprobs=log_probs
        )
        start = len(merged.token_ids) - len(mask)
        version = made.extra_fields.get("global_steps")
        return AgentLoopOutput(
            prompt_ids=merged.token_ids[:start],
            response_ids=merged.token_ids[start:][: self._limit],
            response_mask=mask[: self._limit],
            response_logprobs=aligned[: self._limit] if aligned else None,
            extra_fields={
                **made.extra_fields,
                "min_global_steps": version,
                "max_global_steps": version,
                "turn_scores": [],
                "tool_rewards": [],
            },
            num_turns=2,
            metrics=AgentLoopMetrics(
                generate_sequences=seconds, num_preempted=-1 if made.num_preempted is None else made.num_preempted
            ),
            **NO_PICTURES,
        )


def row_of(output: AgentLoopOutput, prompt: Fields) -> Fields:
    """The fields of a row, as verl's ``_agent_loop_postprocess`` stores them."""
    fields = {**output.as_dict(), **prompt}
    input_ids = torch.cat([fields["prompts"], fields["responses"]])
    return {
        **fields,
        "loss_mask": fields["response_mask"],
        "input_ids": input_ids,
        "position_ids": torch.arange(len(input_ids)),
        "multi_modal_inputs": {},
    }


def _gives_verls_rows(worker: Any) -> bool:
    """Whether this verl, this server and this config are such that what is done here gives verl's rows."""
    rollout = worker.rollout_config
    more = rollout.full_determinism or rollout.enable_rollout_routing_replay  # verl sends priorities, stores experts
    served = rollout.name == OUR_SERVER or (rollout.name == "vllm" and not more)
    loop = SingleTurnAgentLoop
    registered = agent_loop._agent_loop_registry.get(AGENT) == {"_target_": f"{loop.__module__}.{loop.__qualname__}"}
    text_alone = worker.processor is None and not worker.distillation_enabled and not rollout.trace.get("backend")
    rewards = worker.reward_loop_worker_handles is not None
    partial = OmegaConf.select(worker.config, "algorithm.filter_groups.on_full") == OnFull.PARTIAL
    pauses = partial or OmegaConf.select(worker.config, "trainer.v1.trainer_mode") == "goldilocks_async"
    as_followed = all(is_known(function, sources) for function, sources in FOLLOWED)
    return asks_for(Kind.SPEED) and served and registered and text_alone and rewards and not pauses and as_followed


class BatchedSingleTurn:
    """Single-turn rollouts that start together: one message to each server, one put of those that end together.

    Invariant: every session is reported once, as a rollout that is stored or as a failure.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._client: StreamingClient = worker.llm_client
        self._single_turn: SingleTurn = worker.single_turn
        self._open: dict[Session, Fields] = {}  # the sessions that are not reported yet, and the fields of their rows
        self._finishing: set[asyncio.Task[None]] = set()
        self._started = time.perf_counter()

    async def run(self, prompts: list[Fields], sampling_params: dict[str, Any]) -> None:
        """Return when every session is reported."""
        try:
            sessions: list[list[Session]] = []
            for prompt in prompts:  # first: a group can be cancelled once its sessions are open
                first, count = int(prompt[FIRST]), int(prompt[ROLLOUTS])
                fields = {name: value for name, value in prompt.items() if name not in NOT_STORED}
                sessions.append([self._client.begin(prompt["uid"], index) for index in range(first, first + count)])
                self._open |= {one: {**fields, "session_id": one.index} for one in sessions[-1]}
            rendered = await asyncio.gather(*map(self._single_turn.prompt_ids, prompts), return_exceptions=True)
            turns: list[TurnRequest] = []
            for prompt, opened, ids in zip(prompts, sessions, rendered, strict=True):
                if isinstance(ids, BaseException):
                    await self._lose(opened, ids)
                    continue
                rollout, seed = self._worker.rollout_config, int(prompt[VISIT_SEED])
                turns += [TurnRequest(one, ids, seeded(sampling_params, rollout, seed, one.index)) for one in opened]
            await self._client.ask(turns, self._answered)
            while self._finishing:
                await asyncio.gather(*self._finishing)
        except Exception as error:  # a session that is never reported would be waited for without end
            await self._lose(list(self._open), error)

    def _answered(self, replies: list[Reply]) -> None:
        """Grade and store these answers while others are still being written."""
        task = asyncio.create_task(self._finish(replies))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _finish(self, replies: list[Reply]) -> None:
        try:
            graded = await self._graded(await self._outputs(replies))
            for has in (True, False):  # rows of one put have the same fields
                alike = {name: one for name, one in graded.items() if (one.response_logprobs is not None) is has}
                await self._store(alike)
        except Exception as error:
            await self._lose([one.turn.session for one in replies if one.turn.session in self._open], error)

    async def _outputs(self, replies: list[Reply]) -> dict[Session, AgentLoopOutput]:
        """The outputs of the answers that are complete; the sessions of the others are reported."""
        seconds, outputs = time.perf_counter() - self._started, {}
        for reply in replies:
            session, outcome = reply.turn.session, reply.outcome
            if isinstance(outcome, Cancelled) or self._client.is_cancelled(session):
                self._fail(session, "cancelled")
            elif isinstance(outcome, BaseException):
                await self._lose([session], outcome)
            elif outcome.stop_reason == "aborted":  # not by us: the answer is incomplete
                self._fail(session, "aborted")
            elif not outcome.token_ids:
                self._fail(session, "empty_response")
            else:
                outputs[session] = await self._single_turn.output(reply, seconds)
        return outputs

    async def _graded(self, outputs: dict[Session, AgentLoopOutput]) -> dict[Session, AgentLoopOutput]:
        """Give the outputs their rewards; return those that have one, and report the sessions of the others."""
        manager = self._single_turn.reward_manager
        grades = (grade(manager, output, self._open[session]) for session, output in outputs.items())
        errors = await asyncio.gather(*grades, return_exceptions=True)
        for session, error in zip(list(outputs), errors, strict=True):
            if error is not None:
                await self._lose([session], error)
                del outputs[session]
            elif outputs[session].reward_score is None:
                self._fail(session, "no_reward")
                del outputs[session]
        return outputs

    async def _store(self, outputs: dict[Session, AgentLoopOutput]) -> None:
        """Put the rows into the queue together, and report their rollouts."""
        if not outputs:
            return
        rows, rollouts = [], []
        for session, output in outputs.items():
            prompt, truncated = self._open[session], self._worker.is_truncated(output.response_ids)
            written: Versions = [[output.extra_fields["global_steps"], len(output.response_ids)]]
            rows.append(row_of(output, prompt))
            rollouts.append(rollout_of(session, [output], prompt["global_steps"], truncated, written))
        keys, tags = zip(*(rollout.payload[0] for rollout in rollouts), strict=True)
        fields = list_of_dict_to_tensordict(rows)
        await transfer_queue.async_kv_batch_put(keys=list(keys), fields=fields, tags=list(tags), partition_id=PARTITION)
        for session, rollout in zip(outputs, rollouts, strict=True):
            self._worker.report_stored(rollout)
            self._end(session)

    async def _lose(self, sessions: list[Session], error: BaseException) -> None:
        for session in sessions:
            await self._worker.report_error(session, error)
            self._end(session)

    def _fail(self, session: Session, reason: str) -> None:
        self._worker.report_failed(session, reason)
        self._end(session)

    def _end(self, session: Session) -> None:
        del self._open[session]
        self._client.end(session)
