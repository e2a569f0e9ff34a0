"""Cancelling on vLLM: what nobody needs ends inside the engine, and a killed run goes on."""

from __future__ import annotations

import runpy
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from .conftest import BENCHMARKS, Train, steps

pytestmark = [pytest.mark.integration, pytest.mark.timeout(2400)]


def test_adaptive_cancels_inside_the_engine_and_a_killed_run_goes_on(train: Train, tmp_path: Path) -> None:
    script = runpy.run_path(str(BENCHMARKS / "cancelling.py"))
    words = (*script["words"]("vllm", 3, tmp_path), "trainer.save_freq=1")
    process = train(*words)
    while process.poll() is None and not (tmp_path / "test/checkpoints/latest_checkpointed_iteration.txt").exists():
        time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    resumed = train(*words)
    _, err = resumed.communicate()
    assert resumed.returncode == 0, err
    after = steps(tmp_path / "test")
    assert min(after) > 1
    assert max(after) == 3
    last = after[3]
    assert last["aborts/ended"] > 0
    assert all(step["aborts/left"] == 0 for step in after.values())
    assert last["aborts/tokens"] < script["TOKENS"] * last["aborts/ended"]
