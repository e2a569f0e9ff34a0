"""Ends a process of vLLM once its parent has ended, however that was.

vLLM's engine runs in a process that waits for requests of its parent, the rollout server. vLLM ends the engine when the
server ends by itself. After ``kill -9``, or by the kernel for want of memory, nobody tells the engine, which waits for
ever with the GPU's memory. So a thread looks after the parent, in each process that ``multiprocessing`` started.

The kernel's signal at a parent's death (``PR_SET_PDEATHSIG``) will not do: it comes when the *thread* ends that started
the process, and an engine may be started by a thread that ends.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection  # ``is_alive`` imports it, where the main thread may have imported half of it
import multiprocessing.util
import os
import signal
import threading
import time

LOOK_S = 1.0
GRACE_S = 10.0  # for an engine to end its workers and to remove its shared memory


def end_orphans() -> None:
    """Have this process end with its parent if ``multiprocessing`` started it, and those that it forks."""
    end_with_parent()
    multiprocessing.util.register_after_fork(end_orphans, lambda _: end_with_parent())


def end_with_parent() -> None:
    """Have this process end with its parent, if ``multiprocessing`` started it."""
    if multiprocessing.parent_process() is not None:
        threading.Thread(target=_end_after_parent, name="end-with-parent", daemon=True).start()


def _end_after_parent() -> None:
    parent, adopted_by = multiprocessing.parent_process(), os.getppid()
    assert parent is not None
    # The first says so even if the parent had ended before we looked, unless a sibling that was forked holds its pipe.
    while parent.is_alive() and os.getppid() == adopted_by:
        parent.join(LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
