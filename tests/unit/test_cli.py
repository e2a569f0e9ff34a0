"""The command itself: its versions, and what it says of a full disk, a path that is not there, a reader that ended."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

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


def test_the_help_of_each_command_says_in_sentences_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    for name in cli.COMMANDS:
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        about = capsys.readouterr().out.split("\n\n")[1]
        assert about[-1] in ".?"
        assert about[-2].isalpha()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux alone has a device that is always full")
def test_a_full_disk_is_one_line_with_the_file(tmp_path: Path, refused: Callable[[list[str]], str]) -> None:
    (tmp_path / "run/rollouts").mkdir(parents=True)
    (full := tmp_path / "page.html").symlink_to("/dev/full")
    said = refused(["report", str(tmp_path / "run"), "--out", str(full)])
    assert said == f"goldilocks: [Errno 28] No space left on device ({full})\n"


def test_a_path_that_does_not_exist_is_one_line(refused: Callable[[list[str]], str]) -> None:
    for words in (["simulate", "--pass-rates"], ["advise"]):
        assert refused([*words, "/no/such/file"]) == "goldilocks: /no/such/file: no such file\n"


def test_a_reader_that_has_ended_is_no_error(tmp_path: Path) -> None:
    """As in ``goldilocks data make ladder --out DIR | head -1``."""
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "goldilocks.cli", "data", "make", "ladder", "--train", "8", "--val", "8"]
    done = subprocess.run(
        [*words, "--out", str(tmp_path)], stdout=write, stderr=subprocess.PIPE, text=True, timeout=100
    )
    os.close(write)
    assert done.returncode == 141
    assert done.stderr == ""
