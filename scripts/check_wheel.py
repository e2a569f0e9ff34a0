#!/usr/bin/env python3
"""Installs the wheel of ``dist/`` in a fresh virtual environment for each extra, and runs one command that needs it.

    python3 scripts/check_wheel.py [bare|filter|report|tasks|trl|verl|all …]       without a name: all of them

``make dist`` builds the wheel first. The versions are those of requirements.lock. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
BARE = "bare"
# What PYTHONPATH shows is not installed again: pip would take a checkout's metadata for the package.
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}


@dataclass(frozen=True)
class Check:
    """A command of the installed package, and what it must print."""

    words: tuple[str, ...]
    prints: str
    prepare: Callable[[Path], object] = lambda folder: None


def write_run(folder: Path) -> None:
    """Write the metrics of three steps, as a run does."""
    lines = [{"step": step, "data": {"critic/score/mean": 0.1 * step}} for step in (1, 2, 3)]
    (folder / "run").mkdir()
    (folder / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


FILTER = """
import torch
from goldilocks import PPOBatchFilter
row = torch.arange(16)
batch = {"rewards": (row % 2).float(), "response_lengths": 10 + row}
kept, _ = PPOBatchFilter({"target_group_size": 4}).filter_batch(batch, (row // 4).tolist(), return_indices=True)
print(len(kept), "of 16 rows")
"""

CHECKS = {
    BARE: Check(("goldilocks", "simulate", "--rollouts", "500", "--target-groups", "8"), "thompson_contrast"),
    "filter": Check(("python", "-c", FILTER), "16 of 16 rows"),
    "report": Check(("goldilocks", "report", "run"), "report.html", write_run),
    "trl": Check(("python", "-c", "from goldilocks.trl import GoldilocksGRPOTrainer as T; print(T)"), "GRPOTrainer"),
    "tasks": Check(
        ("goldilocks", "data", "make", "reasoning_gym", "--generator", "leg_counting", "--out", "legs"), "train.parquet"
    ),
    "verl": Check(("goldilocks", "doctor"), "plug-in"),
    "all": Check(("goldilocks", "train", "task=gsm8k", "--cfg", "job"), "goldilocks:"),
}


def install(wheel: Path, extra: str, folder: Path) -> Path:
    """Make an environment with the wheel and this extra; return its folder of programs."""
    venv.create(folder / "venv", with_pip=True)
    bin_ = folder / "venv" / "bin"
    wanted = str(wheel) if extra == BARE else f"{wheel}[{extra}]"
    pip = [str(bin_ / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    for words in (["install", "--upgrade", "pip"], ["install", "--constraint", str(LOCK), wanted], ["check"]):
        subprocess.run([*pip, *words], check=True, env=CLEAN)
    return bin_


def check(wheel: Path, extra: str) -> bool:
    """Install the wheel with this extra and run its command; print what went wrong, if something did."""
    what, begun = CHECKS[extra], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wheel-") as name:
        folder = Path(name)
        bin_ = install(wheel, extra, folder)
        what.prepare(folder)
        command = [str(bin_ / what.words[0]), *what.words[1:]]
        done = subprocess.run(command, cwd=folder, env=CLEAN, capture_output=True, text=True, check=False)
    good = done.returncode == 0 and what.prints in done.stdout
    took = time.monotonic() - begun
    print(f"{'ok   ' if good else 'FAILS'} {extra}: {' '.join(what.words)} ({took:.0f} s)", flush=True)
    if not good:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
    return good


def main(words: Sequence[str] | None = None) -> int:
    """Check each extra that is asked for; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("extras", nargs="*", metavar="EXTRA", choices=[*CHECKS, []], help=", ".join(CHECKS))
    asked = parser.parse_args(words).extras or list(CHECKS)
    (wheel,) = (ROOT / "dist").glob("*.whl")
    results = [check(wheel, extra) for extra in asked]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
