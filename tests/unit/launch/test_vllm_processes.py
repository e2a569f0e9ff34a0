"""What multiprocessing spawns is forked from the server of a run: it is the process that would have been spawned."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from goldilocks.launch import prefork, vllm_processes

pytestmark = pytest.mark.skipif(not prefork.has_pidfd(), reason="forks by pidfd, which is Linux's")

PATIENCE_S = 300  # for what is sure to happen: a busy machine is not a mistake
PRINTING = ("PYTHONWARNINGS", "PYTHONDEVMODE")  # with these, Python itself prints lines
SPAWNER = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
from goldilocks.launch import vllm_processes
from goldilocks.platforms import SPAWN_WITH

spawn = multiprocessing.get_context("spawn")


def tell(pipe, *names):
    pipe.send(["preloaded" in sys.modules, __name__, os.getcwd(), *map(os.environ.get, names)])


def run(target, *args):
    "A spawned process, and what it says first."
    ours, its = spawn.Pipe()
    process = spawn.Process(target=target, args=(its, *args))
    process.start()
    its.close()
    return process, ours.recv()


def fail(pipe):
    tell(pipe)
    sys.exit(7)


def terminated(pipe):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    pipe.send(os.getpid())
    time.sleep(600)


def nested(pipe):
    tell(pipe)
    process, said = run(tell)
    pipe.send(said)
    process.join()


def serve(*modules, platform="cpu", spares=0):
    by_vllm = vllm_processes.AS_VLLM.get(platform, {})
    os.environ |= {**vllm_processes.AS_VERL, **vllm_processes.NVML, **by_vllm, "VERL_PLATFORM": platform}
    vllm_processes.start(Path(sys.argv[1]), {"HF_HOME": "the workers'"}, modules, spares)
    os.environ["HF_HOME"] = "the workers'"
    multiprocessing.set_executable(os.environ[SPAWN_WITH])


if __name__ == "__main__":
"""


@pytest.fixture
def spawner(tmp_path: Path, short_path: Path) -> Callable[..., list[str]]:
    """Runs a program that spawns; returns the lines that it and its processes print."""
    (tmp_path / "preloaded.py").touch()

    def lines(body: str, **env: str) -> list[str]:
        script = tmp_path / "spawner.py"
        script.write_text(SPAWNER + "".join(f"    {line}\n" for line in body.splitlines()))
        path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        here = {name: value for name, value in os.environ.items() if name not in PRINTING}
        words = [sys.executable, str(script), str(short_path)]
        done = subprocess.run(
            words, env={**here, **env, "PYTHONPATH": path}, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
        return [*done.stdout.splitlines(), *done.stderr.splitlines()]

    return lines


def test_a_forked_process_has_the_variables_and_pipes_of_the_moment_and_its_own_status(
    spawner: Callable[..., list[str]],
) -> None:
    body = """\
serve("preloaded")
os.environ["B"] = "set later"
os.chdir("/")
print(run(tell, "B")[1])
process, _ = run(fail)
process.join()
print(process.exitcode)
process, worker = run(terminated)
print(worker != process.pid)
process.terminate()
process.join()
print(process.exitcode)
process, worker = run(terminated)
os.kill(worker, signal.SIGKILL)
process.join()
print(process.exitcode)"""
    assert spawner(body) == ["[True, '__mp_main__', '/', 'set later']", "7", "True", "5", "-9"]


def test_a_forked_process_may_have_more_files_than_the_server(spawner: Callable[..., list[str]]) -> None:
    body = """\
import resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
serve("preloaded")
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(100)]
print(run(tell)[1][0])"""
    assert spawner(body) == ["True"]


def test_a_forked_process_spawns_by_fork_too(spawner: Callable[..., list[str]]) -> None:
    body = """\
serve("preloaded")
ours, its = spawn.Pipe()
process = spawn.Process(target=nested, args=(its,))
process.start()
print(ours.recv()[0], ours.recv()[0])"""
    assert spawner(body) == ["True True"]


@pytest.mark.parametrize("kind", ["", ", platform='nvidia', spares=1"], ids=["forked", "spare"])
def test_a_process_ends_with_the_one_that_spawned_it_however_that_ends(
    spawner: Callable[..., list[str]], kind: str
) -> None:
    body = f"""\
serve("preloaded"{kind})
if os.fork() == 0:
    Path(sys.argv[1], "worker").write_text(str(run(terminated)[1]))
    os.kill(os.getpid(), signal.SIGKILL)
os.wait()
worker = Path(sys.argv[1], "worker").read_text()
while Path("/proc", worker).exists():
    time.sleep(0.01)
print("ended")"""
    assert spawner(body) == ["ended"]


def test_a_process_is_spawned_where_its_imports_would_read_another_variable_or_there_is_no_server(
    spawner: Callable[..., list[str]],
) -> None:
    body = """\
serve("preloaded")
os.environ |= {"VLLM_LOGGING_LEVEL": "DEBUG", "OMP_PLACES": "{0}"}
print(run(tell)[1][0])
Path(sys.argv[1], "vllm-python.socket").unlink()
print(run(tell)[1][0])"""
    said = "a process of vLLM imports for itself: OMP_PLACES, VLLM_LOGGING_LEVEL differ"
    assert spawner(body) == ["False", "False", said]


def test_processes_are_spawned_where_the_address_of_a_server_is_taken(spawner: Callable[..., list[str]]) -> None:
    body = """\
Path(sys.argv[1], "vllm-python.socket").touch()
vllm_processes.start(Path(sys.argv[1]), {}, ["preloaded"])
print(SPAWN_WITH in os.environ, run(tell)[1][0])"""
    said, reason = spawner(body)
    assert said == "False False"
    assert "vllm-python.socket" in reason


def test_a_spare_process_is_what_a_forked_one_would_be_and_once_there_is_none_left_one_imports_for_itself(
    spawner: Callable[..., list[str]],
) -> None:
    body = """\
serve("preloaded", platform="nvidia", spares=3)
os.environ["B"] = "set later"
os.chdir("/")
process, said = run(fail)
process.join()
print(said, process.exitcode)
ours, its = spawn.Pipe()
process = spawn.Process(target=nested, args=(its,))
process.start()
print(ours.recv()[0], ours.recv()[0])
print(run(tell, "B")[1])"""
    forked, last = "[True, '__mp_main__', '/'] 7", "[False, '__mp_main__', '/', 'set later']"
    assert spawner(body) == [forked, "True True", last]


def test_a_spare_process_that_has_used_cuda_sees_other_gpus_in_a_new_python(
    spawner: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "touches_cuda.py").write_text(USED)
    body = """\
serve("preloaded", "touches_cuda", platform="nvidia", spares=2)
print(run(tell)[1][0])
os.environ["CUDA_VISIBLE_DEVICES"] = "3"
print(run(tell)[1][0])"""
    assert spawner(body) == ["True", "False"]


def test_a_spare_process_compares_variables_with_what_its_imports_have_set(
    spawner: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "sets.py").write_text("import os; os.environ['TORCH_SET_BY_IMPORTS'] = '1'")
    body = """\
serve("preloaded", "sets", platform="nvidia", spares=2)
os.environ["TORCH_SET_BY_IMPORTS"] = "1"
print(run(tell)[1][0])
os.environ["VLLM_LOGGING_LEVEL"] = "DEBUG"
print(run(tell)[1][0])"""
    said = "a process of vLLM imports for itself: VLLM_LOGGING_LEVEL differ"
    assert spawner(body) == ["True", "False", said]


def test_a_run_on_gpus_has_a_spare_process_for_each_worker_and_each_engine() -> None:
    rollout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}
    trainer = {"device": "cuda", "n_gpus_per_node": 8}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "trainer": trainer})
    assert vllm_processes.spares_for(config) == 12
    config.trainer.device = "cpu"
    assert vllm_processes.spares_for(config) == 0


USED = """
import ctypes
from types import SimpleNamespace
ctypes.CDLL = lambda name, before=ctypes.CDLL: (  # CUDA's driver, which has been used
    SimpleNamespace(cuDeviceGetCount=lambda number: 0) if name == "libcuda.so.1" else before(name)
)
"""
TORCH = """
def set_num_threads(number):
    print(number, flush=True)
"""


def test_a_module_that_fails_is_left_to_the_processes(spawner: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    (tmp_path / "fails.py").write_text("raise RuntimeError('no')")
    body = """\
serve("torch", "preloaded", "fails")
os.environ["OMP_NUM_THREADS"] = "3"
print(run(tell)[1][0])"""
    said = "vLLM's processes import fails for themselves: RuntimeError: no"
    assert spawner(body) == ["3", "True", said]


@pytest.mark.parametrize(
    ("overrides", "env", "wanted"),
    [
        ({}, {}, True),
        ({"actor_rollout_ref.rollout.name": "transformers"}, {}, False),
        ({"trainer.nnodes": 2}, {}, False),
        ({"actor_rollout_ref.rollout.full_determinism": True}, {}, False),
        ({"actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend": "ray"}, {}, False),
        ({"actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend": "mp"}, {}, True),
        ({}, {vllm_processes.FORK: "0"}, False),
        ({"trainer.device": "cuda"}, {}, False),
        ({"trainer.device": "cuda"}, {vllm_processes.FORK: "1"}, True),
        ({"trainer.device": "cuda"}, {vllm_processes.FORK: ""}, False),
        ({}, {vllm_processes.OTHER_LIBRARIES: "1"}, False),
        ({}, {vllm_processes.BOUND: "auto"}, False),
    ],
)
def test_a_run_has_a_server_if_its_engine_is_vllm_on_one_machine_and_nobody_refused(
    monkeypatch: pytest.MonkeyPatch, overrides: dict[str, object], env: dict[str, str], wanted: bool
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    for name in (vllm_processes.FORK, vllm_processes.OTHER_LIBRARIES, vllm_processes.BOUND):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    trainer = {"nnodes": 1, "device": "cpu"}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}, "trainer": trainer})
    for key, value in overrides.items():
        OmegaConf.update(config, key, value, force_add=True)
    assert vllm_processes.wanted(config) is wanted


def test_a_run_has_no_server_where_the_kernel_refuses_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    for name in (vllm_processes.OTHER_LIBRARIES, vllm_processes.BOUND):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(vllm_processes.FORK, "1")
    trainer = {"nnodes": 1, "device": "cpu"}
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "vllm"}}, "trainer": trainer})
    assert vllm_processes.wanted(config)
    monkeypatch.setattr(os, "pidfd_open", lambda _: os.close(-1))  # an OSError, as where there is no such call
    assert not vllm_processes.wanted(config)
