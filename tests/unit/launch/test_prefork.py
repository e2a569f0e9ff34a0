"""Workers that are forked: each is the process that its command would have been, and none outlives the other side."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from goldilocks.launch import prefork
from goldilocks.launch.fork_server import ForkServer
from goldilocks.launch.supervisor import Supervisor
from goldilocks.runs.files import RunDir

pytestmark = pytest.mark.skipif(not prefork.has_pidfd(), reason="forks by pidfd, which is Linux's")

Said = Callable[[str], list[str]]
PATIENCE_S = 300  # for what is sure to happen: a busy machine is not a mistake
DRIVER = """
import os, shlex, subprocess, sys
from goldilocks.launch import prefork
prefork.PRELOADED = ("numpy",)
os.environ["VERL_PLATFORM"] = "cpu"
assert prefork.serve_in_background()
python = shlex.split(prefork.py_executable())
"""


def driver(body: str, before: str = "") -> subprocess.Popen[str]:
    """A process that has a server and does ``body`` with ``python``, the command that starts a worker."""
    program = [sys.executable, "-c", before + DRIVER + textwrap.dedent(body)]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


LISTENING = """
import json
for body in sys.stdin:
    exec(json.loads(body), dict(globals()))
    os.write(1, b"that was all\\n")
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[subprocess.Popen[str]]:
    """A driver whose server many tests use, one after another."""
    with driver(LISTENING) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def said(shared: subprocess.Popen[str]) -> Said:
    """Has the shared driver do something; returns the words that its workers printed."""

    def words(body: str) -> list[str]:
        assert shared.stdin is not None
        assert shared.stdout is not None
        print(json.dumps(textwrap.dedent(body)), file=shared.stdin, flush=True)
        lines = iter(shared.stdout.readline, "")
        return [word for line in itertools.takewhile("that was all\n".__ne__, lines) for word in line.split()]

    return words


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "worker.py"


def test_a_worker_has_the_arguments_variables_and_files_of_its_command_and_imports_nothing_again(
    script: Path, said: Said
) -> None:
    script.write_text(
        "import os, sys\n"
        "print(sys.argv[1], os.environ['B'], os.getcwd(), 'numpy' in sys.modules, __name__, flush=True)\n"
        "sys.exit(7)\n"
    )
    call = f"subprocess.call([*python, {str(script)!r}, 'word'], env={{**os.environ, 'B': '2'}}, cwd='/')"
    assert said(f"print({call}, flush=True)") == ["word", "2", "/", "True", "__main__", "7"]


def test_ray_may_put_the_flags_of_its_own_python_before_the_worker(script: Path, said: Said) -> None:
    script.write_text("import sys\nprint(*sys.argv[1:])\n")
    assert said(f"subprocess.run([*python, '-S', '-s', {str(script)!r}, '-s', 'word'])") == ["-s", "word"]


@pytest.mark.parametrize("started", ["script", "module"])
def test_a_worker_finds_the_modules_of_its_own_path(script: Path, said: Said, started: str) -> None:
    folder = script.parent / "modules"
    folder.mkdir()
    (folder / "of_this_worker.py").write_text("WORD = 'found'\nif __name__ == '__main__': print(WORD)\n")
    script.write_text("import of_this_worker\nprint(of_this_worker.WORD)\n")
    words = [str(script)] if started == "script" else [prefork.MODULE, "of_this_worker"]
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    body = f"subprocess.run([*python, *{words!r}], env={{**os.environ, 'PYTHONPATH': {path!r}}})"
    assert said(body) == ["found"]


def test_a_worker_has_no_files_of_the_server_whatever_their_numbers(script: Path) -> None:
    script.write_text(
        "import os\n"
        "numbers = os.listdir('/proc/self/fd')\n"  # one of them was open while this looked, and is no more
        "print(*sorted(number for number in numbers if os.path.exists(f'/proc/self/fd/{number}')))\n"
    )
    beyond_the_limit = (
        "import os, resource\n"
        "os.dup2(0, 300)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
    )
    out, _ = driver(f"subprocess.run([*python, {str(script)!r}])", beyond_the_limit).communicate(timeout=PATIENCE_S)
    assert out.split() == ["0", "1", "2"]


def test_a_worker_has_the_limits_and_ignored_signals_of_its_command(script: Path, said: Said) -> None:
    script.write_text(
        "import resource, signal\n"
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE), *resource.getrlimit(resource.RLIMIT_CORE))\n"
        "print(*(signal.getsignal(number) == signal.SIG_IGN for number in (1, 2, 15)))\n"
    )
    shell = "trap '' HUP INT; ulimit -n 100; ulimit -c 0; exec \"$@\""
    words = said(f"subprocess.run(['sh', '-c', {shell!r}, 'sh', *python, {str(script)!r}])")
    assert words == ["100", "100", "0", "0", "True", "True", "False"]


def test_files_change_their_numbers_where_the_highest_is_the_last_that_the_limit_allows() -> None:
    program = """
import os, resource
from goldilocks.launch import prefork
first, second = os.memfd_create("first"), os.memfd_create("second")
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
prefork._number([first, second, 1, 2], [second, first, 99, 2])
for number in (second, first):
    os.write(99, os.readlink(f"/proc/self/fd/{number}").encode() + b"\\n")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["/memfd:first", "/memfd:second"], done.stderr


def test_a_fork_that_fails_leaves_the_server_and_the_client_runs_python_itself(script: Path) -> None:
    script.write_text("import sys\nprint('numpy' in sys.modules, flush=True)\n")
    fails_once = f"""
import os
fork, failures = os.fork, iter([None, BlockingIOError({errno.EAGAIN}, "no more processes"), None])
def forked():
    failure = next(failures)
    if failure is not None:
        raise failure
    return fork()
os.fork = forked
"""
    body = f"for _ in range(2): subprocess.run([*python, {str(script)!r}])"
    out, _ = driver(body, fails_once).communicate(timeout=PATIENCE_S)
    assert out.split() == ["False", "True"]


@pytest.mark.parametrize(
    ("trapped", "sent", "status"),
    [("", "TERM", -signal.SIGTERM), ("", "INT", -signal.SIGINT), ("INT", "INT", 0), ("INT", "TERM", -signal.SIGTERM)],
)
def test_a_signal_that_comes_before_a_refusal_is_not_lost_and_an_ignored_one_stays_ignored(
    short_path: Path, trapped: str, sent: str, status: int
) -> None:
    program = "import signal, sys; sys.exit(signal.getsignal(signal.SIGINT) != signal.SIG_IGN)"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_path / "refuses"))
        listener.listen()
        words = [prefork.SERVER + str(short_path / "refuses"), prefork.CODE, program, prefork.SPAWNED]
        trap = f"trap '' {trapped}; " if trapped else ""
        client = subprocess.Popen(["sh", "-c", f"{trap}exec {prefork.py_executable()} {shlex.join(words)}"])
        connection, _ = listener.accept()
        _, files = prefork._received(connection)
        client.send_signal(getattr(signal, f"SIG{sent}"))
        connection.close()
    for file in files:
        os.close(file)
    assert client.wait(PATIENCE_S) == status


def test_a_signal_for_a_worker_that_has_just_ended_is_dropped(said: Said) -> None:
    beyond = 2**22 + 1  # the kernel gives no process a higher number than 2**22
    body = f"""
    import signal
    forward = prefork.Signals(signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGUSR1)
    forward.to({beyond})
    print("went on", flush=True)
    """
    assert said(body) == ["went", "on"]


def test_a_kernel_that_refuses_pidfds_has_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(_: int) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuses)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.delenv(prefork.HOOK, raising=False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert prefork.listen() is None
    with ForkServer() as server:
        assert server.variables({}) == {}
    monkeypatch.delattr(os, "pidfd_open")
    assert not prefork.has_pidfd()


@pytest.mark.parametrize(
    ("limit_s", "answers", "spoiled"),
    [(PATIENCE_S, "0", False), (PATIENCE_S, "100", False), (PATIENCE_S, "3", True), (0.01, "time.sleep(600)", True)],
)
def test_a_process_is_asked_for_a_limited_time_whether_it_can_use_the_gpu(
    limit_s: float, answers: str, spoiled: bool
) -> None:
    program = f"""
import ctypes, time, types
from goldilocks.launch import prefork
prefork.ANSWER_S = {limit_s}
stub = types.SimpleNamespace(nvmlShutdown=lambda: 0, nvmlInit_v2=lambda: 0, cuInit=lambda _: {answers})
ctypes.CDLL = lambda _: stub  # its NVML never says that it was shut down often enough
print(prefork.spoiled())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.split() == [str(spoiled)], done.stderr


def test_settings_of_ray_that_the_user_made_stay() -> None:
    chosen, other = prefork.NO_SPARE_WORKERS
    body = f"print(os.environ[{chosen!r}], os.environ[{other!r}])"
    before = f"import os\nos.environ[{chosen!r}] = '1'\nos.environ.pop({other!r}, None)\n"
    out, _ = driver(body, before).communicate(timeout=PATIENCE_S)
    assert out.split() == ["1", "0"]


def test_workers_do_not_draw_what_their_siblings_draw(script: Path, said: Said) -> None:
    script.write_text("import random, numpy\nprint(random.random(), numpy.random.rand())\n")
    drawn = said(f"for _ in range(3): subprocess.run([*python, {str(script)!r}])")
    assert len(set(drawn)) == len(drawn) == 6


# Two processes write to one pipe: a line is one write, since ``print`` may make two of it.
SLEEPER = "import os, time\nos.write(1, b'%d\\n' % os.getpid())\ntime.sleep(600)\n"


@pytest.mark.parametrize("killed", ["worker", "client", "driver"])
def test_a_worker_ends_with_its_client_its_driver_and_the_other_way_round(script: Path, killed: str) -> None:
    script.write_text(SLEEPER)
    process = driver(
        f"client = subprocess.Popen([*python, {str(script)!r}]); os.write(1, b'%d\\n' % client.pid)\nclient.wait()"
    )
    assert process.stdout is not None
    pids = {int(process.stdout.readline()), int(process.stdout.readline())}
    client, worker = sorted((psutil.Process(pid) for pid in pids), key=lambda found: found.ppid() != process.pid)
    assert client.ppid() == process.pid
    {"worker": worker, "client": client, "driver": psutil.Process(process.pid)}[killed].send_signal(signal.SIGKILL)
    process.communicate(timeout=PATIENCE_S)
    _, alive = psutil.wait_procs([client, worker], timeout=PATIENCE_S)
    assert alive == []


@pytest.mark.parametrize("sent", ["nothing", "half an order"])
def test_a_client_that_ends_before_its_order_is_there_takes_no_other_worker_along(
    script: Path, said: Said, sent: str
) -> None:
    script.write_text("print('worked', flush=True)\n")
    body = f"""
    import socket, struct
    client = socket.socket(socket.AF_UNIX)
    client.connect(os.environ[prefork.SOCKET])
    if {sent!r} != "nothing":
        socket.send_fds(client, [struct.pack("!q", 100)], [0, 1, 2])
        client.sendall(b"{{")
    client.close()
    subprocess.run([*python, {str(script)!r}])
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.environ[prefork.SOCKET])
    print("listens", flush=True)
    server.close()
    """
    assert said(body) == ["worked", "listens"]


def test_a_worker_that_dies_with_its_client_takes_no_other_worker_along(script: Path) -> None:
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    body = (
        f"clients = [subprocess.Popen([*python, {str(script)!r}], stdout=subprocess.PIPE, text=True) for _ in range(9)]"
    )
    body += textwrap.dedent("""
    workers = [int(client.stdout.readline()) for client in clients]
    for client, worker in list(zip(clients, workers))[:8]:
        os.kill(worker, 9), os.kill(client.pid, 9)  # a client stays a child of this process until it is waited for
    for client in clients[:8]: client.wait()
    import time; time.sleep(0.5)
    print(clients[8].poll(), os.path.exists(f"/proc/{workers[8]}"))
    """)
    out, _ = driver(body).communicate(timeout=PATIENCE_S)
    assert out.split() == ["None", "True"]


def test_without_a_server_a_client_is_the_ordinary_python(script: Path) -> None:
    script.write_text("import sys\nprint(sys.argv[1])\n")
    environment = {key: value for key, value in os.environ.items() if key != prefork.SOCKET}
    for extra in ({}, {prefork.SOCKET: "/nowhere"}):
        command = [*prefork.py_executable().split(), str(script), "word"]
        done = subprocess.run(command, env=environment | extra, capture_output=True, text=True, check=True)
        assert done.stdout == "word\n"


RAYS_WORDS = ["--language=PYTHON", "--serialized-runtime-env-context="]


def test_a_worker_that_needs_variables_alone_is_set_up_without_ray(script: Path, said: Said) -> None:
    script.write_text(
        "import os, sys\nprint(*sys.argv[1:], os.environ['B'], 'numpy' in sys.modules, 'ray' in sys.modules)\n"
    )
    body = f"""
    import json
    env_vars = {{"B": "${{A}}${{NONE}}2"}}
    context = json.dumps({{"env_vars": env_vars, "py_executable": prefork.py_executable(), "java_jars": []}})
    words = [{RAYS_WORDS[0]!r}, {RAYS_WORDS[1]!r} + context]
    subprocess.run([sys.executable, prefork.__file__, {str(script)!r}, "word", *words], env={{**os.environ, "A": "1"}})
    """
    assert said(body) == ["word", "12", "True", "False"]


@pytest.mark.parametrize("context", ['{"py_executable": "mine"}', '{"command_prefix": ["cd /"]}', "{}"])
def test_ray_sets_up_a_worker_that_needs_more_than_variables(script: Path, context: str) -> None:
    script.write_text("import sys\nprint(*sys.argv[1:])\n")
    words = ["default_worker.py", RAYS_WORDS[0], RAYS_WORDS[1] + context]
    env = {**os.environ, prefork.SETUP: str(script)}
    done = subprocess.run(
        [sys.executable, prefork.__file__, *words], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == " ".join(words)


@pytest.fixture
def rays_script(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of Ray's script; what the hook changes is as it was after the test."""
    from ray._private import ray_constants

    name = "setup_worker.py"
    monkeypatch.setattr(ray_constants, "SETUP_WORKER_FILENAME", name)
    monkeypatch.setenv(prefork.SETUP, "")
    return name


def test_ray_starts_its_workers_with_this_file(rays_script: str) -> None:
    from ray._private import ray_constants

    for nothing_chosen in (None, {}, {"py_executable": None}):
        assert prefork.runtime_env_hook(nothing_chosen) == {"py_executable": prefork.py_executable()}
        assert os.path.abspath(prefork.__file__) == ray_constants.SETUP_WORKER_FILENAME
        assert Path(os.environ[prefork.SETUP]).name == rays_script
        assert Path(os.environ[prefork.SETUP]).is_file()


def test_a_python_that_the_user_chose_for_workers_stays(rays_script: str) -> None:
    from ray._private import ray_constants

    assert prefork.runtime_env_hook({"py_executable": "mine"}) == {"py_executable": "mine"}
    assert rays_script == ray_constants.SETUP_WORKER_FILENAME


FORKING = r"""
import os, time
child = os.fork()
if child == 0:
    os.setsid()
os.write(1, b"%d\n" % os.getpid())
time.sleep(600)
"""


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def test_a_supervisor_ends_everything_that_a_forked_run_has_forked(script: Path, tmp_path: Path) -> None:
    script.write_text(FORKING)
    run = {prefork.RUN: str(tmp_path)}
    process = driver(f"subprocess.call([*python, {str(script)!r}], env={{**os.environ, **{run!r}}})")
    assert process.stdout is not None
    workers = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
    Supervisor(RunDir(tmp_path), {}).end()
    assert [worker for worker in workers if alive(worker)] == []
    process.communicate(timeout=PATIENCE_S)


def test_a_worker_collects_garbage_and_looks_at_nothing_that_was_imported_before(script: Path, said: Said) -> None:
    script.write_text("import gc\nprint(gc.isenabled(), gc.get_freeze_count() > 1_000)\n")
    assert said(f"subprocess.run([*python, {str(script)!r}])") == ["True", "True"]
