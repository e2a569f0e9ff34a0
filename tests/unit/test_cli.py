"""The command itself: its versions."""

from __future__ import annotations

import platform
from importlib import metadata

import pytest

from goldilocks import __version__, cli


def test_the_version_says_what_it_runs_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    printed = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert printed["goldilocks"] == __version__
    assert printed["python"].split() == [platform.python_version(), platform.machine()]
    assert printed["verl"] == metadata.version("verl")
    assert printed["torch"] == metadata.version("torch")
