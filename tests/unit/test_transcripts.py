"""What the pages say a command prints is what it prints: every ``$ goldilocks …`` block that costs no training.

Words are compared as they stand, ``…`` in a page stands for anything, and a number may differ by a tenth: another CPU
rounds a draw of the simulator differently now and then, and what follows from it is not the same to the last digit.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
from pathlib import Path

import pytest

from goldilocks.cli import main

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
CHECKED = {
    "docs/quick-start.md": ["goldilocks train rollout.n=16", "goldilocks train gropo"],
    "docs/compare.md": [
        "goldilocks compare grpo gropo --budget rollouts=2048 --seeds 2",
        "goldilocks compare grpo dapo --budget rollouts=many --seeds 2",
    ],
    "docs/report.md": ["goldilocks report runs/nowhere"],
    "docs/simulate.md": ["goldilocks simulate"],
}
LONG = {"docs/simulate.md"}  # 50,000 rollouts of each policy: 50 s for every recipe
CASES = [
    pytest.param(page, command, marks=[pytest.mark.slow] if page in LONG else [], id=f"{page}: {command}")
    for page, commands in CHECKED.items()
    for command in commands
]


def shown(page: str, command: str) -> list[str]:
    """Return the lines that the page shows under the command, up to the next command or the end of the block."""
    lines = iter((ROOT / page).read_text().splitlines())
    assert any(line.strip() == f"$ {command}" for line in lines), f"{page} does not show {command!r}"
    return list(itertools.takewhile(lambda line: not line.startswith(("```", "$ ")), lines))


def pattern(line: str) -> re.Pattern[str]:
    """Match the words of a line. The width of a column follows its widest number, so white space may differ."""
    return re.compile("".join(map(_pattern, re.split(rf"({NUMBER.pattern}|…|\s+)", line.strip()))))


def _pattern(part: str) -> str:
    if part.isspace():
        return r"\s+"
    if NUMBER.fullmatch(part):
        return f"({NUMBER.pattern})"
    return ".*" if part == "…" else re.escape(part)


def agrees(expected: str, printed: str) -> bool:
    """Whether a printed line has the words of the expected one, and its numbers to within a tenth."""
    found = pattern(expected).fullmatch(printed.strip())
    wanted = [float(number.replace(",", "")) for number in NUMBER.findall(expected)]
    there = [float(number.replace(",", "")) for number in found.groups()] if found else []
    return found is not None and all(abs(a - b) <= 0.1 * max(abs(b), 1) for a, b in zip(there, wanted, strict=True))


@pytest.mark.parametrize(("page", "command"), CASES)
def test_a_page_shows_what_its_command_prints(
    page: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    with contextlib.suppress(SystemExit):
        main(shlex.split(command)[1:])
    out, err = capsys.readouterr()
    printed = [line for line in (out + err).splitlines() if line.strip()]
    expected = [line for line in shown(page, command) if line.strip()]
    for wanted, line in zip(expected, printed, strict=False):
        if wanted.strip() == "…":  # the rest is left out
            return
        assert agrees(wanted, line), f"{page} has\n{wanted}\nand the command prints\n{line}"
    assert len(expected) == len(printed)
