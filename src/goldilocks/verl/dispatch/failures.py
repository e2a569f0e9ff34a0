"""Reports a failure in one of verl's processes to the user: the run ends, and its last line says why.

verl's V1 trainer hands prompts to agent-loop workers without waiting and then polls a table of their states. An error
there is written only to a worker's log, and a worker that dies leaves its prompts "running" for ever. Here the worker
publishes its first error since its last success in that table, with the time, and the trainer checks its workers while
it waits.
"""

from __future__ import annotations

import logging
import os
import platform
import time
import weakref
from functools import wraps
from typing import Any

from goldilocks.engine.verl_server.messages import place
from goldilocks.rewards import RewardFailed
from goldilocks.verl.patch import Function, around

logger = logging.getLogger(__name__)

# A partition of the TransferQueue without rows: a key for each process, tagged with reason and time.
FAILURES = "failures"
ENDS = "ends"  # the tag of an error after which the run must not go on, though other rollouts succeeded

# The managers of this process's agent-loop workers, and for each worker a call that it has not answered yet.
_managers: weakref.WeakSet[Any] = weakref.WeakSet()
_unanswered: dict[Any, Any] = {}

_published = False  # whether this process has published an error since its last success


@around
async def publish_first_error(original: Function, tasks: list[Any]) -> list[BaseException]:
    """Wraps verl's ``_settle_session_tasks``, which returns the errors of one prompt's rollouts."""
    errors: list[BaseException] = await original(tasks)
    if errors:
        await publish(next((one for one in errors if isinstance(one, RewardFailed)), errors[0]))
    else:
        succeeded()
    return errors


async def publish(error: BaseException) -> None:
    """Put the reason into the table that the trainer polls, unless an earlier error of this process is there.

    An error that ends the run replaces an earlier one.
    """
    global _published
    ends = isinstance(error, RewardFailed)
    if _published and not ends:
        return
    _published = True
    import transfer_queue

    tag = {"reason": reason(error), "at": time.time(), ENDS: ends}
    try:
        await transfer_queue.async_kv_put(key=f"{platform.node()}/{os.getpid()}", partition_id=FAILURES, tag=tag)
    except Exception:  # the rollout's own error is what the caller goes on with
        _published = False
        logger.exception("the trainer could not be told of the error of a rollout: %s", tag["reason"])


def succeeded() -> None:
    """Note a success, so that the next error of this process is published."""
    global _published
    _published = False


def name_first_error(original: Function) -> Function:
    """Wraps ``ReplayBuffer.sample``: where no rollout of a batch succeeded, the run ends with the reason.

    verl raises without the reason in training, and goes on with an empty batch in validation. A reward that must not
    fail (``goldilocks.rewards.on_failure=error``) ends the run whatever became of the other rollouts.
    """
    last = 0.0  # when a batch came

    @wraps(original)
    def sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal last
        try:
            batch, metrics = original(self, *args, **kwargs)
        except RuntimeError as error:
            said = published_error(last)
            if "no materializable trajectories" not in str(error) or said is None:
                raise
            raise RuntimeError(f"no rollout succeeded; the first to fail said: {said}") from error
        for tag in _tags():
            if tag[ENDS]:
                raise RuntimeError(f"goldilocks.rewards.on_failure=error: {tag['reason']}")
        if not batch.keys:
            said = published_error(last) or "nothing: its worker's log has the reason"
            raise RuntimeError(f"no rollout succeeded; the first to fail said: {said}")
        last = time.time()
        return batch, metrics

    return sample


@around
def remember_workers(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps ``AgentLoopManagerTQ.generate_sequences``: from then on the manager's workers are checked."""
    _managers.add(self)
    return original(self, *args, **kwargs)


@around
def look_after_workers(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps ``ReplayBuffer._wait_for_next_poll``: a dead worker is an error at the next poll."""
    check_workers()
    return original(self, *args, **kwargs)


def check_workers() -> None:
    """If an agent-loop worker of this process's managers is dead, raise Ray's error, which says how it died.

    Every worker has one unanswered call at any time. A busy worker answers late; a dead one fails the call at once.
    """
    import ray

    for worker in [worker for manager in _managers for worker in manager.agent_loop_workers]:
        call = _unanswered.pop(worker, None) or worker.__ray_ready__.remote()
        if ray.wait([call], timeout=0)[0]:
            ray.get(call)
        else:
            _unanswered[worker] = call


def published_error(since: float = 0.0) -> str | None:
    """The reason of the first failure after the time ``since``; without one, of the first failure of all."""
    first = min(_tags(), key=lambda tag: (tag["at"] < since, tag["at"]), default=None)
    return None if first is None else first["reason"]


def _tags() -> list[dict[str, Any]]:
    import transfer_queue

    return list((transfer_queue.kv_list() or {}).get(FAILURES, {}).values())


def reason(error: BaseException) -> str:
    """An error in one line: what was raised and where. Of Ray's wrapper of a remote error, the error inside."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return reason(cause)
    where = place(error)
    return f"{type(error).__name__}: {error}" + (f" ({where})" if where else "")
