"""Adds to verl's vLLM server the two methods by which our server takes many requests in one message.

Generation waits for the Python of the server's process, and a Ray call for each answer is a large part of it. A request
is made by the server's own ``generate``, on the event loop of its engine, so its answer is the one of a call by itself.
"""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

from goldilocks.engine.verl_server.answers import ManyAnswers

for _name in ("generate_all", "more_answers"):
    setattr(vLLMHttpServer, _name, getattr(ManyAnswers, _name))
