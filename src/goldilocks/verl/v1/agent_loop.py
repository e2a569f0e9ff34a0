"""verl's agent loop, one rollout at a time: what it finishes is told at once, and what is not needed is aborted.

A worker runs ``n`` sessions of a prompt, numbered from ``first``, and tells of each: a rollout with its reward, or a
failure with what it cost. The driver waits for events; it never polls. Validation goes through verl's own path.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import hydra
import ray
from verl.experimental.agent_loop import agent_loop
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.rollout_trace import rollout_trace_attr

from goldilocks.types import Failure, Rollout
from goldilocks.verl.failures import publish
from goldilocks.verl.patches.patch import Kind
from goldilocks.verl.patches.switch import ask_for
from goldilocks.verl.patches.table import GATHERED_PUTS
from goldilocks.verl.v1.client import Cancelled, StreamingClient, session
from goldilocks.verl.v1.fields import FIRST, ROLLOUTS

logger = logging.getLogger(__name__)


class StreamingWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[name-defined]
    """verl's worker, which tells of each session as it ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ask_for(Kind.REPORTS)
        for patch in GATHERED_PUTS:
            patch.apply()
        self.llm_client = StreamingClient(self.llm_client)
        self._agent_loops: dict[str, Callable[[], Any]] = {}
        self._sessions: dict[str, int] = defaultdict(int)
        self._events: list[Rollout | Failure] = []
        self._news = asyncio.Event()

    async def events(self) -> list[Rollout | Failure]:
        """What has happened since this was last asked; waits until something has."""
        await self._news.wait()
        self._news.clear()
        events, self._events = self._events, []
        return events

    async def cancel(self, uids: list[str]) -> None:
        """These groups are no longer needed."""
        for uid in uids:
            if self._sessions.get(uid):
                self.llm_client.abort(uid)

    async def generate_sequences(self, batch: Any) -> None:
        """verl's: starts a session for each rollout and does not wait for it."""
        self.llm_client.look_again()
        await super().generate_sequences(batch)

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        if trajectory["validate"]:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
            return
        count, first = int(prompt.pop(ROLLOUTS)), int(prompt.pop(FIRST))
        self._sessions[prompt["uid"]] += count
        sessions = (
            self._run_session(first + i, prompt, dict(sampling_params), trajectory, trace) for i in range(count)
        )
        await asyncio.gather(*sessions)

    async def _run_session(self, index: int, prompt: dict, params: dict, trajectory: dict, trace: bool) -> None:
        uid = prompt["uid"]
        session.set((uid, index))
        try:
            await self._run_agent_loop(params, trajectory=trajectory, trace=trace, session_id=index, **prompt)
        except Cancelled:
            self._tell(Failure(uid, index, "cancelled"))
        except Exception as error:
            logger.exception("rollout %s of group %s failed", index, uid)
            await publish(error)
            self._tell(Failure(uid, index, type(error).__name__))
        finally:
            self._end_session(uid, index)

    async def _run_agent_loop(
        self, sampling_params: dict, trajectory: dict, *, agent_name: str, trace: bool = True, **kwargs: Any
    ) -> None:
        """As verl's, with agent loops that do not take Hydra 5 ms each."""
        about = {name: trajectory[name] for name in ("step", "sample_index", "rollout_n", "validate")}
        with rollout_trace_attr(name="agent_loop", trace=trace, **about):
            output = await self._agent_loop(agent_name).run(sampling_params, **kwargs)
            await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)

    def _agent_loop(self, name: str) -> Any:
        """A new one, as verl makes it: an agent loop may keep the state of its conversation."""
        if name not in self._agent_loops:
            registry = agent_loop._agent_loop_registry
            assert name in registry, f"Agent loop {name} not registered, registered agent loops: {registry.keys()}"
            make = functools.partial(
                hydra.utils.instantiate,
                config=registry[name],
                trainer_config=agent_loop.DictConfigWrap(config=self.config),
                server_manager=self.llm_client,
                tokenizer=self.tokenizer,
                processor=self.processor,
                hf_model_type=self.hf_model_type,
                dataset_cls=self.dataset_cls,
                data_config=agent_loop.DictConfigWrap(self.config.data),
                tools=agent_loop.ToolListWrap(self.tools),
            )
            # Of a class and nothing else Hydra is asked once; objects in a config are each conversation's own.
            self._agent_loops[name] = make(_partial_=True) if set(registry[name]) == {"_target_"} else make
        return self._agent_loops[name]()

    def _end_session(self, uid: str, index: int) -> None:
        self.llm_client.forget(uid, index)
        self._sessions[uid] -= 1
        if not self._sessions[uid]:
            del self._sessions[uid]
            self.llm_client.cancelled.discard(uid)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        if validate:
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            return
        outputs = output if isinstance(output, list) else [output]
        uid, index = kwargs["uid"], kwargs["session_id"]
        tokens = sum(sum(one.response_mask) for one in outputs)
        if uid in self.llm_client.cancelled:
            self._tell(Failure(uid, index, "cancelled", tokens))
        elif not outputs or not all(one.response_ids for one in outputs):
            self._tell(Failure(uid, index, "empty_response", tokens))
        else:
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            self._tell(self._rollout(outputs, uid, index, tokens, kwargs["global_steps"]))

    def _rollout(self, outputs: list[Any], uid: str, index: int, tokens: int, global_steps: int) -> Rollout | Failure:
        final = outputs[-1]
        if final.reward_score is None:
            return Failure(uid, index, "no_reward", tokens)
        info = final.extra_fields.get("reward_extra_info") or {}
        version = final.extra_fields.get("min_global_steps")
        return Rollout(
            uid,
            index,
            reward=float(final.reward_score),
            tokens=tokens,
            metrics={name: float(value) for name, value in info.items() if _is_number(value)},
            truncated=len(final.response_ids) >= self.rollout_config.response_length,
            version=None if version is None else int(version),
            payload=[[f"{uid}_{index}_{i}", _tag(one, global_steps)] for i, one in enumerate(outputs)],
        )

    def _tell(self, event: Rollout | Failure) -> None:
        self._events.append(event)
        self._news.set()


class StreamingManager(AgentLoopManagerTQ):
    """verl's manager over workers that tell of each rollout."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ask_for(Kind.REPORTS)
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(StreamingWorker)
        self._waiting: dict[Any, Any] = {}

    def events(self) -> list[Rollout | Failure]:
        """What has happened since this was last asked; waits until something has. A worker that died raises."""
        workers: list[Any] = self.agent_loop_workers
        for worker in workers:
            if worker not in self._waiting.values():
                self._waiting[worker.events.remote()] = worker
        ready, _ = ray.wait(list(self._waiting), num_returns=1)
        more, _ = ray.wait(list(self._waiting), num_returns=len(self._waiting), timeout=0)
        events: list[Rollout | Failure] = []
        for reference in {*ready, *more}:
            del self._waiting[reference]
            events += ray.get(reference)
        return events

    def cancel(self, uids: list[str]) -> None:
        """Abort what these groups have in flight. Every worker is told: a group may be at several."""
        workers: list[Any] = self.agent_loop_workers
        if uids:
            ray.get([worker.cancel.remote(uids) for worker in workers])


def _tag(output: Any, global_steps: int) -> dict[str, Any]:
    """The tag that verl's worker gives a trajectory."""
    prompt_len, response_len = len(output.prompt_ids), len(output.response_ids)
    return {
        "status": "success",
        "prompt_len": prompt_len,
        "response_len": response_len,
        "seq_len": prompt_len + response_len,
        "global_steps": global_steps,
        "min_global_steps": output.extra_fields.get("min_global_steps"),
        "max_global_steps": output.extra_fields.get("max_global_steps"),
    }


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float)) or (hasattr(value, "dtype") and getattr(value, "ndim", 1) == 0)
