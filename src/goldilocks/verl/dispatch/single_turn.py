"""verl's single-turn agent loop for many rollouts at a time.

verl runs every rollout as a task of its own: it renders the prompt's template once per rollout, builds an agent loop,
hops between threads, validates objects, and builds eight tensors. Here a prompt is rendered once for all its rollouts,
rollouts go to each server in one message, and rollouts that end together are graded and stored together. The rows are
the same, field by field. Where verl's loop is not one that this was written for, verl's own loop runs.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, Protocol

import torch
import transfer_queue
from omegaconf import OmegaConf
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from goldilocks.engine.verl_server import NAME as OUR_SERVER
from goldilocks.hashing import Sources, is_known
from goldilocks.types import OnFull, Rollout
from goldilocks.verl.dispatch.client import StreamingClient
from goldilocks.verl.dispatch.session import (
    ANSWERS,
    FIRST,
    ROLLOUTS,
    VISIT_SEED,
    Cancelled,
    Reply,
    Session,
    TurnRequest,
    Versions,
    rollout_of,
    seeded,
)
from goldilocks.verl.patch import Kind
from goldilocks.verl.store.queue_rows import PARTITION
from goldilocks.verl.switch import asks_for

Fields = dict[str, Any]  # of a row

AGENT = "single_turn_agent"  # verl's name of its single-turn loop
MANAGER = "naive"  # verl's name of its default reward manager
RUN_SINGLE = "89e2c1e4e0d30a79"  # the digest of the default manager's method, which ``grade`` follows

# The functions of verl whose work is done here for many rollouts at once, and the sources that they may have.
WORKER = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class  # type: ignore[attr-defined]  # Ray's
FOLLOWED: tuple[tuple[Callable[..., Any], Sources], ...] = (
    (SingleTurnAgentLoop.run, ("1baec41cee2de25f", "b016f36cb70524a1")),
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


async def grade(manager: Any, output: Any, row: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """As ``NaiveRewardManager.run_single`` of the same rollout: the score, and what else the function returned."""
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
    return (result["score"], dict(result)) if isinstance(result, dict) else (result, {"acc": result})


def manager_of(worker: Any) -> Any:
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
    """Renders prompts, turns answers into outputs, and grades outputs, with the worker's tokenizer and config."""

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
        self._rewards = manager_of(worker)

    @classmethod
    def of(cls, worker: Any) -> SingleTurn | None:
        """None where verl makes the rollouts of this worker."""
        return cls(worker) if _is_known(worker) and manager_of(worker) is not None else None

    async def prompts_ids(self, prompts: Sequence[Fields]) -> list[list[int] | BaseException]:
        """The tokens of each prompt, or the error that rendering it raised."""
        return await asyncio.gather(*map(self._prompt_ids, prompts), return_exceptions=True)

    async def _prompt_ids(self, prompt: Fields) -> list[int]:
        ids: list[int] = await self._loop.ct_build_initial_tokens(list(prompt["raw_prompt"]))
        return ids

    async def output(self, reply: Reply, seconds: float) -> Output:
        """Do what the second half of verl's ``SingleTurnAgentLoop.run`` does with an answer."""
        made, prompt = reply.outcome, reply.turn.prompt_ids
        assert not isinstance(made, BaseException)
        log_probs = made.log_probs or None
        merged, mask, aligned = await self._loop.ct_merge_assistant_token(
            prompt, made.token_ids, [], None if log_probs is None else [], assistant_logprobs=log_probs
        )
        start = len(merged.token_ids) - len(mask)
        version = made.extra_fields.get("global_steps")
        return Output(
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
            metrics={
                "generate_sequences": seconds,
                "num_preempted": -1 if made.num_preempted is None else made.num_preempted,
            },
        )

    async def grade(self, outputs: list[Output], prompts: list[Fields]) -> list[BaseException | None]:
        """Give each output its reward; return for each the error that prevented it, or None."""
        grades = (self._grade(output, prompt) for output, prompt in zip(outputs, prompts, strict=True))
        return await asyncio.gather(*grades, return_exceptions=True)

    async def _grade(self, output: Output, prompt: Fields) -> None:
        started = time.perf_counter()
        output.reward_score, output.extra_fields["reward_extra_info"] = await grade(self._rewards, output, prompt)
        output.metrics["compute_score"] = time.perf_counter() - started


def fields_of_rows(outputs: Sequence[Output], prompts: Sequence[Fields]) -> list[Fields]:
    """The fields of each row, as verl's ``_agent_loop_postprocess`` stores them; all have log-probs or none has."""
    columns, made = _columns(outputs), []
    for place, (one, prompt) in enumerate(zip(outputs, prompts, strict=True)):
        about = {"num_turns": one.num_turns, "metrics": one.metrics, "extra_fields": one.extra_fields}
        tensors = {name: column[place] for name, column in columns.items()}
        made.append({**_NO_PICTURES, **about, **prompt, **tensors})
    return made


_NO_PICTURES: Fields = {
    "mm_processor_kwargs": {},
    **dict.fromkeys({"mm_processor_output"} & set(agent_loop.AgentLoopOutput.model_fields)),  # not every verl has it
    "multi_modal_inputs": {},
}


def _columns(outputs: Sequence[Output]) -> dict[str, tuple[torch.Tensor, ...]]:
    """The tensors of every output, by field. The reward stands at the last token of an answer."""
    sequences = [one.prompt_ids + one.response_ids for one in outputs]
    lengths = [len(one.response_mask) for one in outputs]
    masks = _tensors([one.response_mask for one in outputs], torch.int64)
    scores, ends = torch.zeros(sum(lengths)), torch.tensor(list(accumulate(lengths)))
    scores[ends - 1] = torch.tensor([one.reward_score for one in outputs], dtype=torch.float32)
    columns = {
        "prompts": _tensors([one.prompt_ids for one in outputs], torch.int64),
        "responses": _tensors([one.response_ids for one in outputs], torch.int64),
        "response_mask": masks,
        "loss_mask": masks,
        "input_ids": _tensors(sequences, torch.int64),
        "position_ids": _tensors([range(len(sequence)) for sequence in sequences], torch.int64),
        "rm_scores": scores.split(lengths),
    }
    log_probs = [one.response_logprobs for one in outputs if one.response_logprobs is not None]
    return columns | ({"rollout_log_probs": _tensors(log_probs, torch.float32)} if log_probs else {})


def _tensors(sequences: Sequence[Sequence[float]], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """A tensor of each sequence, views of one: torch makes one large tensor sooner than many small ones."""
    whole = torch.tensor(list(chain.from_iterable(sequences)), dtype=dtype)
    return whole.split([len(sequence) for sequence in sequences])


def _is_known(worker: Any) -> bool:
    """Whether this verl, this server and this config are such that what is done here gives verl's rows."""
    rollout = worker.rollout_config
    more = rollout.full_determinism or rollout.enable_rollout_routing_replay  # a priority for each request; experts
    served = rollout.name == OUR_SERVER or (rollout.name == "vllm" and not more)
    loop = SingleTurnAgentLoop
    registered = agent_loop._agent_loop_registry.get(AGENT) == {"_target_": f"{loop.__module__}.{loop.__qualname__}"}
    text_alone = worker.processor is None and not worker.distillation_enabled and not rollout.trace.get("backend")
    rewards = worker.reward_loop_worker_handles is not None
    partial = OmegaConf.select(worker.config, "algorithm.filter_groups.on_full") == OnFull.PARTIAL
    pauses = partial or OmegaConf.select(worker.config, "trainer.v1.trainer_mode") == "goldilocks_async"
    as_followed = all(is_known(function, sources) for function, sources in FOLLOWED)
    return asks_for(Kind.SPEED) and served and registered and text_alone and rewards and not pauses and as_followed


class Worker(Protocol):
    """What is used of the worker, which reports how the sessions end."""

    llm_client: StreamingClient
    rollout_config: Any
    single_turn: SingleTurn

    def report_stored(self, rollout: Rollout) -> None: ...
    def report_failed(self, session: Session, reason: str) -> None: ...
    async def report_error(self, session: Session, error: BaseException) -> None: ...
    def is_truncated(self, response_ids: Sequence[int]) -> bool: ...


class BatchedSingleTurn:
    """Single-turn rollouts that start together: one message to each server, one put of those that end together.

    Invariant: every session is reported once, as a rollout that is stored or as a failure.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker, self._client, self._loop = worker, worker.llm_client, worker.single_turn
        self._open: dict[Session, Fields] = {}  # the sessions that are not reported yet, and the fields of their rows
        self._finishing: set[asyncio.Task[None]] = set()
        self._started = time.perf_counter()

    async def run(self, prompts: list[Fields], sampling_params: dict[str, Any]) -> None:
        """Return when every session is reported."""
        try:
            sessions = list(map(self._begun, prompts))  # first: a group can be cancelled once its sessions are open
            rendered = await self._loop.prompts_ids(prompts)
            triples = zip(prompts, sessions, rendered, strict=True)
            turns = [turn for one in triples for turn in await self._turns(*one, sampling_params)]
            await self._client.ask(turns, self._answered)
            while self._finishing:
                await asyncio.gather(*self._finishing)
        except Exception as error:  # a session that is never reported would be waited for without end
            await self._lose(list(self._open), error)

    def _begun(self, prompt: Fields) -> list[Session]:
        """Open the sessions of a prompt."""
        first, count = int(prompt[FIRST]), int(prompt[ROLLOUTS])
        not_stored = {ROLLOUTS, FIRST, VISIT_SEED, ANSWERS, "agent_name"}
        fields = {name: value for name, value in prompt.items() if name not in not_stored}
        sessions = [self._client.begin(prompt["uid"], index) for index in range(first, first + count)]
        self._open |= {session: {**fields, "session_id": session.index} for session in sessions}
        return sessions

    async def _turns(
        self, prompt: Fields, sessions: list[Session], ids: list[int] | BaseException, sampling_params: dict[str, Any]
    ) -> list[TurnRequest]:
        """Return the requests of a prompt's sessions, or none if the prompt could not be rendered."""
        if isinstance(ids, BaseException):
            await self._lose(sessions, ids)
            return []
        rollout, seed = self._worker.rollout_config, int(prompt[VISIT_SEED])
        return [TurnRequest(one, ids, seeded(sampling_params, rollout, seed, one.index)) for one in sessions]

    def _answered(self, replies: list[Reply]) -> None:
        """Grade and store these answers while others are still being written."""
        task = asyncio.create_task(self._finish(replies))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _finish(self, replies: list[Reply]) -> None:
        try:
            outputs = await self._outputs(replies)
            graded = await self._graded(outputs)
            for known in (True, False):  # rows of one put have the same fields
                have = {name: one for name, one in graded.items() if (one.response_logprobs is not None) is known}
                await self._store(have)
        except Exception as error:
            await self._lose([one.turn.session for one in replies if one.turn.session in self._open], error)

    async def _outputs(self, replies: list[Reply]) -> dict[Session, Output]:
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
                outputs[session] = await self._loop.output(reply, seconds)
        return outputs

    async def _graded(self, outputs: dict[Session, Output]) -> dict[Session, Output]:
        """Give the outputs their rewards; return those that have one, and report the sessions of the others."""
        errors = await self._loop.grade(list(outputs.values()), [self._open[session] for session in outputs])
        for session, error in zip(list(outputs), errors, strict=True):
            if error is not None:
                await self._lose([session], error)
                del outputs[session]
            elif outputs[session].reward_score is None:
                self._fail(session, "no_reward")
                del outputs[session]
        return outputs

    async def _store(self, outputs: dict[Session, Output]) -> None:
        """Put the rows into the queue together, and report their rollouts."""
        if not outputs:
            return
        rollouts = [
            rollout_of(
                session,
                [output],
                self._open[session]["global_steps"],
                self._worker.is_truncated(output.response_ids),
                output.versions,
            )
            for session, output in outputs.items()
        ]
        keys, tags = zip(*(rollout.payload[0] for rollout in rollouts), strict=True)
        made, prompts = list(outputs.values()), [self._open[session] for session in outputs]
        rows = list_of_dict_to_tensordict(fields_of_rows(made, prompts))
        await transfer_queue.async_kv_batch_put(keys=list(keys), fields=rows, tags=list(tags), partition_id=PARTITION)
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
