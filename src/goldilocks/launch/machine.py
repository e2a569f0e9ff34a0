"""This machine: its device, its rollout engines, and the Ray that a run starts or joins, with its nodes.

A Ray that the run starts gets its sizes from the config and its environment from the driver. One that is already
running (``ray_kwargs.ray_init.address``) has its own sizes and refuses others, and its processes get only the
variables in ``runtime_env``. torch is imported only if there may be a GPU.

A run names the nodes that it has lost. The process that fails first is often on another node than the one that died,
and knows only its socket. Ray takes a while to call a node dead (five health checks in a row), so after a broken
connection its verdict is awaited. Only nodes that were there when the run began count: a Ray that has been up for long
has lost others before.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from goldilocks.config.recipes import read_keys
from goldilocks.dotted_keys import merged, with_value
from goldilocks.engine.cpu import threads_per_rank
from goldilocks.errors import require

if TYPE_CHECKING:
    from omegaconf import DictConfig

DEVICE_FILES = Path("/dev")
ADDRESS = "ray_kwargs.ray_init.address"
ASK_S = 120.0
PRIVATE = "local"  # the address of a Ray that is one run's alone
THREADS = "OMP_NUM_THREADS"
SIZES = ("num_cpus", "num_gpus", "object_store_memory", "include_dashboard")
ENGINES = ("transformers", "vllm", "sglang")
NOTICE_S = 90.0  # a machine that lost power answers nothing: five checks that each run out of time
POLL_S = 1.0
# In what a process says that has lost another one, whether it talks without Ray or quotes Ray's error.
BROKEN = ("connect", "gloo", "nccl", "socket", "unavailable", "died")


def share_of_cores(runs: int) -> dict[str, str]:
    """Return the variable that gives each of several runs its share of the cores, unless the user has set it."""
    return {} if THREADS in os.environ or runs == 1 else {THREADS: str(threads_per_rank(runs))}


def find_device(words: Sequence[str] = ()) -> str:
    """Return ``cuda`` if torch can use an NVIDIA GPU here, or if the Ray that the words join has one, else ``cpu``."""
    files = (file for name in ("nvidia[0-9]*", "dxg") for file in DEVICE_FILES.glob(name))  # dxg: any GPU under WSL2
    cuda = os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any(files)
    if cuda:
        import torch

        cuda = torch.cuda.is_available()
    given = {word.lstrip("+").partition("=")[0] for word in words}
    address = PRIVATE if cuda or {"device", "trainer.device"} & given else ray_address(words)
    if address not in (PRIVATE, None):
        resources, wrong = ask_ray({"ray_init": {"address": address}}, ASK_S)
        require(not wrong, ADDRESS, address, f"the address of a Ray that is running: {wrong}")
        # Ranks on the CPU are GPUs to Ray, but have no type.
        cuda = resources.get("GPU", 0) > 0 and any(name.startswith("accelerator_type:") for name in resources)
    return "cuda" if cuda else "cpu"


def ray_address(words: Sequence[str]) -> Any:
    """Return the address of the Ray that the overrides among the words name, or else the recipe; else ``PRIVATE``."""
    given: dict[str, Any] = {}
    for recipe in (word for word in words if "=" not in word and not word.startswith("~")):
        given = merged(given, read_keys(recipe))
    for word in words:
        if word.lstrip("+").startswith("ray_kwargs"):
            from hydra.core.override_parser.overrides_parser import OverridesParser
            from hydra.errors import HydraException

            with suppress(HydraException):  # which Hydra raises again when it composes
                override = OverridesParser.create().parse_override(word)
                given = merged(given, with_value({}, override.key_or_group, override.value()))
    if "ray_kwargs" not in given:
        return PRIVATE
    from omegaconf import OmegaConf  # ``goldilocks doctor`` starts without it

    return OmegaConf.select(OmegaConf.create({"ray_kwargs": given["ray_kwargs"]}), ADDRESS, default=PRIVATE)


def ask_ray(wish: dict[str, Any], within_s: float, env: Mapping[str, str] | None = None) -> tuple[Any, str]:
    """Return what ``ray_probe`` says of a Ray, and what is wrong with that Ray where it says nothing."""
    command = [sys.executable, "-m", "goldilocks.launch.ray_probe", json.dumps(wish)]
    own = {**os.environ, **(env or {})}
    try:
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=within_s, check=False)
    except subprocess.TimeoutExpired:
        return None, f"no answer in {within_s:g} s"
    if done.returncode != 0:
        return None, (done.stderr.strip().splitlines() or ["no message"])[-1]
    return json.loads(done.stdout.splitlines()[-1]), ""


def rollout_engines() -> list[str]:
    """Return the installed rollout engines, by the names ``actor_rollout_ref.rollout.name`` takes."""
    return [name for name in ENGINES if importlib.util.find_spec(name) is not None]


def is_private(config: DictConfig) -> bool:
    """Return whether the run starts a Ray of its own."""
    return bool(config.ray_kwargs.ray_init.get("address") == PRIVATE)


def join(config: DictConfig, env: Mapping[str, str]) -> None:
    """Adapt the config to a running Ray: no sizes, and ``env`` in its ``runtime_env``, where the user's values win."""
    from omegaconf import OmegaConf, open_dict  # ``goldilocks doctor`` starts without it

    with open_dict(config):
        ray_init = config.ray_kwargs.ray_init
        for size in SIZES:
            ray_init.pop(size, None)
        ray_init.runtime_env = OmegaConf.merge({"env_vars": dict(env)}, ray_init.get("runtime_env") or {})


class NodeLost(Exception):
    """Says which node died, for the user, and then what that broke."""


@contextmanager
def naming_lost_nodes(runner: Any) -> Iterator[WatchedRunner]:
    """``with naming_lost_nodes(runner) as watched``: an error that a node's death has caused names the node."""
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
        """Start the task runner, and note the nodes that are there."""
        self._nodes = _nodes()
        return self._runner.remote(*args, **kwargs)

    def options(self, **options: Any) -> WatchedRunner:
        self._runner = self._runner.options(**options)
        return self

    def lost(self, error: BaseException) -> list[str]:
        """Return the addresses of the nodes that have died; a run on one node has none to lose."""
        if len(self._nodes) < 2:
            return []
        deadline = time.monotonic() + (NOTICE_S if is_broken(error) else 0.0)
        while True:
            lost = sorted(self._nodes[name] for name in self._nodes.keys() - _nodes().keys())
            if lost or time.monotonic() >= deadline:
                return lost
            time.sleep(POLL_S)


def is_broken(error: BaseException) -> bool:
    """Return whether a process that died elsewhere may be the cause: Ray's own errors and broken connections."""
    from ray.exceptions import RayError

    cause = getattr(error, "cause", None)
    if isinstance(cause, BaseException):
        return is_broken(cause)
    return isinstance(error, RayError) or any(word in str(error).lower() for word in BROKEN)


def _nodes() -> dict[str, str]:
    """Return the address of every node that is alive, by its id."""
    import ray

    if not ray.is_initialized():
        return {}
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
