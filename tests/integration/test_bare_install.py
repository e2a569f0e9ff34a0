"""The wheel installed without extras: the core, the simulator and the collector work, and nothing brings in torch."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from goldilocks.tasks.tiny_model import TINY, tiny_model

from .conftest import PATIENCE_S

ROOT = Path(__file__).parents[2]


def closure(requirements: list[str]) -> dict[str, metadata.Distribution]:
    """The distributions that these requirements bring, and those bring, by name; extras are not asked for."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        one = waiting.pop()
        if one.name not in found and (one.marker is None or one.marker.evaluate({"extra": ""})):
            found[one.name] = metadata.distribution(one.name)
            waiting += [Requirement(text) for text in found[one.name].requires or []]
    return found


def link(distribution: metadata.Distribution, site: Path) -> None:
    """Show a distribution that is installed here to another environment, without a copy and without a network."""
    for name in {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}:
        target = site / name
        if not target.exists():
            target.symlink_to(Path(str(distribution.locate_file(name))))


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of a fresh environment with the wheel and its requirements."""
    folder = tmp_path_factory.mktemp("bare")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    built = run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder / "dist", folder)
    assert built.returncode == 0, built.stderr
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    wheel = next((folder / "dist").glob("*.whl"))
    installed = run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel)
    assert installed.returncode == 0, installed.stderr
    site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    own = metadata.Distribution.at(next(site.glob("goldilocks_rl-*.dist-info")))
    for distribution in closure(own.requires or []).values():
        link(distribution, site)
    checked = run(*pip, "--python", python, "check")
    assert checked.returncode == 0, checked.stdout
    return python


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
        (["filter", "rollouts.jsonl"], "filter"),
        (["model", "get", "smollm2", "--out", "model"], "verl"),
        (["data", "make", "reasoning_gym", "--out", "data", "--generator", "leg_counting"], "verl"),
    ],
)
def test_a_command_that_lacks_an_extra_says_which(bare: Path, tmp_path: Path, words: list[str], extra: str) -> None:
    done = run(bare, "-I", "-m", "goldilocks.cli", *words)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"pip install 'goldilocks-rl[{extra}]'" in done.stderr


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
    assert "pip install 'goldilocks-rl[verl]'" in done.stdout


def test_a_name_that_needs_an_extra_says_which(bare: Path) -> None:
    done = run(bare, "-I", "-c", "from goldilocks import PPOBatchFilter")
    assert "pip install 'goldilocks-rl[filter]'" in done.stderr
