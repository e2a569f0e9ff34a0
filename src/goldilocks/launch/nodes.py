"""One line of ``goldilocks doctor``.

What ``goldilocks doctor`` says of each node of a Ray: its packages against most nodes', plug-in, shared folders.

Names the nodes that a run has lost. The first to fail is often another node's process, which knows only its socket.

Ray takes a while to call a node dead (five health checks in a row), so after a broken connection it is waited for. Only
nodes that were there when the run began count: a Ray that has been up for long has lost others before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """``remedy`` is what to do when it is not ok; only essential findings fail the command."""

    what: str
    ok: bool
    detail: str
    remedy: str = ""
    essential: bool = True

    def __str__(self) -> str:
        """``ok    what       detail``, with the remedy on a second line if the check failed."""
        word = "ok" if self.ok else "FAILS" if self.essential else "note"
        text = f"{word:<6}{self.what:<16}{self.detail}"
        return text if self.ok or not self.remedy else f"{text}\n{'':<22}→ {self.remedy}"


REMEDY = "install the same packages in the same place on every node, and give --runs a folder that all of them see"


def compare(reports: Sequence[Mapping[str, Any]], files: Mapping[str, str]) -> Iterator[Finding]:
    """Compare every node's packages with what most nodes have. ``files`` all nodes should see, each with its folder."""
    usual = _usual([report["versions"] for report in reports if "versions" in report])
    for report in reports:
        faults = [str(report["error"])] if "error" in report else [*_faults(report, usual, files)]
        what = f"node {report['address']}"
        if faults:
            yield Finding(what, False, "; ".join(faults), REMEDY)
        else:
            folders = f", sees {len(files)} shared folders" if files else ""
            yield Finding(what, True, f"same packages, plug-in live with {len(report['additions'])} additions{folders}")


def _usual(versions: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    """The versions that most nodes have; where it is a draw, the node that was asked first."""
    return max(versions, key=versions.count, default={})


def _faults(report: Mapping[str, Any], usual: Mapping[str, str], files: Mapping[str, str]) -> Iterator[str]:
    yield from _other_versions(report["versions"], usual)
    if not report["additions"]:
        yield "verl there did not load the plug-in"
    for path, folder in files.items():
        if path not in report["sees"]:
            yield f"does not see {folder}"


def _other_versions(versions: Mapping[str, str], usual: Mapping[str, str]) -> Iterator[str]:
    for name in {**usual, **versions}:
        if versions.get(name) != usual.get(name):
            yield f"{name} {versions.get(name, 'missing')}, on other nodes {usual.get(name, 'missing')}"


NOTICE_S = 90.0  # a machine that lost power answers nothing: five checks that each run out of time
POLL_S = 1.0
# What processes say that have lost another one: those that talk without Ray, and those that quote its errors.
BROKEN = ("connect", "gloo", "nccl", "socket", "unavailable", "died")


class NodeLost(Exception):
    """Says which node died, for the user, and then what that broke."""


@contextmanager
def naming_lost_nodes(runner: Any) -> Iterator[WatchedRunner]:
    """``with naming_lost_nodes(runner) as watched``: what fails because a node died says which."""
    from goldilocks.verl.dispatch.failures import reason

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
