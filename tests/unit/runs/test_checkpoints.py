"""State on disk."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from goldilocks.runs.checkpoints import load_state, save_state


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    state = {"a": [1, {"b": np.arange(5)}], "big": 2**70, "text": "ü", "none": None, "small": np.float32(0.5)}
    save_state(state, tmp_path / "state.npz")
    loaded = load_state(tmp_path / "state.npz")
    assert loaded["a"][1]["b"].tolist() == [0, 1, 2, 3, 4]
    assert {key: loaded[key] for key in ("big", "text", "none", "small")} == {
        "big": 2**70,
        "text": "ü",
        "none": None,
        "small": 0.5,
    }


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    save_state({"step": 1}, tmp_path / "state.npz")
    with pytest.raises(TypeError):
        save_state({"step": object()}, tmp_path / "state.npz")
    assert load_state(tmp_path / "state.npz") == {"step": 1}


@pytest.mark.parametrize("content", [b"", b"not a state", pickle.dumps({"step": 1})])
def test_anything_else_is_refused_and_never_executed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.npz").write_bytes(content)
    with pytest.raises(ValueError, match=r"state.npz is not a saved state"):
        load_state(tmp_path / "state.npz")
