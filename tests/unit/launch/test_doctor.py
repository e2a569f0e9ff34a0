"""What ``goldilocks doctor`` says of the patches of verl."""

from __future__ import annotations

from pathlib import Path

import pytest

from goldilocks.cli import main
from goldilocks.engine.cpu import PATCHES_VARIABLE
from goldilocks.launch import doctor
from goldilocks.verl.patch import Kind
from goldilocks.verl.patches import PATCHES
from goldilocks.verl.patches.speed import LOG_PROBS

AT_IMPORT = [patch.name for patch in PATCHES if patch.kind is not Kind.TRAINER and patch.possible_on("cpu")]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_device", lambda: "cpu")
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.delenv(PATCHES_VARIABLE, raising=False)


def test_it_names_the_live_ones() -> None:
    (finding,) = doctor.patches(["trainer goldilocks", *AT_IMPORT])
    assert finding.ok
    assert finding.detail == f"{len(AT_IMPORT)} of {len(AT_IMPORT)} live: {', '.join(AT_IMPORT)}"


def test_it_says_what_the_others_cost_and_that_is_no_failure() -> None:
    live = [name for name in AT_IMPORT if name != LOG_PROBS.name]
    _, missing = doctor.patches(live)
    assert (missing.what, missing.ok, missing.essential) == ("log-probs", False, False)
    assert "verl's source is not the one it is for" in missing.detail
    assert LOG_PROBS.without in missing.remedy


def test_it_says_which_ones_the_user_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATCHES_VARIABLE, "cpu,speed")
    live = [patch.name for patch in PATCHES if patch.kind in (Kind.CPU, Kind.SPEED)]
    findings = list(doctor.patches(live))[1:]
    assert {finding.detail for finding in findings} == {"not live: left out by GOLDILOCKS_PATCHES=cpu,speed"}
    assert "failures-told" in {finding.what for finding in findings}


def test_quick_starts_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "no such program"))
    assert main(["doctor", "--quick", "--runs", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("ok    python")
    assert "plug-in" not in said
