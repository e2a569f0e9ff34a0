"""verl's agent-loop workers, which report each rollout as it ends and abort rollouts that nobody needs; their manager.

A worker runs ``n`` sessions of a prompt, numbered from ``first``, and reports each as an event: a rollout with its
reward, or a failure with the tokens it cost. Single-turn sessions run many at a time (``single_turn``). The manager, in
the driver's process, waits for events and never polls. Validation goes through verl's own path.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple

import ray
from verl.experimental.agent_loop import get_trajectory_info
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ
from verl.workers.rollout.llm_server import LLMServerClient

from goldilocks.engine.engine import end_ids, is_truncated
from goldilocks.engine.verl_server.messages import IDLE_TO_SLEEP
from goldilocks.hashing import content_key
from goldilocks.rewards import RewardCosts, RewardFailed, spent
from goldilocks.types import Event, Failure, Paused, Rollout
from goldilocks.verl.dispatch.backend import (
    ANSWERS,
    FIRST,
    ROLLOUTS,
    VALIDATION,
    VISIT_SEED,
    request_number,
    rollout_of,
    run_seeds,
    seeded,
    visit_seed,
)
from goldilocks.verl.dispatch.client import Cancelled, Session, StreamingClient, current_session
from goldilocks.verl.dispatch.failures import publish, succeeded
from goldilocks.verl.dispatch.single_turn import AGENT, BatchedSingleTurn, SingleTurn, grade, reward_manager_of
from goldilocks.verl.patch import Kind
from goldilocks.verl.plugin import ask_for
from goldilocks.verl.store import SavedAnswer

logger = logging.getLogger(__name__)

DRAIN_S = 300.0  # how long cancelled requests may still run: a server that cannot abort ends them itself


class Drained(NamedTuple):
    """What a worker reports at the end of a step."""

    left: int  # sessions that are still at a server
    asked: int  # requests that servers were asked to end, since the run began
    ended: int  # requests that they did end
    tokens: int  # of the requests that they ended
    rewards: dict[str, float]  # what reward functions have cost since the last call


class Snapshot(NamedTuple):
    """A worker at one moment: every session that was started has ended in an event, or is unfinished."""

    replies: int  # calls of ``events`` that returned, since the run began
    events: list[Event]  # since the last of those replies
    answers: list[SavedAnswer]  # those that unfinished sessions can go on from, if they were asked for: many tokens


class StreamingWorker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):  # type: ignore[name-defined]
    """verl's worker, which reports each session as it ends."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ask_for(Kind.REPORTS)
        self._listen(self.llm_client)
        self.single_turn = SingleTurn.of(self)

    def _listen(self, client: LLMServerClient) -> None:
        """Put our client in the place of verl's, and begin to gather events."""
        self.llm_client = StreamingClient(client)
        self._events: list[Event] = []
        self._news = asyncio.Event()
        self._replies = 0

    async def events(self) -> list[Event]:
        """Return the events since the last call; wait until there is one."""
        while not self._events:
            await self._news.wait()
            self._news.clear()
        self._replies += 1
        return self._new_events()

    async def so_far(self, with_answers: bool) -> Snapshot:
        """Return the events of this moment and, if asked, the answers, without waiting."""
        return Snapshot(self._replies, self._new_events(), await self.answers() if with_answers else [])

    def _new_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    async def cancel(self, uids: list[str]) -> None:
        """Abort what these groups have at servers."""
        self.llm_client.cancel(*uids)

    async def pause(self, within: float) -> list[Paused]:
        """Stop every session with what it has written, as far as servers do so ``within`` seconds."""
        await self.llm_client.pause(within)
        return [Paused(one.uid, one.index, one.tokens) for one in self.llm_client.unfinished]

    async def resume(self) -> None:
        """Continue every session."""
        self.llm_client.resume()

    async def answers(self) -> list[SavedAnswer]:
        """Return the answer of every unfinished session that has one. A conversation with several begins anew."""
        answered = (one for one in self.llm_client.unfinished if len(one.answers) == 1)
        return [[one.uid, one.index, one.answers[0].state_dict()] for one in answered]

    async def drained(self, within: float) -> Drained:
        """Wait until no session is at a server, at most ``within`` seconds; return what there is to report."""
        client, aborts = self.llm_client, self.llm_client.aborts
        return Drained(await client.drained(within), aborts.asked, aborts.ended, aborts.tokens, spent.read())

    async def start(self, prompts: list[dict[str, Any]]) -> None:
        """Start the sessions of these prompts and return; ``events`` reports each."""
        rollout = self.rollout_config
        params = {  # as verl's worker samples in training
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "repetition_penalty": 1.0,
            "logprobs": rollout.calculate_log_probs,
        }
        batched: list[dict[str, Any]] = []
        others: list[dict[str, Any]] = []
        for prompt in prompts:
            prompt.setdefault("agent_name", rollout.agent.default_agent_loop)
            at_once = self.single_turn is not None and prompt["agent_name"] == AGENT and not prompt.get(ANSWERS)
            (batched if at_once else others).append(prompt)  # those with saved answers go on one by one
        if batched:
            self._in_background(BatchedSingleTurn(self).run(batched, params))
        about = await get_trajectory_info(None, [prompt["index"] for prompt in others], False)
        for prompt, trajectory in zip(others, about, strict=True):
            self._in_background(self._run_prompt(prompt, params, {**trajectory, "step": prompt["global_steps"]}))

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
        indices = range(first, first + count)
        sessions = [self.llm_client.begin(prompt["uid"], index, answers.get(index)) for index in indices]
        params = [seeded(sampling_params, self.rollout_config, seed, session.index) for session in sessions]
        runs = zip(sessions, params, strict=True)
        await asyncio.gather(*(self._run_session(session, prompt, own, trajectory, trace) for session, own in runs))

    async def _run_session(self, session: Session, prompt: dict, params: dict, trajectory: dict, trace: bool) -> None:
        """Run the agent loop of a session to its end, and report a failure if that is not a rollout."""
        current_session.set(session)
        session.task = asyncio.current_task()
        try:
            try:
                await self._run_agent_loop(params, trajectory, trace=trace, session_id=session.index, **prompt)
            finally:
                session.task = None
        except Cancelled:
            self.report_failed(session, "cancelled")
        except asyncio.CancelledError as error:
            # Whether this task was asked to end. Python 3.10 does not say; there a cancellation counts as a tool's.
            asked = getattr(asyncio.current_task(), "cancelling", None)
            if self.llm_client.is_cancelled(session):
                self.report_failed(session, "cancelled")
            elif asked is not None and asked() > 0:
                raise
            else:  # a tool has raised it
                await self.report_error(session, error)
        except Exception as error:
            await self.report_error(session, error)
        finally:
            self.llm_client.end(session)

    async def _run_agent_loop(
        self, sampling_params: dict, trajectory: dict, *, agent_name: str, trace: bool = True, **kwargs: Any
    ) -> None:
        """As verl's, with a seed for each rollout."""
        if trajectory["validate"]:
            seeds, key = run_seeds(self.config), content_key(kwargs["raw_prompt"])
            seed = visit_seed(seeds, key, kwargs.get("index"), VALIDATION)
            sampling_params = seeded(sampling_params, self.rollout_config, seed, kwargs["session_id"])
        if self.rollout_config.full_determinism:
            kwargs["priority"] = request_number(kwargs)
        await super()._run_agent_loop(sampling_params, trajectory, agent_name=agent_name, trace=trace, **kwargs)

    async def _compute_score(self, outputs: list[Any], kwargs: dict[str, Any]) -> None:
        """As verl's; the default reward manager grades here, so that what its functions cost is counted here."""
        ungraded = outputs[-1].reward_score is None and self.reward_loop_worker_handles is not None
        manager = reward_manager_of(self) if ungraded else None
        if manager is not None:
            await grade(manager, outputs[-1], kwargs)
        else:
            await super()._compute_score(outputs, kwargs)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> None:
        """Have verl grade and store what the agent loop returned, and report the end of its session."""
        if self.rollout_config.full_determinism:
            kwargs.pop("priority", None)  # for the server alone
        if validate:
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            return
        outputs = output if isinstance(output, list) else [output]
        session = current_session.get()
        assert session is not None
        session.task = None  # what is graded and stored is not ended
        if self.llm_client.is_cancelled(session):
            self.report_failed(session, "cancelled")
        elif not outputs or not all(one.response_ids for one in outputs):
            self.report_failed(session, "empty_response")
        else:
            session.divide_top_log_probs(outputs)
            await super()._agent_loop_postprocess(output, validate, **kwargs)
            if outputs[-1].reward_score is None:
                self.report_failed(session, "no_reward")
            else:
                truncated = self.is_truncated(outputs[-1].response_ids)
                self.report_stored(rollout_of(session, outputs, kwargs["global_steps"], truncated, session.versions))

    def is_truncated(self, response_ids: Sequence[int]) -> bool:
        """Whether a response ended at its limit and not by itself."""
        return is_truncated(response_ids, self.rollout_config.response_length, self._ends)

    @functools.cached_property
    def _ends(self) -> frozenset[int]:
        return end_ids(self.tokenizer, self.model_config.generation_config)

    def report_stored(self, rollout: Rollout) -> None:
        """Report a rollout whose rows are in the queue."""
        succeeded()
        self._report(rollout)

    async def report_error(self, session: Session, error: BaseException) -> None:
        """Log the error, publish it to the trainer, and report the failure."""
        logger.error("rollout %s of group %s failed", session.index, session.uid, exc_info=error)
        await publish(error)
        ends = isinstance(error, RewardFailed)  # one raised remotely has a class that Ray made, with another name
        self.report_failed(session, RewardFailed.__name__ if ends else type(error).__name__)

    def report_failed(self, session: Session, reason: str) -> None:
        """Report a failure, with the tokens that the session has generated."""
        self._report(Failure(session.uid, session.index, reason, session.tokens))

    def _report(self, event: Event) -> None:
        self._events.append(event)
        self._news.set()


class StreamingManager(AgentLoopManagerTQ):
    """verl's manager over workers that report each rollout as it ends."""

    agent_loop_workers: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        ask_for(Kind.REPORTS)
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(StreamingWorker)
        self._next = 0  # the worker that is given prompts first
        self._waiting: dict[Any, int] = {}  # pending calls of ``events``, each with the number of its worker
        self._replies: Counter[int] = Counter()  # calls of ``events`` that returned, by worker
        self._drained: list[Drained] = []  # what the workers told ``drain``, for the metrics of the step
        self._rewards = RewardCosts()  # since the last ``rewards_spent``

    def _ask(self, method: str, *args: Any) -> list[Any]:
        replies: list[Any] = ray.get([getattr(worker, method).remote(*args) for worker in self.agent_loop_workers])
        return replies

    def start(self, prompts: list[dict[str, Any]]) -> None:
        """Start the sessions of these prompts, spread evenly over the workers, also if they come one by one."""
        workers = self.agent_loop_workers[self._next :] + self.agent_loop_workers[: self._next]
        size = math.ceil(len(prompts) / len(workers))
        parts = [prompts[place : place + size] for place in range(0, len(prompts), size)]
        self._next = (self._next + len(parts)) % len(workers)
        ray.get([worker.start.remote(part) for worker, part in zip(workers, parts, strict=False)])

    def events(self, within: float | None = None) -> list[Event]:
        """Return the events since the last call; wait until there is one, or ``within`` seconds have passed.

        Raises if a worker died.
        """
        for number, worker in enumerate(self.agent_loop_workers):
            if number not in self._waiting.values():
                self._waiting[worker.events.remote()] = number
        ready, _ = ray.wait(list(self._waiting), num_returns=1, timeout=within)
        more, _ = ray.wait(list(self._waiting), num_returns=len(self._waiting), timeout=0)
        return [event for reference in {*ready, *more} for event in self._reply(reference)]

    def so_far(self, *, with_answers: bool) -> tuple[list[Event], list[SavedAnswer]]:
        """Return the events since the last call and, if asked, the ``answers`` of the same moment.

        Every worker is asked once, so this returns however many events go on coming.
        """
        snapshots: list[Snapshot] = self._ask("so_far", with_answers)
        events: list[Event] = []
        for number, snapshot in enumerate(snapshots):
            if snapshot.replies > self._replies[number]:  # an older reply is still on its way
                events += self._reply(next(one for one, worker in self._waiting.items() if worker == number))
            events += snapshot.events
        return events, [saved for snapshot in snapshots for saved in snapshot.answers]

    def _reply(self, reference: Any) -> list[Event]:
        self._replies[self._waiting.pop(reference)] += 1
        events: list[Event] = ray.get(reference)
        return events

    def pause(self) -> list[Paused]:
        """Stop all generation; return what every unfinished rollout has written."""
        return [event for paused in self._ask("pause", DRAIN_S) for event in paused]

    def resume(self) -> None:
        self._ask("resume")

    def cancel(self, uids: list[str]) -> None:
        """Abort the requests of these groups, at every worker: a group may be at several."""
        if uids:
            self._ask("cancel", uids)

    def drain(self) -> None:
        """Return when no session is at a server, or after ``DRAIN_S`` with a warning.

        An engine that must be idle to be put to sleep is waited for without a limit: every answer has an end.
        """
        while True:
            self._drained = self._reports(DRAIN_S)
            left = sum(one.left for one in self._drained)
            if left:
                logger.warning("%d cancelled requests are still at the rollout servers after %g s", left, DRAIN_S)
            if not left or self.rollout_config.name not in IDLE_TO_SLEEP:
                return

    def metrics(self) -> dict[str, float]:
        """Return the aborts since the run began, and the requests that ``drain`` has left at servers."""
        drained, self._drained = self._drained, []
        reports: list[Drained] = drained or self._reports(0.0)
        return {
            "aborts/asked": sum(one.asked for one in reports),
            "aborts/ended": sum(one.ended for one in reports),
            "aborts/tokens": sum(one.tokens for one in reports),
            "aborts/left": sum(one.left for one in drained),
        }

    def rewards_spent(self) -> dict[str, float]:
        """Return what reward functions have cost since the last call, as far as the workers have reported it."""
        return self._rewards.read()

    def _reports(self, within: float) -> list[Drained]:
        reports: list[Drained] = self._ask("drained", within)
        for one in reports:
            self._rewards.add(**one.rewards)
        return reports
