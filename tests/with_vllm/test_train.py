"""Cancelling on vLLM: what nobody needs ends inside the engine."""

from __future__ import annotations

from pathlib import Path

import cancelling
import pytest

pytest.importorskip("vllm")

from .conftest import Train, make_model, steps

pytestmark = [pytest.mark.integration, pytest.mark.timeout(2400)]

TOKENS = 240  # of an answer that is not aborted


def test_what_a_full_batch_does_not_need_ends_inside_the_engine(train: Train, tmp_path: Path) -> None:
    process = train(
        *cancelling.words("vllm", 2, tmp_path),
        # Long enough that an abort finds some of a group's answers unfinished, however fast the engine is.
        *(f"data.max_response_length={TOKENS}", f"actor_rollout_ref.model.path={make_model(tmp_path / 'model', 512)}"),
    )
    _, err = process.communicate()
    assert process.returncode == 0, err
    first, last = steps(tmp_path / "test").values()
    assert last["aborts/ended"] > 0
    assert first["aborts/left"] == last["aborts/left"] == 0
    assert last["aborts/tokens"] < TOKENS * last["aborts/ended"]
