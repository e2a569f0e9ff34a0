"""verl's vLLM server as an actor whose class only the actor's own process imports.

Ray unpickles the class of an actor in every process that has a handle of it, for the names of its methods. For this
server that is an import of vLLM, 3 to 6 CPU seconds, in processes that only send requests.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any


def register() -> None:
    """Have verl make its vLLM servers so."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register("vllm", replica)


@functools.cache
def replica() -> Any:
    """Return verl's replica of vLLM, with light handles of its servers."""
    import ray
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

    class Replica(vLLMReplica):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if getattr(self.server_class, "__ray_actor_class__", None) is vLLMHttpServer:  # else a verl chose another
                self.server_class = ray.remote(imported_by_its_actor(vLLMHttpServer))

    return functools.update_wrapper(Replica, vLLMReplica, updated=())


def imported_by_its_actor(real: type) -> type:
    """Return a class with the methods of ``real``, whose instance becomes one of ``real``.

    It is in no module, so that it is pickled with all that it has.
    """
    module, name = real.__module__, real.__name__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__class__ = getattr(importlib.import_module(module), name)
        self.__init__(*args, **kwargs)

    methods = {one: _method(one, function) for one, function in inspect.getmembers(real, inspect.isfunction)}
    return type(name, (), {**methods, "__init__": __init__})


def _method(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that calls the one of this name; Ray has to know which ones are coroutines."""

    async def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self, name)(*args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, name)(*args, **kwargs)

    return wait if inspect.iscoroutinefunction(function) else call
