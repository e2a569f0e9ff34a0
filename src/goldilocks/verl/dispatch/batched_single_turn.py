"""Single-turn rollouts that are started together: one message to each server, one put of those that end together."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Protocol

from verl.trainer.ppo.v1 import agent_loop_tq

from goldilocks.drive.stopwatch import Stopwatch
from goldilocks.types import Rollout
from goldilocks.verl.dispatch.client import StreamingClient
from goldilocks.verl.dispatch.failures import publish
from goldilocks.verl.dispatch.rollout_event import rollout_of
from goldilocks.verl.dispatch.sampling_seed import seeded
from goldilocks.verl.dispatch.session import Cancelled, Reply, Session, Turn
from goldilocks.verl.dispatch.single_turn import Output, SingleTurn, rows
from goldilocks.verl.store.rows import ANSWERS, FIRST, PARTITION, ROLLOUTS, VISIT_SEED

logger = logging.getLogger(__name__)

Row = dict[str, Any]


class Worker(Protocol):
    """The worker that a wave belongs to, and tells of each session."""

    llm_client: StreamingClient
    rollout_config: Any
    single_turn: SingleTurn
    watch: Stopwatch

    def tell_stored(self, rollout: Rollout) -> None: ...
    def tell_failed(self, session: Session, reason: str) -> None: ...


class Wave:
    """Invariant: every session is told of once, as a rollout that is stored or as a failure."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._client, self._loop = worker, worker.llm_client, worker.single_turn
        self._open: dict[Session, Row] = {}  # the sessions that were not told of yet, and what their rows begin with
        self._finishing: set[asyncio.Task[None]] = set()
        self._started = time.perf_counter()

    async def run(self, prompts: list[Row], sampling_params: dict[str, Any]) -> None:
        """Return when all sessions were told of."""
        try:
            with self._worker.watch.timed("render"):
                turns = [turn for prompt in prompts for turn in await self._turns(prompt, sampling_params)]
            await self._client.ask(turns, self._answered)
            while self._finishing:
                await asyncio.gather(*self._finishing)
        except Exception as error:  # whatever it was, nobody waits for a session that is forgotten
            await self._lose(list(self._open), error)

    async def _turns(self, prompt: Row, sampling_params: dict[str, Any]) -> list[Turn]:
        sessions, seed = self._begin(prompt)
        try:
            ids = self._loop.prompt_ids(prompt["raw_prompt"])
        except Exception as error:
            await self._lose(sessions, error)
            return []
        rollout = self._worker.rollout_config
        return [Turn(one, ids, seeded(sampling_params, rollout, seed, one.index)) for one in sessions]

    def _begin(self, prompt: Row) -> tuple[list[Session], int]:
        about = {name: int(prompt[name]) for name in (ROLLOUTS, FIRST, VISIT_SEED)}
        fields = {name: value for name, value in prompt.items() if name not in {*about, ANSWERS, "agent_name"}}
        first = about[FIRST]
        sessions = [self._client.begin(prompt["uid"], index) for index in range(first, first + about[ROLLOUTS])]
        self._open |= {session: {**fields, "session_id": session.index} for session in sessions}
        return sessions, about[VISIT_SEED]

    def _answered(self, replies: list[Reply]) -> None:
        task = asyncio.create_task(self._finish(replies))
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _finish(self, replies: list[Reply]) -> None:
        try:
            outputs = await self._outputs(replies)
            with self._worker.watch.timed("grade"):
                graded = await self._graded(outputs)
            with self._worker.watch.timed("store"):
                await self._store(graded)
        except Exception as error:
            await self._lose([one.turn.session for one in replies if one.turn.session in self._open], error)

    async def _outputs(self, replies: list[Reply]) -> dict[Session, Output]:
        seconds, outputs = time.perf_counter() - self._started, {}
        for reply in replies:
            session, outcome = reply.turn.session, reply.outcome
            if isinstance(outcome, Cancelled) or self._client.is_cancelled(session):
                self._fail(session, "cancelled")
            elif isinstance(outcome, BaseException):
                await self._lose([session], outcome)
            elif outcome.stop_reason == "aborted":  # by somebody else: it is not the answer
                self._fail(session, "aborted")
            elif not outcome.token_ids:
                self._fail(session, "empty_response")
            else:
                outputs[session] = self._loop.output(reply, seconds)
        return outputs

    async def _graded(self, outputs: dict[Session, Output]) -> dict[Session, Output]:
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
        if not outputs:
            return
        limit = self._worker.rollout_config.response_length
        told = [
            rollout_of(session, [output], self._open[session]["global_steps"], limit, output.versions)
            for session, output in outputs.items()
        ]
        keys, tags = zip(*(rollout.payload[0] for rollout in told), strict=True)
        fields = rows(list(outputs.values()), [self._open[session] for session in outputs])
        await agent_loop_tq.tq.async_kv_batch_put(
            keys=list(keys), fields=fields, tags=list(tags), partition_id=PARTITION
        )
        for session, rollout in zip(outputs, told, strict=True):
            self._worker.tell_stored(rollout)
            self._end(session)

    async def _lose(self, sessions: list[Session], error: BaseException) -> None:
        for session in sessions:
            logger.error("rollout %s of group %s failed", session.index, session.uid, exc_info=error)
            await publish(error)
            self._fail(session, type(error).__name__)

    def _fail(self, session: Session, reason: str) -> None:
        self._worker.tell_failed(session, reason)
        self._end(session)

    def _end(self, session: Session) -> None:
        del self._open[session]
        self._client.end(session)
