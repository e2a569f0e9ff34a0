"""An actor whose class only the actor imports: it is what it would have been, and a handle imports nothing."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from pathlib import Path

import pytest
from ray import cloudpickle

from goldilocks.verl.serve.light_handle import imported_by_its_actor

SERVER = """
class Server:
    def __init__(self, start, *, step):
        self.value, self.step = start, step

    def add(self, times=1):
        self.value += times * self.step
        return self.value

    async def later(self, *, times):
        return self.add(times)
"""


@pytest.fixture
def pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The class, pickled where its module was imported; here it is not."""
    (tmp_path / "heavy_server.py").write_text(SERVER)
    monkeypatch.syspath_prepend(tmp_path)
    light = cloudpickle.dumps(imported_by_its_actor(importlib.import_module("heavy_server").Server))
    del sys.modules["heavy_server"]
    return light


def test_a_handle_knows_the_methods_and_which_are_coroutines_and_imports_nothing(pickled: bytes) -> None:
    light = cloudpickle.loads(pickled)
    found = {
        name: inspect.iscoroutinefunction(method) for name, method in inspect.getmembers(light, inspect.isfunction)
    }
    assert found == {"__init__": False, "add": False, "later": True}
    assert light.__name__ == "Server"
    assert "heavy_server" not in sys.modules


def test_the_actor_is_an_instance_of_the_class_and_ray_may_call_either_ones_methods(pickled: bytes) -> None:
    light = cloudpickle.loads(pickled)
    actor = light(10, step=2)
    assert type(actor) is sys.modules["heavy_server"].Server
    assert light.add(actor, 2) == 14
    assert asyncio.run(light.later(actor, times=3)) == 20
    assert actor.value == 20
