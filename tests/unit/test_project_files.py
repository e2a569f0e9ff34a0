"""The files around the code are true: workflows, hooks, locked versions, the changelog and the checks of the wheel."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import check_wheel
import pytest
import release_notes
import yaml
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[import-not-found,no-redef]

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text()
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
TARGETS = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())  # type: ignore[index]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FOR_CONTRIBUTORS = {"dev", "docs"}  # extras that no command of the package needs
ENVIRONMENTS = [(python, machine) for python in ("3.10", "3.11", "3.12") for machine in ("x86_64", "aarch64")]


def commands(job: dict[str, Any]) -> list[list[str]]:
    """Return the words of each command that a job runs by make."""
    lines = [line for step in job["steps"] for line in step.get("run", "").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True)) and words[0] == "make"]


def targets(words: list[str]) -> list[str]:
    """Return the targets of a make command: not its options, its variables, nor what a redirection writes."""
    named = words[1 : words.index(">")] if ">" in words else words[1:]
    return [word for word in named if "=" not in word and not word.startswith("-")]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.name)
def test_every_job_calls_make_targets_that_exist(workflow: Path) -> None:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    called = {name: [target for words in commands(job) for target in targets(words)] for name, job in jobs.items()}
    assert [name for name, named in called.items() if not named] == []
    assert {target for named in called.values() for target in named} - TARGETS == set()


def test_the_workflows_lint_test_and_release() -> None:
    jobs = [job for file in WORKFLOWS for job in yaml.safe_load(file.read_text())["jobs"].values()]
    called = {target for job in jobs for words in commands(job) for target in targets(words)}
    assert called >= {"lint", "unit", "test", "test-all", "test-vllm", "test-verl"}
    assert called >= {"docs-check", "docs-site", "dist", "notes"}


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_every_target_has_a_rule() -> None:
    done = subprocess.run(
        ["make", "--dry-run", *sorted(TARGETS)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_hooks_run_what_make_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1]  # type: ignore[index]
    linted = [line.strip().replace("$(BIN)", ".venv/bin").removesuffix(" .") for line in recipe.splitlines()]
    assert [hook["entry"] for hook in hooks] == [line.removesuffix(" --check") for line in linted]


def test_the_wheel_is_checked_with_every_extra() -> None:
    extras = set(PROJECT["project"]["optional-dependencies"]) - FOR_CONTRIBUTORS
    assert set(check_wheel.CHECKS) == {check_wheel.BARE, *extras}


def test_the_citation_names_the_newest_release_and_the_package_that_or_a_dev_version_after_it() -> None:
    written = release_notes.versions()
    unreleased, released, *_ = release_notes.notes((ROOT / "CHANGELOG.md").read_text())
    assert (unreleased, written.pop("CITATION.cff")) == ("Unreleased", released)
    (package,) = map(Version, set(written.values()))
    assert package == Version(released) or (package.is_devrelease and package > Version(released))
    assert f"## [{released}] - {citation()['date-released']}" in (ROOT / "CHANGELOG.md").read_text()


def citation() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "CITATION.cff").read_text())


def test_a_releases_notes_are_its_part_of_the_changelog(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    version, released = PROJECT["project"]["version"], citation()["version"]
    for file in ("CHANGELOG.md", *release_notes.VERSIONS):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text((ROOT / file).read_text().replace(f'"{version}"', f'"{released}"'))
    assert release_notes.main(f"v{released}", tmp_path) == 0
    assert capsys.readouterr().out.strip() == release_notes.notes((ROOT / "CHANGELOG.md").read_text())[released]
    assert release_notes.main("v99.0.0") == 1
    assert f"pyproject.toml says {version}" in capsys.readouterr().err


def test_make_train_installs_what_training_needs_and_make_test_the_rest() -> None:
    assert re.search(r"^train: \$\(TRAINS\)", MAKEFILE, re.MULTILINE)
    assert re.search(r"^test: \$\(READY\)", MAKEFILE, re.MULTILINE)
    extras = PROJECT["project"]["optional-dependencies"]
    assert re.findall(r"--editable '\.\[(\w+)\]'", MAKEFILE) == ["verl", "dev"]
    assert re.search(r"^\$\(VLLM\)/\.ready: \$\(READY\)", MAKEFILE, re.MULTILINE), "which has what its tests need"
    names = {Requirement(line).name for line in extras["verl"]}
    assert not names & {Requirement(line).name for extra in ("tasks", "docs") for line in extras[extra]}


def wanted() -> list[Requirement]:
    """Return what the package, its extras, its tools and constraints.txt ask for, but for the package itself."""
    lines = [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["tools"]]
    for extra in PROJECT["project"]["optional-dependencies"].values():
        lines += extra
    lines += [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1].isalnum()]
    return [one for one in map(Requirement, lines) if one.name != PROJECT["project"]["name"]]


@pytest.mark.parametrize(("python", "machine"), ENVIRONMENTS)
def test_the_lock_has_one_version_that_fits_of_everything_asked_for(python: str, machine: str) -> None:
    here = default_environment() | {"python_version": python, "python_full_version": f"{python}.0"}
    here |= {"platform_machine": machine, "sys_platform": "linux"}
    pins: dict[str, list[str]] = {}
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    for one in (Requirement(line.partition("  #")[0]) for line in lines if line[:1].isalnum()):
        if one.marker is None or one.marker.evaluate(here):  # type: ignore[arg-type]
            pins.setdefault(canonicalize_name(one.name), []).append(str(one.specifier).removeprefix("=="))
    assert {name: versions for name, versions in pins.items() if len(versions) != 1} == {}
    due = [one for one in wanted() if one.marker is None or one.marker.evaluate(here)]  # type: ignore[arg-type]
    missing = [str(one) for one in due if pins.get(canonicalize_name(one.name)) is None]
    wrong = [str(one) for one in due if not one.specifier.contains(pins[canonicalize_name(one.name)][0])]
    assert (missing, wrong) == ([], [])
