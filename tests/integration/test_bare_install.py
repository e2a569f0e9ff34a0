"""The wheel, bare and with each extra: what an extra brings is enough for its command, and bare has no torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path
from typing import Any

import check_wheel
import pytest
from packaging.requirements import Requirement

from goldilocks.tasks.tiny_model import TINY, tiny_model

from .conftest import PATIENCE_S

ROOT = Path(__file__).parents[2]


def closure(own: metadata.Distribution, extra: str) -> list[metadata.Distribution]:
    """The distributions that the package brings with this extra, and whatever those bring; not the package itself."""
    found: dict[tuple[str, str], metadata.Distribution] = {}
    waiting = [(own, extra), (own, "")]
    while waiting:
        distribution, part = waiting.pop()
        if (key := (distribution.name, part)) not in found:
            found[key] = distribution
            for one in map(Requirement, distribution.requires or []):
                if one.marker is None or one.marker.evaluate({"extra": part}):
                    brought = own if one.name == own.name else metadata.distribution(one.name)
                    waiting += [(brought, asked) for asked in ("", *one.extras)]
    return list({one.name: one for one in found.values() if one is not own}.values())


def link(distribution: metadata.Distribution, site: Path) -> None:
    """Show a distribution that is installed here to another environment, without a copy and without a network."""
    for name in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
        target = site / name
        if not target.exists():
            target.symlink_to(Path(str(distribution.locate_file(name))))


def run(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S, **options)


PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    built = run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder / "dist", folder)
    assert built.returncode == 0, built.stderr
    return next((folder / "dist").glob("*.whl"))


def environment(wheel: Path, extra: str, folder: Path) -> Path:
    """Make an environment with the wheel and what an extra brings, and nothing else; return its python."""
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    installed = run(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel)
    assert installed.returncode == 0, installed.stderr
    site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    own = metadata.Distribution.at(next(site.glob("goldilocks_rl-*.dist-info")))
    for distribution in closure(own, extra):
        link(distribution, site)
    checked = run(*PIP, "--python", python, "check")
    assert checked.returncode == 0, checked.stdout
    return python


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of a fresh environment with the wheel and its requirements."""
    return environment(wheel, "", tmp_path_factory.mktemp("bare"))


@pytest.mark.slow
@pytest.mark.parametrize("extra", [extra for extra in check_wheel.CHECKS if extra != check_wheel.BARE])
def test_what_an_extra_brings_is_enough_for_its_command(wheel: Path, extra: str, tmp_path: Path) -> None:
    python = environment(wheel, extra, tmp_path)
    check = check_wheel.CHECKS[extra]
    check.prepare(tmp_path)
    words = [python.with_name(check.words[0]), *check.words[1:]]
    done = run(*words, cwd=tmp_path, env=check_wheel.CLEAN)
    assert done.returncode == 0, done.stdout + done.stderr
    assert check.prints in done.stdout


def test_the_simulator_runs(bare: Path) -> None:
    done = run(bare, "-I", "-m", "goldilocks.cli", "simulate", "--rollouts", "500", "--target-groups", "8")
    assert (done.returncode, done.stderr) == (0, "")
    assert "thompson_contrast" in done.stdout


def test_the_collector_collects_and_torch_is_nowhere(bare: Path) -> None:
    script = """
import importlib.util, sys
from goldilocks import Collector, ListSource, Rollout
from goldilocks.core.allocators import Fixed
from goldilocks.core.filters import Variance
from goldilocks.core.selectors import Uniform

collector = Collector(ListSource(["a", "b"]), Uniform(), Fixed(2), Variance(), target_groups=1)
while not collector.ready:
    for request in collector.requests(room=8):
        for index in range(request.first, request.first + request.n):
            collector.observe(Rollout(request.uid, index, float(index % 2), tokens=3))
print(len(collector.take()), importlib.util.find_spec("torch"), "torch" in sys.modules)
"""
    done = run(bare, "-I", "-c", script)
    assert (done.stdout.strip(), done.stderr) == ("1 None False", "")


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["train"], "verl"),
        (["train", "--help"], "verl"),
        (["compare", "grpo", "dapo", "--budget", "rollouts=9", "--seeds", "1"], "verl"),
        (["report", "runs/none"], "report"),
        (["model", "get", "smollm2", "--out", "model"], "verl"),
        (["data", "make", "reasoning_gym", "--out", "data", "--generator", "leg_counting"], "tasks"),
    ],
)
def test_a_command_that_lacks_an_extra_says_which(bare: Path, tmp_path: Path, words: list[str], extra: str) -> None:
    done = run(bare, "-I", "-m", "goldilocks.cli", *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"pip install '.[{extra}]'" in done.stderr


def test_the_tiny_models_are_in_the_wheel(bare: Path, tmp_path: Path) -> None:
    for task in TINY:
        done = run(bare, "-I", "-m", "goldilocks.cli", "model", "make", "--task", task, "--out", tmp_path / task)
        assert (done.returncode, done.stderr) == (0, "")
        weights = tiny_model(task) / "model.safetensors"
        assert (tmp_path / task / weights.name).read_bytes() == weights.read_bytes()


def test_the_doctor_names_what_is_missing(bare: Path) -> None:
    done = run(bare, "-I", "-m", "goldilocks.cli", "doctor")
    assert done.returncode == 1
    assert done.stderr == ""
    assert "FAILS torch" in done.stdout
    assert "models and data" in done.stdout
    assert "pip install '.[verl]'" in done.stdout


def test_a_name_that_needs_an_extra_says_which(bare: Path) -> None:
    assert "pip install '.[filter]'" in run(bare, "-I", "-c", "from goldilocks import PPOBatchFilter").stderr
