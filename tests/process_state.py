"""The state of the process that a test may change without wanting to, taken before a test and put back after it.

Two leaks that are not ours made results depend on what ran before: torch switches oneDNN off for the whole process when
it meets a bfloat16 product on a CPU without bfloat16, which changes the last digits of every later product; and
transformers leaves the mixed precision of one trainer in the environment, where the next trainer finds it. Reward
functions count their calls for the process until some driver reads the counts, which may be that of another test.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class State(NamedTuple):
    """One piece of state: how to read it, and how to set it to what was read."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


def _set_environment(saved: dict[str, str]) -> None:
    for name in os.environ.keys() - saved.keys():
        del os.environ[name]
    os.environ.update(saved)


PLAIN = (
    State(lambda: dict(os.environ), _set_environment),
    State(os.getcwd, os.chdir),
    State(lambda: signal.getsignal(signal.SIGINT), lambda saved: signal.signal(signal.SIGINT, saved)),
    State(lambda: signal.getsignal(signal.SIGTERM), lambda saved: signal.signal(signal.SIGTERM, saved)),
    State(lambda: list(sys.path), lambda saved: sys.path.__setitem__(slice(None), saved)),
)


def of_torch() -> tuple[State, ...]:
    """Return torch's switches, where torch is loaded: no test loads torch for this."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "set_num_threads"):
        return ()
    switches = torch._C
    return (
        State(switches._get_mkldnn_enabled, switches._set_mkldnn_enabled),
        State(torch.get_default_dtype, torch.set_default_dtype),
        State(torch.get_num_threads, torch.set_num_threads),
        State(torch.is_grad_enabled, torch.set_grad_enabled),
        State(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        State(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    )


def of_rewards() -> tuple[State, ...]:
    """Return the calls of reward functions that nobody has read, where the functions' module is loaded."""

    def read() -> dict[str, Any]:
        calls = sys.modules.get("goldilocks.rewards.calls")
        return dict(calls.spent) if calls else {}

    def write(saved: dict[str, Any]) -> None:
        spent = sys.modules["goldilocks.rewards.calls"].spent
        spent.clear()
        spent.update(saved)

    return (State(read, write),)


def restorer() -> Callable[[], None]:
    """Take the state now; the function that is returned puts back what differs."""
    taken = [(state, state.read()) for state in (*PLAIN, *of_torch(), *of_rewards())]

    def restore() -> None:
        for state, saved in taken:
            if state.read() != saved:
                state.write(saved)

    return restore
