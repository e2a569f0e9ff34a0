"""What is taken for granted of verl, the TransferQueue and TRL. A release that changes one of these fails here.

Where a digest fails, read the new source and mend what was written for the old one. Where a signature fails, mend the
stand-in of the tests and what calls it.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transfer_queue
from unit.verl.v0.v0_world import Engine, Workers
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.rollout.llm_server import LLMServerClient
from verl_world import Queue, Server, Worker

from goldilocks.engine.verl_server.server import RolloutServer
from goldilocks.hashing import Sources, digest, is_known
from goldilocks.verl import plugin
from goldilocks.verl.dispatch.single_turn import FOLLOWED, RUN_SINGLE
from goldilocks.verl.patch import Patch
from goldilocks.verl.patches import PATCHES

plugin.additions()

# -- the stand-ins of the tests ----------------------------------------------------------------------------------------

STAND_INS: list[tuple[Any, Any]] = [
    (Server, RolloutServer),
    (Queue, transfer_queue),
    (Engine, AgentLoopManager),
    (Workers, (ActorRolloutRefWorker, TrainingWorker)),
]


ASSIGNED = re.compile(r"self\.(\w+)(?:: [^=\n]+)? = ")


def methods() -> list[Any]:
    """Return each method of a stand-in beside each real one of that name."""
    found = []
    for stand_in, real in STAND_INS:
        for name in stand_in.STANDS_FOR:
            kinds = [kind for kind in (real if isinstance(real, tuple) else (real,)) if hasattr(kind, name)]
            assert kinds, f"{stand_in.__name__}.{name} stands for nothing"
            found += [pytest.param(stand_in, kind, name, id=f"{kind.__name__}.{name}") for kind in kinds]
    return found


def parameters(function: Any) -> list[tuple[str, Any]]:
    """Return names and defaults, without ``self`` and without a last ``**rest``."""
    known = inspect.signature(inspect.unwrap(function)).parameters.values()
    kept = [one for one in known if one.name != "self" and one.kind is not inspect.Parameter.VAR_KEYWORD]
    return [(one.name, one.default) for one in kept]


@pytest.mark.parametrize(("stand_in", "real", "name"), methods())
def test_a_stand_in_is_called_as_what_it_stands_for(stand_in: Any, real: Any, name: str) -> None:
    """A stand-in whose method ends in ``**_`` may leave out the last parameters of the real one."""
    method = getattr(stand_in, name)
    ours, theirs = parameters(method), parameters(getattr(real, name))
    assert ours == (theirs if inspect.getfullargspec(method).varkw is None else theirs[: len(ours)])


@pytest.mark.parametrize(
    ("module", "server"),
    [
        ("vllm_rollout/vllm_async_server.py", "vLLMHttpServer"),
        ("sglang_rollout/async_sglang_server.py", "SGLangHttpServer"),
    ],
)
def test_verls_servers_are_asked_as_ours_is(module: str, server: str) -> None:
    """Their modules import engines that are not installed here, so that this reads their sources."""
    source = Path(importlib.util.find_spec("verl.workers.rollout").origin).parent / module  # type: ignore[union-attr, arg-type]
    (kind,) = [node for node in ast.parse(source.read_text()).body if getattr(node, "name", None) == server]
    (generate,) = [node for node in kind.body if getattr(node, "name", None) == "generate"]
    ours = [name for name, _ in parameters(Server.generate)]
    assert [argument.arg for argument in generate.args.args][1 : 1 + len(ours)] == ours


async def test_the_worker_of_the_tests_has_what_verls_constructor_sets() -> None:
    kinds = (AgentLoopWorker, AgentLoopWorkerTQ.__ray_metadata__.modified_class)
    assigned = {name for kind in kinds for name in ASSIGNED.findall(inspect.getsource(kind.__init__))}
    assert assigned - set(vars(Worker(whole=False))) == set(Worker.LEFT_OUT)


# -- sources that code of ours was written for -------------------------------------------------------------------------

SOURCES: list[tuple[Callable[..., Any], Sources]] = [
    (AgentLoopWorker._run_agent_loop, "32c3d607c5d4c9fa"),  # calls what StreamingWorker overrides
    (AgentLoopWorker._compute_score, "cf4b57719ad3c1b2"),
    (LLMServerClient.generate, ("45f4cf4029f0be37", "f3cbc4911ea2e439")),  # calls what StreamingClient overrides
    (LLMServerClient._acquire_server, ("4afa9eaba4c5c436", "79999f62e95044f9")),
    (LLMServerClient._release_server, ("a06a7f1ee3567499", "9ccd4fb618a6ca76")),
    (NaiveRewardManager.run_single, RUN_SINGLE),  # written again where rollouts are graded
    *FOLLOWED,  # where rollouts are made many at a time
]


@pytest.mark.parametrize(("function", "known"), SOURCES, ids=lambda value: getattr(value, "__qualname__", ""))
def test_the_source_is_one_that_ours_was_written_for(function: Callable[..., Any], known: Sources) -> None:
    assert is_known(function, known), digest(function)


WRITTEN_FOR = [(patch, *source) for patch in PATCHES for source in patch.written_for.items()]


@pytest.mark.parametrize(("patch", "path", "known"), WRITTEN_FOR, ids=lambda value: getattr(value, "name", None))
def test_verl_still_has_the_function_the_patch_was_written_for(patch: Patch, path: str, known: Sources) -> None:
    if patch.needs and not patch.possible:
        pytest.skip(f"{patch.needs} is not installed")
    function = functools.reduce(getattr, path.split("."), importlib.import_module(patch.module))
    assert is_known(function, known), digest(function)


def test_the_installed_trl_is_one_that_ours_was_written_for() -> None:
    pytest.importorskip("trl")
    algorithms = importlib.import_module("goldilocks.trl.algorithms")
    known = (*algorithms.GoldilocksGRPOTrainer.written_for, *algorithms.GoldilocksRLOOTrainer.written_for)
    assert [function for function, sources in known if not is_known(function, sources)] == []


def test_the_installed_asynchronous_trainer_is_the_one_that_ours_was_written_for() -> None:
    pytest.importorskip("trl.experimental.async_grpo", exc_type=ImportError)
    known = importlib.import_module("goldilocks.trl.async_trainer").WRITTEN_FOR
    assert [function for function, sources in known if not is_known(function, sources)] == []
