"""A run on TRL goes on from the last checkpoint that was written to its end."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from goldilocks.runs.checkpoints import begin_again, last_whole


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


def test_a_folder_without_a_whole_checkpoint_has_none(tmp_path: Path) -> None:
    assert last_whole(tmp_path / "nowhere") is None
    written(tmp_path, 2, None)
    (tmp_path / "checkpoint-best").mkdir()
    assert last_whole(tmp_path) is None


def test_a_checkpoint_that_is_written_again_does_not_count_until_it_is_whole(tmp_path: Path) -> None:
    before, again = written(tmp_path, 2), written(tmp_path, 4)
    begin_again(again)
    assert last_whole(tmp_path) == before
    begin_again(tmp_path / "checkpoint-6")  # written for the first time
