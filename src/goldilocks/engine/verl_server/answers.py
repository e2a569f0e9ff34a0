"""Many requests in one message to a rollout server, and the messages by which their answers come back."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

Requests = list[tuple[str, list[int], dict[str, Any]]]  # names, prompts, sampling parameters
Outcome = tuple[str, Any]  # the name of a request, and its answer or the exception that it ended with


class Answers(NamedTuple):
    """The outcomes since the last message."""

    outcomes: list[Outcome]
    global_steps: int | None = None  # the policy update that the weights belong to, where answers do not say so
    busy_s: float | None = None  # seconds that the engine has spent on its steps, since it was built; None: unknown


class Unanswered:
    """Answers that are being made, as tasks of the running event loop. One that fails, fails alone."""

    def __init__(self, asked: Mapping[str, Coroutine[Any, Any, Any]]) -> None:
        self.left = len(asked)  # outcomes that ``more`` has not returned
        self._outcomes: list[Outcome] = []
        self._came = asyncio.Event()
        self._tasks = {asyncio.create_task(self._note(name, answer)) for name, answer in asked.items()}

    async def more(self) -> list[Outcome]:
        """Wait for an outcome; return all that have come since the last call."""
        await self._came.wait()
        self._came.clear()
        outcomes, self._outcomes = self._outcomes, []
        self.left -= len(outcomes)
        return outcomes

    async def _note(self, name: str, answer: Coroutine[Any, Any, Any]) -> None:
        try:
            outcome = await answer
        except Exception as error:
            outcome = error
        except asyncio.CancelledError as error:  # as itself it would look like the client's own cancellation
            outcome = RuntimeError(f"the server cancelled the request: {error!r}").with_traceback(error.__traceback__)
        self._outcomes.append((name, outcome))
        self._came.set()


class ManyAnswers:
    """The methods of a server that has verl's ``generate``.

    Generation waits for the Python of the server's process, and a Ray call for each answer is a large part of it.
    """

    if TYPE_CHECKING:
        generate: Callable[..., Coroutine[Any, Any, Any]]

    async def generate_all(self, batch: str, requests: Requests) -> Answers:
        """Generate many answers for one message. Returns the first; ``more_answers`` of the same batch has the others.

        ``generate`` changes the parameters that it is given, and requests of one message may share them.
        """
        asked = {
            name: self.generate(prompt_ids=list(prompt), sampling_params=dict(params), request_id=name)
            for name, prompt, params in requests
        }
        _batches(self)[batch] = Unanswered(asked)
        return await self.more_answers(batch)

    async def more_answers(self, batch: str) -> Answers:
        """Wait for answers of a batch that has some left, and return all that have come."""
        answers = _batches(self)[batch]
        outcomes = await answers.more()
        if not answers.left:
            del _batches(self)[batch]
        return Answers([(name, Packed.of(outcome)) for name, outcome in outcomes])


def add_to_vllm() -> None:
    """Add the methods to verl's vLLM server. A request is made by the server's own ``generate``, on its event loop."""
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    for name in ("generate_all", "more_answers"):
        setattr(vLLMHttpServer, name, getattr(ManyAnswers, name))


def _batches(server: Any) -> dict[str, Unanswered]:
    batches: dict[str, Unanswered] = vars(server).setdefault("goldilocks_batches", {})
    return batches


class ServerTraceback(Exception):
    """Where an exception was raised in a server: the cause of the exception that the client gets.

    Pickle drops tracebacks; a cause is printed by every Python, notes are printed since 3.11.
    """

    def __init__(self, text: str, place: str) -> None:
        super().__init__(text, place)
        self.text, self.place = text, place

    def __str__(self) -> str:
        return f"\n{self.text}"


class Packed(NamedTuple):
    """An outcome that is pickled by itself: within a message, one that cannot be pickled would lose all others."""

    pickled: bytes

    @classmethod
    def of(cls, outcome: Any) -> Packed:
        from ray import cloudpickle

        try:
            return cls(cloudpickle.dumps(_sendable(outcome) if isinstance(outcome, Exception) else (outcome, None)))
        except Exception as error:
            return cls.of(RuntimeError(f"the answer cannot be sent: {error}").with_traceback(error.__traceback__))

    def outcome(self) -> Any:
        """Return the answer, or the exception with the server's traceback as its cause."""
        from ray import cloudpickle

        outcome, cause = cloudpickle.loads(self.pickled)
        if cause is not None:
            outcome.__cause__ = cause
        return outcome


def _sendable(error: Exception) -> tuple[Exception, ServerTraceback]:
    """The exception, or where it would not survive pickling one that names it, and where it was raised."""
    from ray import cloudpickle

    raised = ServerTraceback("".join(traceback.format_exception(error)), place(error))
    try:
        return cloudpickle.loads(cloudpickle.dumps(error)), raised
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}"), raised


def place(error: BaseException) -> str:
    """The file and line where the exception was raised, in a server if it came from one; empty if unknown."""
    if isinstance(error.__cause__, ServerTraceback):
        return error.__cause__.place
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
