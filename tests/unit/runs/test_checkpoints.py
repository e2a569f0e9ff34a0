"""State on disk, and the last checkpoint of a run on TRL that was written to its end."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path

import numpy as np
import pytest

from goldilocks.runs.checkpoints import begin_again, last_whole, load_state, save_state


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    state = {"a": [1, {"b": np.arange(5)}], "big": 2**70, "text": "ü", "none": None, "small": np.float32(0.5)}
    save_state(state, tmp_path / "state.npz")
    loaded = load_state(tmp_path / "state.npz")
    assert loaded["a"][1]["b"].tolist() == [0, 1, 2, 3, 4]
    assert {**loaded, "a": None} == {**state, "a": None}


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


def written(root: Path, step: int, state: str | None = '{"global_step": 1}') -> Path:
    folder = root / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    if state is not None:
        (folder / "trainer_state.json").write_text(state)
    return folder


@pytest.mark.parametrize(
    ("state", "said"), [(None, "it has no trainer_state.json"), ('{"best', "its trainer_state.json breaks off")]
)
def test_a_checkpoint_that_was_not_written_to_its_end_is_skipped_and_named(
    state: str | None, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, torn = written(tmp_path, 4), written(tmp_path, 10, state)
    with caplog.at_level(logging.WARNING):
        assert last_whole(tmp_path) == whole
    assert f"{torn} is skipped: {said}" in caplog.text


def test_a_folder_without_a_whole_checkpoint_has_none_and_one_that_is_written_again_counts_once_it_is_whole(
    tmp_path: Path,
) -> None:
    assert last_whole(tmp_path / "nowhere") is None
    written(tmp_path, 1, None)
    (tmp_path / "checkpoint-best").mkdir()
    assert last_whole(tmp_path) is None
    before, again = written(tmp_path, 2), written(tmp_path, 4)
    begin_again(again)
    assert last_whole(tmp_path) == before
    begin_again(tmp_path / "checkpoint-6")  # written for the first time
