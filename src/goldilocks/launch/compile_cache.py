"""vLLM's cache of compiled graphs, for one run at a time.

verl switches the cache off, since engines that compile at once have corrupted it (vLLM's issue 31199), and so every run
compiles anew. Here a run with a single engine has a folder for its model, locked until the run ends. A second run finds
the lock taken and compiles anew. A folder whose last run logged nothing may be damaged, and is emptied.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from goldilocks.launch.machine import is_private
from goldilocks.runs.files import cache_folder

DISABLED, ROOT = "VLLM_DISABLE_COMPILE_CACHE", "VLLM_CACHE_ROOT"  # vLLM's own variables
LAST = "last_run.json"  # in the folder: the run that used it last, and how many of its starts had logged by then


@contextlib.contextmanager
def compile_cache(config: DictConfig, run: Path) -> Iterator[None]:
    """Have the processes that are started in the block use the cache; without a folder of its own the run does not.

    The processes of a Ray that others started do not inherit these variables, and their runs are as verl has them.
    """
    with contextlib.ExitStack() as held:
        if is_private(config) and compiles_once(config) and not {DISABLED, ROOT} & os.environ.keys():
            # Another run has the lock, nothing can be written, or verl will say that there is no vLLM.
            with contextlib.suppress(OSError, metadata.PackageNotFoundError):
                os.environ |= {DISABLED: "0", ROOT: str(_claimed(_folder(config), run, held))}
        yield


def compiles_once(config: DictConfig) -> bool:
    """Return whether a single engine of vLLM compiles in this run: two would write the same files at once."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    more = ("reward.reward_model.enable", "distillation.enabled", "actor_rollout_ref.rollout.nnodes")
    ranks = rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size
    return (
        rollout.name == "vllm"
        and trainer.device == "cuda"
        and not rollout.enforce_eager
        and not any(OmegaConf.select(config, key) for key in more)
        and rollout.data_parallel_size == 1
        and trainer.nnodes * trainer.n_gpus_per_node == ranks
    )


def _folder(config: DictConfig) -> Path:
    """Return this machine's folder for the model; in it, vLLM itself tells other settings and devices apart.

    Locks of a home that several machines share may be each machine's own.
    """
    model = f"{platform.node()} {metadata.version('vllm')} {config.actor_rollout_ref.model.path}"
    return cache_folder() / "vllm" / hashlib.sha256(model.encode()).hexdigest()[:16]


def _claimed(folder: Path, run: Path, held: contextlib.ExitStack) -> Path:
    """Lock the folder for as long as ``held`` says, and empty it unless its last run came to a step."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = held.enter_context(folder.with_suffix(".lock").open("a"))  # the kernel frees it with the process
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if not _is_sound(folder):
        shutil.rmtree(folder)
        folder.mkdir()
    (folder / LAST).write_text(json.dumps({"run": str(run), "starts": _starts(run)}))
    return folder


def _is_sound(folder: Path) -> bool:
    """Return whether the run that used the folder last has logged since: it had compiled all of its graphs by then."""
    try:
        last = json.loads((folder / LAST).read_text())
    except (OSError, ValueError):
        return False
    return _starts(Path(last["run"])) > last["starts"]


def _starts(run: Path) -> int:
    """Return how many starts of the run have logged: each has a file of metrics."""
    return sum(file.stat().st_size > 0 for file in run.glob("metrics*.jsonl"))
