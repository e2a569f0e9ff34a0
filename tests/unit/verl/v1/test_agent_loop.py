"""What our agent-loop worker takes for granted of verl's; where one fails, read the new source and mend ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.rollout.llm_server import LLMServerClient

from goldilocks.verl.patches.patch import digest


@pytest.mark.parametrize(
    ("function", "source"),
    [
        (AgentLoopWorker._run_agent_loop, "32c3d607c5d4c9fa"),  # written again in StreamingWorker
        (AgentLoopWorkerTQ.__ray_metadata__.modified_class._agent_loop_postprocess, "523edacbff73640d"),  # gather_puts
        (LLMServerClient.generate, "45f4cf4029f0be37"),  # the Balancer and the RequestLog stand in its way
        (LLMServerClient._acquire_server, "4afa9eaba4c5c436"),
        (LLMServerClient._release_server, "a06a7f1ee3567499"),
    ],
)
def test_verl_is_as_our_worker_was_written_for(function: Callable[..., Any], source: str) -> None:
    assert digest(function) == source


def test_verls_worker_packs_and_puts_by_the_names_that_are_replaced() -> None:
    assert agent_loop_tq.list_of_dict_to_tensordict is list_of_dict_to_tensordict
    assert callable(agent_loop_tq.tq.async_kv_batch_put)
