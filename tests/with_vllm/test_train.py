"""Cancelling on vLLM: what nobody needs ends inside the engine, and a killed run goes on."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from .conftest import BENCHMARKS, Train, kill_after_a_step, make_model, steps

pytestmark = [pytest.mark.integration, pytest.mark.timeout(2400)]

TOKENS = 240  # of an answer that is not aborted


def test_what_a_full_batch_does_not_need_ends_inside_the_engine_and_a_killed_run_goes_on(
    train: Train, tmp_path: Path
) -> None:
    script, run = runpy.run_path(str(BENCHMARKS / "cancelling.py")), tmp_path / "test"
    words = (
        *(*script["words"]("vllm", 1000, tmp_path), "trainer.save_freq=1"),
        # Long enough that an abort finds some of a group's answers unfinished, however fast the engine is.
        *(f"data.max_response_length={TOKENS}", f"actor_rollout_ref.model.path={make_model(tmp_path / 'model', 512)}"),
    )
    saved = kill_after_a_step(train(*words), run)
    resumed = train(*words, f"trainer.total_training_steps={saved + 2}")
    _, err = resumed.communicate()
    assert resumed.returncode == 0, err
    after = {step: data for step, data in steps(run).items() if step > saved}
    assert list(after) == [saved + 1, saved + 2]
    last = after[saved + 2]
    assert last["timing_s/gen_render"] > 0  # rollouts are made many at a time
    assert last["aborts/ended"] > 0
    assert all(step["aborts/left"] == 0 for step in after.values())
    assert last["aborts/tokens"] < TOKENS * last["aborts/ended"]
