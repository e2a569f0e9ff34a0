"""Only the actors of vLLM's servers import vLLM, and they do it while the workers make their models.

An import of vLLM takes 6 CPU seconds, and a start of verl has one in each of several processes, one after another: in
the task runner and the training worker for names that they do not use, in the server for its engine, and wherever there
is a handle of the server, since Ray unpickles an actor's class for the names of its methods.

Here the task runner reads verl's replica from its source, without the imports of vLLM. The server's actor is of a class
that has the names of the server's methods; it imports vLLM and becomes verl's server. ``begin`` starts these actors
with the task runner. Nothing but the import is early: an engine on a GPU measures how much memory is free, and must not
do so beside a worker that makes its model.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from omegaconf import OmegaConf

from goldilocks.hashing import digest_of
from goldilocks.platforms import PATCHES_VARIABLE
from goldilocks.verl.serve.answers import ManyAnswers

ASCEND = "verl.checkpoint_engine.hccl_checkpoint_engine"
VERSION = "verl.third_party.vllm"
LEFT_OUT = {"LLM": "vllm", "parallel_state": "vllm.distributed"}  # of that module
# What an import of vLLM sets: a worker compiles in its own process, and looks for a GPU without touching it.
AS_VLLM = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
# Variables by which the task runner may have another replica than the driver.
CHOOSING = (PATCHES_VARIABLE, "VERL_USE_EXTERNAL_MODULES")
MODULE, SERVER, REPLICA = "verl.workers.rollout.vllm_rollout.vllm_async_server", "vLLMHttpServer", "vLLMReplica"
# Sources of the replica that use nothing of vLLM's, and make their servers as ``begin`` does; others are imported.
READABLE = ("cfc3b64e49d27354",)  # verl 0.9.1


# -- processes that need nothing of vLLM -------------------------------------------------------------------------------


def leave_out_ascend() -> None:
    """Have verl's transport for Ascend fail at once: without its device it fails once it has imported vLLM."""
    torch = importlib.import_module("torch")
    if not hasattr(torch, "npu"):
        sys.modules.setdefault(ASCEND, None)  # type: ignore[arg-type]  # an import of it raises ImportError
        _set_as_vllm()


def _set_as_vllm() -> None:
    """Set what the import that is left out would have set."""
    os.environ |= AS_VLLM
    if compiler := sys.modules.get("torch._inductor.config"):  # it has read the variable
        vars(compiler)["compile_threads"] = 1


def read_version() -> None:
    """Have workers, which ask this module of verl's how deep vLLM can sleep, not import vLLM for it."""
    if importlib.util.find_spec("vllm") is None:
        return
    module = ModuleType(VERSION)
    try:
        _execute(VERSION, ast.parse(_source(VERSION)).body, vars(module))
    except Exception:  # a vLLM that is too old, or another verl: it says so itself where it is used
        return
    vars(module)["__getattr__"] = _name_of_vllm
    sys.modules[VERSION] = module
    setattr(sys.modules[VERSION.rpartition(".")[0]], VERSION.rpartition(".")[2], module)
    _set_as_vllm()


def _name_of_vllm(name: str) -> Any:
    """Return a name that was left out."""
    if name not in LEFT_OUT:
        raise AttributeError(name)
    return getattr(importlib.import_module(LEFT_OUT[name]), name)


class _WithoutVllm(ast.NodeTransformer):
    """Leaves out the imports of vLLM, and of what verl has for it."""

    def visit_Import(self, node: ast.Import) -> ast.AST:
        return ast.Pass() if any("vllm" in one.name for one in node.names) else node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        return ast.Pass() if "vllm" in (node.module or "") else node


def _execute(module: str, statements: list[ast.stmt], names: dict[str, Any]) -> None:
    tree = _WithoutVllm().visit(ast.Module(statements, []))
    exec(compile(ast.fix_missing_locations(tree), str(_path(module)), "exec"), names)


def _source(module: str) -> str:
    return _path(module).read_text(encoding="utf-8")


def _path(module: str) -> Path:
    """Return the file of a module of verl's; Python would import its package, and vLLM with it."""
    import verl

    path = Path(verl.__file__).parent.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


# -- the replica -------------------------------------------------------------------------------------------------------


def register() -> None:
    """Have verl make its vLLM servers so."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register("vllm", replica)


@functools.cache
def replica() -> Any:
    """Return verl's replica of vLLM, with light handles of its servers."""
    import ray

    verls, server, light = read() or _imported()
    was_read = server is light

    class Replica(verls):  # type: ignore[misc, valid-type]  # known at run time
        server_class: Any

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if getattr(self.server_class, "__ray_actor_class__", None) is server:  # else a verl chose another
                actors = ray.remote(light)
                self.server_class = Servers(actors) if was_read else actors

    return functools.update_wrapper(Replica, verls, updated=())


@functools.cache
def read() -> tuple[Any, Any, Any] | None:
    """Return verl's replica, its server and a light class of the server, by their sources; None if these are new.

    The server is the light class here.
    """
    source = _source(MODULE)
    body = ast.parse(source).body
    classes = {node.name: node for node in body if isinstance(node, ast.ClassDef)}
    text = ast.get_source_segment(source, classes[REPLICA]) if REPLICA in classes else None
    if digest_of(text or "") not in READABLE or classes[SERVER].bases:
        return None
    imports = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    light = light_class(_written(classes[SERVER]))
    names: dict[str, Any] = {"__name__": MODULE, SERVER: light}
    _execute(MODULE, [*imports, classes[REPLICA]], names)
    return names[REPLICA], light, light


def _imported() -> tuple[Any, Any, Any]:
    module = importlib.import_module(MODULE)
    server = getattr(module, SERVER)
    return getattr(module, REPLICA), server, light_class(_found(server))


# -- the server's actor ------------------------------------------------------------------------------------------------


def begin(config: Any) -> list[Any]:
    """Start the actors of the servers that share the workers' devices; each imports vLLM and waits for ``become``.

    They live as long as what is returned. None on several machines: verl has to know where the workers are.
    """
    try:
        return _begun(config) if _is_plain(config) else []
    except Exception as error:
        print(f"vLLM's servers begin when verl makes them: {error!r}", file=sys.stderr, flush=True)
        return []


def _is_plain(config: Any) -> bool:
    """Whether verl makes the servers of this replica here, with no other variables than the driver's."""
    rollout = config.actor_rollout_ref.rollout
    given = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars") or {}
    as_here = all(given.get(name, os.environ.get(name)) == os.environ.get(name) for name in CHOOSING)
    profiled = OmegaConf.select(config, "global_profiler.tool") == "nsys"  # the task runner's children are
    elsewhere = rollout.nnodes or rollout.disaggregation.enabled or config.trainer.nnodes > 1
    return bool(rollout.name == "vllm" and as_here and not profiled and not elsewhere)


def _begun(config: Any) -> list[Any]:
    import ray
    from verl.plugin.platform import get_platform
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    if RolloutReplicaRegistry._registry["vllm"] is not replica or len(ray.nodes()) > 1 or read() is None:
        return []
    rollout = config.actor_rollout_ref.rollout
    first = replica()(0, rollout, config.actor_rollout_ref.model, rollout.n_gpus_per_node)
    platform, prefix = get_platform(), first._get_server_name_prefix()
    env = {**dict.fromkeys(platform.ray_noset_envvars(), "1"), **platform.rollout_env_vars()}
    options = {"runtime_env": {"env_vars": env}, "max_concurrency": first.max_concurrency}
    ranks = range(config.trainer.n_gpus_per_node // first.world_size)  # of one machine
    return [first.server_class.actors.options(name=f"{prefix}server_{rank}_0", **options).remote() for rank in ranks]


class Servers:
    """Stands in the place of Ray's class of the server: an actor of this run becomes the server of its name."""

    def __init__(self, actors: Any) -> None:
        self.actors = actors

    def options(self, *, name: str, **options: Any) -> Any:
        import ray

        with contextlib.suppress(ValueError):  # there is none
            begun = ray.get_actor(name)
            if begun._actor_id.job_id.hex() == ray.get_runtime_context().get_job_id():  # else Ray refuses the name
                return SimpleNamespace(remote=functools.partial(_become, begun))
        return self.actors.options(name=name, **options)


def _become(actor: Any, **kwargs: Any) -> Any:
    actor.become.remote(**kwargs)
    return actor


def light_class(methods: Collection[str], module: str = MODULE, name: str = SERVER) -> type:
    """Return a class with these methods, whose instance becomes one of verl's server.

    Without arguments it only imports, and ``become`` takes the arguments. It is in no module, so that it is pickled
    with all that it has.
    """

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self.made, self.failed = asyncio.Event(), None
        importlib.import_module(module)
        if args or kwargs:
            make(self, *args, **kwargs)

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__class__ = getattr(sys.modules[module], name)
        self.__init__(*args, **kwargs)
        self.made.set()

    async def become(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            make(self, *args, **kwargs)
        except BaseException as error:
            self.failed = error
            self.made.set()
            raise

    stubs = {one: _method(one) for one in methods}
    return type(name, (), {**stubs, "__init__": __init__, "become": become})


def _method(name: str) -> Callable[..., Any]:
    """Return a method that calls the one of this name, once there is a server: Ray does not keep the order of calls."""

    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        await self.made.wait()
        if self.failed is not None:
            raise self.failed
        answer = getattr(self, name)(*args, **kwargs)
        return await answer if inspect.isawaitable(answer) else answer

    return call


def _found(server: type) -> set[str]:
    """Return the names of a class's methods."""
    return {name for name, _ in inspect.getmembers(server, inspect.isfunction)}


def _written(server: ast.ClassDef) -> set[str]:
    """Return the same by the source of the class, with the methods that are added to it."""
    functions = [node for node in server.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {one.name for one in functions if not one.decorator_list} | _found(ManyAnswers)
