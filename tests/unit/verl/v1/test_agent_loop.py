"""What our agent-loop worker takes for granted of verl's; where one fails, read the new source and mend ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.workers.rollout.llm_server import LLMServerClient

from goldilocks.verl.patches.patch import digest


@pytest.mark.parametrize(
    ("function", "source"),
    [
        (AgentLoopWorker._run_agent_loop, "32c3d607c5d4c9fa"),  # written again in StreamingWorker
        (LLMServerClient.generate, "45f4cf4029f0be37"),  # calls the methods that StreamingClient overrides
        (LLMServerClient._acquire_server, "4afa9eaba4c5c436"),
        (LLMServerClient._release_server, "a06a7f1ee3567499"),
    ],
)
def test_verl_is_as_our_worker_was_written_for(function: Callable[..., Any], source: str) -> None:
    assert digest(function) == source
