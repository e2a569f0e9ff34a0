"""verl's agent loop, one rollout at a time: what it finishes is told at once, and what is not needed is aborted.

A worker runs ``n`` sessions of a prompt, numbered from ``first``, and tells of each: a rollout with its reward, or a
failure with what it cost. The driver waits for events; it never polls. Validation goes through verl's own path.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple

import hydra
import ray
from verl.experimental.agent_loop import agent_loop, get_trajectory_info
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.utils.rollout_trace import rollout_trace_attr
from verl.workers.rollout.llm_server import LLMServerClient

from goldilocks.drive.stopwatch import PREFIX, Stopwatch
from goldilocks.hashing import content_key
from goldilocks.types import Failure, Paused, Rollout
from goldilocks.verl.dispatch.aborts import IDLE_TO_SLEEP
from goldilocks.verl.dispatch.batched_single_turn import Wave
from goldilocks.verl.dispatch.client import StreamingClient
from goldilocks.verl.dispatch.failures import publish, succeeded
from goldilocks.verl.dispatch.rollout_event import rollout_of
from goldilocks.verl.dispatch.sampling_seed import VALIDATION, request_number, seeded, visit_seed
from goldilocks.verl.dispatch.session import Answer, Cancelled, Session, current_session
from goldilocks.verl.dispatch.single_turn import AGENT, SingleTurn
from goldilocks.verl.patches.patch import Kind
from goldilocks.verl.patches.switch import ask_for
from goldilocks.verl.patches.table import GATHERED_PUTS
from goldilocks.verl.store.rows import ANSWERS, FIRST, ROLLOUTS, VISIT_SEED
from goldilocks.verl.store.unfinished import Saved

logger = logging.getLogger(__name__)

DRAIN_S = 300.0  # how long requests that nobody needs may still run: a server that cannot abort ends them itself


class Drained(NamedTuple):
    """How a step went at a worker."""

    left: int  # sessions that are still at a server
    asked: int  # requests that servers were asked to end, since the run began
    ended: int  # those that did
    tokens: int  # that those had
    seconds: dict[str, float]  # since the last time, by what they were spent on
    engine_s: dict[str, float]  # of each server, since it was started


class SoFar(NamedTuple):
    """A worker at one moment: every session is told of in an event, or is unfinished and has its answers here."""

    replies: int  # that ``events`` has made since the run began
    events: list[Rollout | Failure]  # since the last of those replies
    answers: list[Saved]


class StreamingWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[name-defined]
    """verl's worker, which tells of each session as it ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ask_for(Kind.REPORTS)
        GATHERED_PUTS.apply()
        self._agent_loops: dict[str, Callable[[], Any]] = {}
        self._listen(self.llm_client)
        self.single_turn = SingleTurn.of(self)

    def _listen(self, client: LLMServerClient) -> None:
        self.llm_client = StreamingClient(client)
        self._events: list[Rollout | Failure] = []
        self._news = asyncio.Event()
        self._replies = 0
        self.watch = Stopwatch()

    async def events(self) -> list[Rollout | Failure]:
        """What has happened since this was last asked; waits until something has."""
        while not self._events:
            await self._news.wait()
            self._news.clear()
        self._replies += 1
        return self._new_events()

    async def so_far(self) -> SoFar:
        """What has happened up to this moment, without waiting for anything."""
        return SoFar(self._replies, self._new_events(), self._answers())

    def _new_events(self) -> list[Rollout | Failure]:
        events, self._events = self._events, []
        return events

    async def cancel(self, uids: list[str]) -> None:
        """These groups are no longer needed."""
        for uid in uids:
            self.llm_client.cancel(uid)

    async def pause(self, within: float) -> list[Paused]:
        """Stop every session with what it has written, as far as servers do so within so many seconds."""
        await self.llm_client.pause(within)
        return [Paused(one.uid, one.index, one.tokens) for one in self.llm_client.unfinished]

    async def resume(self) -> None:
        """Let every session go on."""
        self.llm_client.resume()

    async def answers(self) -> list[Saved]:
        """What every session has been answered so far."""
        return self._answers()

    def _answers(self) -> list[Saved]:
        sessions = self.llm_client.unfinished
        return [[one.uid, one.index, [answer.state_dict() for answer in one.answers]] for one in sessions]

    async def drained(self, within: float) -> Drained:
        """Wait until no session is at a server, at most so many seconds; return how the step went."""
        client, aborts = self.llm_client, self.llm_client.aborts
        left = await client.drained(within)
        return Drained(left, aborts.asked, aborts.ended, aborts.tokens, self.watch.read(), dict(client.engine_s))

    async def generate_sequences(self, batch: Any) -> None:
        """verl's, for validation."""
        self.llm_client.look_again()
        await super().generate_sequences(batch)

    async def start(self, prompts: list[dict[str, Any]]) -> None:
        """Start the sessions of these prompts and return; ``events`` tells of each."""
        self.llm_client.look_again()
        params = self._sampling_params()
        whole: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for prompt in prompts:
            prompt.setdefault("agent_name", self.rollout_config.agent.default_agent_loop)
            (whole if self._in_a_wave(prompt) else others).append(prompt)
        if whole:
            self._in_background(Wave(self).run(whole, params))
        about = await get_trajectory_info(None, [prompt["index"] for prompt in others], False)
        for prompt, trajectory in zip(others, about, strict=True):
            self._in_background(self._run_prompt(prompt, params, {**trajectory, "step": prompt["global_steps"]}))

    def _in_a_wave(self, prompt: dict[str, Any]) -> bool:
        """Rollouts that were saved unfinished go on one by one."""
        return self.single_turn is not None and prompt["agent_name"] == AGENT and not prompt.get(ANSWERS)

    def _sampling_params(self) -> dict[str, Any]:
        """As verl's worker has them in training."""
        rollout = self.rollout_config
        chosen = {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k}
        return {**chosen, "repetition_penalty": 1.0, "logprobs": rollout.calculate_log_probs}

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.background_tasks.add(task)
        task.add_done_callback(self.background_tasks.discard)

    async def _run_prompt(self, prompt: dict, sampling_params: dict, trajectory: dict, trace: bool = False) -> None:
        if trajectory["validate"]:
            await super()._run_prompt(prompt, sampling_params, trajectory, trace)
            return
        count, first, seed = (int(prompt.pop(field)) for field in (ROLLOUTS, FIRST, VISIT_SEED))
        answers = prompt.pop(ANSWERS, None) or {}
        sessions = [self._begin(prompt["uid"], first + i, answers) for i in range(count)]
        params = [seeded(sampling_params, self.rollout_config, seed, session.index) for session in sessions]
        runs = zip(sessions, params, strict=True)
        await asyncio.gather(*(self._run_session(session, prompt, own, trajectory, trace) for session, own in runs))

    def _begin(self, uid: str, index: int, saved: Mapping[int, Any]) -> Session:
        session: Session = self.llm_client.begin(uid, index, map(Answer.from_state_dict, saved.get(index, ())))
        return session

    async def _run_session(self, session: Session, prompt: dict, params: dict, trajectory: dict, trace: bool) -> None:
        current_session.set(session)
        try:
            await self._run_agent_loop(params, trajectory=trajectory, trace=trace, session_id=session.index, **prompt)
        except Cancelled:
            self.tell_failed(session, "cancelled")
        except Exception as error:
            logger.exception("rollout %s of group %s failed", session.index, session.uid)
            await publish(error)
            self.tell_failed(session, type(error).__name__)
        finally:
            self.llm_client.end(session)

    async def _run_agent_loop(
        self, sampling_params: dict, trajectory: dict, *, agent_name: str, trace: bool = True, **kwargs: Any
    ) -> None:
        """As verl's, with agent loops that do not take Hydra 5 ms each."""
        if trajectory["validate"]:
            sampling_params = self._seeded_for_validation(sampling_params, kwargs)
        name = {"priority": request_number(kwargs)} if self.rollout_config.full_determinism else {}
        about = {name: trajectory[name] for name in ("step", "sample_index", "rollout_n", "validate")}
        with rollout_trace_attr(name="agent_loop", trace=trace, **about):
            output = await self._agent_loop(agent_name).run(sampling_params, **{**kwargs, **name})
            await self._agent_loop_postprocess(output, trajectory["validate"], **kwargs)

    def _seeded_for_validation(self, sampling_params: dict, row: dict[str, Any]) -> dict[str, Any]:
        seed = visit_seed(self.config, content_key(row["raw_prompt"]), row.get("index"), VALIDATION)
        return seeded(sampling_params, self.rollout_config, seed, row["session_id"])

    def _agent_loop(self, name: str) -> Any:
        """A new one, as verl makes it: an agent loop may keep the state of its conversation."""
        if name not in self._agent_loops:
            registry = agent_loop._agent_loop_registry
            assert name in registry, f"Agent loop {name} not registered, registered agent loops: {registry.keys()}"
            # A class alone is looked up once; from a config with more in it, Hydra makes a new object every time.
            plain = set(registry[name]) == {"_target_"}
            make = functools.partial(
                hydra.utils.get_class(registry[name]["_target_"]) if plain else hydra.utils.instantiate,
                *([] if plain else [registry[name]]),
                trainer_config=agent_loop.DictConfigWrap(config=self.config),
                server_manager=self.llm_client,
                tokenizer=self.tokenizer,
                processor=self.processor,
                hf_model_type=self.hf_model_type,
                dataset_cls=self.dataset_cls,
                data_config=agent_loop.DictConfigWrap(self.config.data),
                tools=agent_loop.ToolListWrap(self.tools),
            )
            self._agent_loops[name] = make
        return self._agent_loops[name]()

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        if validate:
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            return
        outputs = output if isinstance(output, list) else [output]
        session = current_session.get()
        assert session is not None
        if self.llm_client.is_cancelled(session):
            self.tell_failed(session, "cancelled")
        elif not outputs or not all(one.response_ids for one in outputs):
            self.tell_failed(session, "empty_response")
        else:
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            if outputs[-1].reward_score is None:
                self.tell_failed(session, "no_reward")
            else:
                limit = self.rollout_config.response_length
                self.tell_stored(rollout_of(session, outputs, kwargs["global_steps"], limit, session.versions))

    def tell_stored(self, rollout: Rollout) -> None:
        """A rollout is in the queue."""
        succeeded()
        self._tell(rollout)

    def tell_failed(self, session: Session, reason: str) -> None:
        """A rollout that will not come is charged what it has generated."""
        self._tell(Failure(session.uid, session.index, reason, session.tokens))

    def _tell(self, event: Rollout | Failure) -> None:
        self._events.append(event)
        self._news.set()


class StreamingManager(AgentLoopManagerTQ):
    """verl's manager over workers that tell of each rollout."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ask_for(Kind.REPORTS)
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(StreamingWorker)
        self._waiting: dict[Any, int] = {}  # the replies that we wait for, each with its worker's number
        self._replies: Counter[int] = Counter()  # that came, by worker
        self._drained: list[Drained] = []
        self._engine_s: dict[str, float] = {}

    def start(self, prompts: list[dict[str, Any]]) -> None:
        """Start the sessions of these prompts, each worker as many prompts as the next."""
        workers: list[Any] = self.agent_loop_workers
        size = math.ceil(len(prompts) / len(workers))
        parts = [prompts[place : place + size] for place in range(0, len(prompts), size)]
        ray.get([worker.start.remote(part) for worker, part in zip(workers, parts, strict=False)])

    def events(self, within: float | None = None) -> list[Rollout | Failure]:
        """What has happened since this was last asked; waits until something has. A worker that died raises.

        ``within``: seconds after which nothing is an answer too.
        """
        workers: list[Any] = self.agent_loop_workers
        for number, worker in enumerate(workers):
            if number not in self._waiting.values():
                self._waiting[worker.events.remote()] = number
        ready, _ = ray.wait(list(self._waiting), num_returns=1, timeout=within)
        more, _ = ray.wait(list(self._waiting), num_returns=len(self._waiting), timeout=0)
        return [event for reference in {*ready, *more} for event in self._reply(reference)]

    def so_far(self) -> tuple[list[Rollout | Failure], list[Saved]]:
        """What has happened since this was last asked and what unfinished rollouts have been answered, at one moment.

        Every worker is asked once: this returns however much goes on happening.
        """
        workers: list[Any] = self.agent_loop_workers
        snapshots: list[SoFar] = ray.get([worker.so_far.remote() for worker in workers])
        events: list[Rollout | Failure] = []
        for number, snapshot in enumerate(snapshots):
            if snapshot.replies > self._replies[number]:  # one more is on its way, and older than the snapshot
                events += self._reply(next(one for one, worker in self._waiting.items() if worker == number))
            events += snapshot.events
        return events, [saved for snapshot in snapshots for saved in snapshot.answers]

    def _reply(self, reference: Any) -> list[Rollout | Failure]:
        self._replies[self._waiting.pop(reference)] += 1
        events: list[Rollout | Failure] = ray.get(reference)
        return events

    def pause(self) -> list[Paused]:
        """Stop all generation; return what every unfinished rollout has written."""
        workers: list[Any] = self.agent_loop_workers
        return [event for paused in ray.get([worker.pause.remote(DRAIN_S) for worker in workers]) for event in paused]

    def resume(self) -> None:
        """Go on with what was paused."""
        workers: list[Any] = self.agent_loop_workers
        ray.get([worker.resume.remote() for worker in workers])

    def answers(self) -> list[Saved]:
        """What every unfinished rollout has been answered so far."""
        workers: list[Any] = self.agent_loop_workers
        return [saved for answers in ray.get([worker.answers.remote() for worker in workers]) for saved in answers]

    def cancel(self, uids: list[str]) -> None:
        """Abort what these groups have in flight. Every worker is told: a group may be at several."""
        workers: list[Any] = self.agent_loop_workers
        if uids:
            ray.get([worker.cancel.remote(uids) for worker in workers])

    def drain(self) -> None:
        """Return when no session is at a server, cancelled ones included; those that do not end are said to run on.

        An engine that must be idle to be put to sleep is waited for until it is: every answer has an end.
        """
        workers: list[Any] = self.agent_loop_workers
        while True:
            self._drained = ray.get([worker.drained.remote(DRAIN_S) for worker in workers])
            left = sum(one.left for one in self._drained)
            if left:
                logger.warning("%d requests were to end and are at the rollout servers after %g s", left, DRAIN_S)
            if not left or self.rollout_config.name not in IDLE_TO_SLEEP:
                return

    def metrics(self) -> dict[str, float]:
        """Of the step that has ended: aborts since the run began, and seconds of the busiest worker."""
        workers: list[Any] = self.agent_loop_workers
        drained, self._drained = self._drained, []
        reports = drained or ray.get([worker.drained.remote(0.0) for worker in workers])
        aborts = {
            "aborts/asked": sum(one.asked for one in reports),
            "aborts/ended": sum(one.ended for one in reports),
            "aborts/tokens": sum(one.tokens for one in reports),
            "aborts/left": sum(one.left for one in drained),
        }
        seconds = sorted((name, value) for one in reports for name, value in one.seconds.items())
        return {**aborts, **dict(seconds), **self._engine_seconds(reports)}

    def _engine_seconds(self, reports: list[Drained]) -> dict[str, float]:
        """Of the busiest server, since this was last asked."""
        now = dict(sorted((name, value) for one in reports for name, value in one.engine_s.items()))
        spent = [value - self._engine_s.get(name, 0.0) for name, value in now.items()]
        self._engine_s |= now
        return {f"{PREFIX}engine": max(spent)} if spent else {}
