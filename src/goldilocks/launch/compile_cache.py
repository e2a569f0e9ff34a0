"""vLLM's cache of compiled graphs, for one run at a time.

verl switches the cache off, since engines that compile at once have corrupted it (vLLM's issue 31199), and so every run
compiles anew. Here a run with a single engine has a folder for its model, locked until the run ends. A second run finds
the lock taken and compiles anew. A folder may be damaged, and is emptied, unless the last start that used it logged a
step and said so when it ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from goldilocks.launch.machine import is_private
from goldilocks.runs.files import RunDir, cache_folder

DISABLED, ROOT = "VLLM_DISABLE_COMPILE_CACHE", "VLLM_CACHE_ROOT"  # vLLM's own variables
SOUND = "sound"  # a file in the folder while no run uses it: the last one had compiled all of its graphs


@contextlib.contextmanager
def compile_cache(config: DictConfig, run: Path) -> Iterator[None]:
    """Have the processes that are started in the block use the cache; without a folder of its own the run does not.

    The processes of a Ray that others started do not inherit these variables, and their runs are as verl has them.
    """
    with contextlib.ExitStack() as held:
        if is_private(config) and compiles_once(config) and not {DISABLED, ROOT} & os.environ.keys():
            # Another run has the lock, nothing can be written, or verl will say that there is no vLLM.
            with contextlib.suppress(OSError, metadata.PackageNotFoundError):
                folder = _claimed(_folder(config), held)
                held.callback(_vouch, folder, RunDir(run))
                os.environ |= {DISABLED: "0", ROOT: str(folder)}
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


def _claimed(folder: Path, held: contextlib.ExitStack) -> Path:
    """Lock the folder for as long as ``held`` says, and empty it unless it is known to be sound."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = held.enter_context(folder.with_suffix(".lock").open("a"))  # the kernel frees it with the process
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        (folder / SOUND).unlink()
    except FileNotFoundError:
        shutil.rmtree(folder)
        folder.mkdir()
    return folder


def _vouch(folder: Path, run: RunDir) -> None:
    """Say that the folder is sound if this start has logged: all graphs were compiled by then.

    A start that is killed says nothing, and what other starts of the run log says nothing of this one's graphs.
    """
    with contextlib.suppress(OSError):
        if run.metrics.stat().st_size > 0:
            (folder / SOUND).touch()
