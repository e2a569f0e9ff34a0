"""The command itself: its versions, and the words that a shell completes."""

from __future__ import annotations

import platform
import shlex
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

from goldilocks import __version__, cli
from goldilocks.config.recipes import names


def test_the_version_says_what_it_runs_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    printed = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert printed["goldilocks"] == __version__
    assert printed["python"].split() == [platform.python_version(), platform.machine()]
    assert printed["verl"] == metadata.version("verl")
    assert printed["torch"] == metadata.version("torch")


@pytest.fixture(scope="module")
def script() -> str:
    return cli.bash()


def in_bash(script: str, *words: str) -> list[str]:
    """Return what bash offers for the last of these words."""
    typed = f"COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}"
    asked = "\n".join([script, typed, "_goldilocks", r"printf '%s\n' ${COMPREPLY[@]}"])
    return subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_commands_recipes_options_and_choices(script: str) -> None:
    assert in_bash(script, "goldilocks", "") == [*cli.COMMANDS, "--help", "--version"]
    assert in_bash(script, "goldilocks", "re") == ["report"]
    assert set(in_bash(script, "goldilocks", "train", "")) >= set(names())
    assert in_bash(script, "goldilocks", "report", "--no") == ["--no-png"]
    assert in_bash(script, "goldilocks", "model", "ma") == ["make"]
    assert in_bash(script, "goldilocks", "completion", "") == ["--help", *cli.SCRIPTS]
    assert in_bash(script, "goldilocks", "unknown", "") == []


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_takes_the_script(tmp_path: Path) -> None:
    (tmp_path / "script").write_text(cli.zsh())
    asked = "autoload -Uz compinit && compinit -D -u && source ./script && print ${_comps[goldilocks]}"
    done = subprocess.run(["zsh", "-fc", asked], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "_goldilocks" in done.stdout


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_commands_and_options(tmp_path: Path) -> None:
    (tmp_path / "script").write_text(cli.fish())
    asked = "source script; complete -C 'goldilocks re'; complete -C 'goldilocks report --no'"
    words = ["fish", "--no-config", "-c", asked]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["report", "--no-png"]
