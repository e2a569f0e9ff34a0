"""Names the nodes that a run has lost. The first to fail is often another node's process, which knows only its socket.

Ray takes a while to call a node dead (five health checks in a row), so after a broken connection it is waited for. Only
nodes that were there when the run began count: a Ray that has been up for long has lost others before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NOTICE_S = 90.0  # a machine that lost power answers nothing: five checks that each run out of time
POLL_S = 1.0
# What processes say that have lost another one: those that talk without Ray, and those that quote its errors.
BROKEN = ("connect", "gloo", "nccl", "socket", "unavailable", "died")


class NodeLost(Exception):
    """Says which node died, for the user, and then what that broke."""


@contextmanager
def naming_lost_nodes(runner: Any) -> Iterator[WatchedRunner]:
    """``with naming_lost_nodes(runner) as watched``: what fails because a node died says which."""
    from goldilocks.verl.failures import reason

    watched = WatchedRunner(runner)
    try:
        yield watched
    except Exception as error:
        if lost := watched.lost(error):
            raise NodeLost(f"node {' and '.join(lost)} died: {reason(error)}") from error
        raise


class WatchedRunner:
    """verl's task runner, which verl starts once it is connected to Ray; ``lost`` is asked when the run has failed."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._nodes: dict[str, str] = {}  # addresses, by id

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """As that of the task runner."""
        self._nodes = {name: address for name, (address, alive) in _nodes().items() if alive}
        return self._runner.remote(*args, **kwargs)

    def options(self, **options: Any) -> WatchedRunner:
        """As that of the task runner."""
        self._runner = self._runner.options(**options)
        return self

    def lost(self, error: BaseException) -> list[str]:
        """The addresses of the nodes that have died; a run on one node has none to lose."""
        if len(self._nodes) < 2:
            return []
        deadline = time.monotonic() + (NOTICE_S if is_broken(error) else 0.0)
        while not (lost := self._dead()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return lost

    def _dead(self) -> list[str]:
        now = _nodes()
        return sorted(address for name, address in self._nodes.items() if name not in now or not now[name][1])


def is_broken(error: BaseException) -> bool:
    """Whether the death of a process elsewhere may be the cause: Ray's own errors, and broken connections."""
    from ray.exceptions import RayError

    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return is_broken(cause)
    return isinstance(error, RayError) or any(word in str(error).lower() for word in BROKEN)


def _nodes() -> dict[str, tuple[str, bool]]:
    """The address of every node that this Ray has ever had, and whether it is alive."""
    import ray

    if not ray.is_initialized():
        return {}
    return {node["NodeID"]: (node["NodeManagerAddress"], node["Alive"]) for node in ray.nodes()}
