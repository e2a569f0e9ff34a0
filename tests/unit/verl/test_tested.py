"""A version that the tests were not run with is said so, once and by name."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from goldilocks.launch import doctor
from goldilocks.verl import tested

ROOT = Path(__file__).parents[3]


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the file that has the version of a verl which comes first on the path."""
    file = tmp_path / "verl" / "version" / "version"
    file.parent.mkdir(parents=True)
    (tmp_path / "verl" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "verl", raising=False)
    return file


def spoken_of_verl() -> doctor.Finding:
    return next(finding for finding in doctor.versions() if finding.what == "verl")


@pytest.mark.parametrize("version", ["0.9.1", "0.10.0.dev", "0.10.0.dev0"])
def test_a_tested_version_is_not_spoken_of(verl: Path, version: str) -> None:
    verl.write_text(f"{version}\n")
    assert tested.installed("verl") == version
    assert tested.untested("verl") is None
    assert spoken_of_verl().ok


@pytest.mark.parametrize("version", ["0.9.2", "0.10.0", "0.10.0.dev1"])
def test_another_version_is_named_with_those_that_were_tested_and_is_no_failure(verl: Path, version: str) -> None:
    verl.write_text(version)
    note = tested.untested("verl")
    assert note is not None
    assert note.startswith(f"Goldilocks was tested with verl 0.9.1 and 0.10.0.dev0, not with {version}: ")
    finding = spoken_of_verl()
    assert (finding.ok, finding.essential) == (False, False)
    assert finding.detail == f"{version}; tested with 0.9.1 and 0.10.0.dev0"


@pytest.mark.parametrize("version", ["0.8.0", "no version"])
def test_a_verl_that_is_too_old_is_a_failure(verl: Path, version: str) -> None:
    verl.write_text(version)
    assert not tested.is_tested("verl", version)
    finding = spoken_of_verl()
    assert (finding.ok, finding.essential) == (False, True)
    assert finding.remedy == "pip install 'verl>=0.9.1'"


def test_a_package_that_is_not_installed_is_not_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tested.TESTED, "no-such-package", ("==1",))
    assert tested.installed("no-such-package") is None
    assert tested.untested("no-such-package") is None


@pytest.mark.parametrize("package", ["torch", "transformers", "ray", "trl"])
def test_the_installed_set_is_a_tested_one(package: str) -> None:
    assert tested.is_tested(package, metadata.version(package))


def test_the_extra_asks_for_a_verl_that_was_tested() -> None:
    (asked,) = re.findall(r'^  "verl([<>=][^"]*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    verl = SpecifierSet(asked)
    for spec in tested.TESTED["verl"]:
        assert verl.contains(spec.removeprefix("=="), prereleases=True)
    assert not verl.contains("0.10.0")
    assert not verl.contains("0.9.0")


@pytest.mark.parametrize("package", tested.TESTED)
def test_the_page_of_versions_has_a_line_for_each_tested_one(package: str) -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    named = " ".join(line for line in page.splitlines() if line.lower().startswith(f"| {package} "))
    for spec in tested.TESTED[package]:
        ends = [part.version for part in SpecifierSet(spec) if part.operator != "<"]
        assert all(end in named for end in ends), (package, spec)
