"""Rows that wait in the queue: saved with every value, put back as they were, and freed when nobody needs them."""

from __future__ import annotations

from datetime import date, datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from verl_world import Queue

from goldilocks.types import Rollout
from goldilocks.verl.store import QueueRows, load_rows, save_rows

PICTURE = Image.linear_gradient("L").resize((4, 4))


def rollout(queue: Queue, uid: str, index: int) -> Rollout:
    key = f"{uid}_{index}_0"
    return Rollout(uid, index, reward=1.0, tokens=3, payload=[[key, queue.tags[key]]])


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    queue = Queue(monkeypatch)
    for uid, length in (("g0", 3), ("g1", 5)):
        queue.add(f"{uid}_0_0", version=0, length=length, old_log_probs=-0.5)
        queue.rows[f"{uid}_0_0"]["raw_prompt"] = [{"role": "user", "content": [{"image": PICTURE}, {"bytes": b"\x00"}]}]
        queue.rows[f"{uid}_0_0"]["multi_modal_inputs"] = {"pixel_values": torch.randn(length, 2)}
    return queue


def test_rows_come_back_into_the_queue_as_they_were(queue: Queue, tmp_path: Path) -> None:
    before, tags = {key: dict(row) for key, row in queue.rows.items()}, dict(queue.tags)
    QueueRows(list).save([rollout(queue, "g0", 0), rollout(queue, "g1", 0)], tmp_path)
    queue.rows.clear()
    queue.tags.clear()

    rows = QueueRows(list)
    rows.load(tmp_path)
    assert queue.tags == tags
    for key, fields in before.items():
        assert torch.equal(queue.rows[key]["response_mask"], fields["response_mask"])
        assert torch.equal(queue.rows[key]["old_log_probs"], fields["old_log_probs"])
        image, photo = queue.rows[key]["raw_prompt"][0]["content"]
        assert image["image"].tobytes() == PICTURE.tobytes()
        assert photo == {"bytes": b"\x00"}
        pixels = queue.rows[key]["multi_modal_inputs"]["pixel_values"]
        assert torch.equal(pixels, fields["multi_modal_inputs"]["pixel_values"])
    rows.retain({"g1"})
    assert list(queue.rows) == ["g1_0_0"]


def test_rows_that_verl_frees_are_not_freed_again(queue: Queue) -> None:
    rows = QueueRows(list)
    for uid in ("g0", "g1"):
        rows.put((uid, 0), rollout(queue, uid, 0).payload)
    trained = ["g0_0_0"]
    rows.leave([*trained, "pad0_0_0"])
    queue.kv_clear(trained, "train")
    rows.retain(["g0"])  # it is in hand until the next batch is
    assert list(queue.rows) == []
    rows.retain([])
    assert rows.waiting(but=()).keys == []


def test_nothing_that_waits_is_saved_as_nothing(queue: Queue, tmp_path: Path) -> None:
    QueueRows(list).save([], tmp_path)
    before = dict(queue.rows)
    QueueRows(list).load(tmp_path)
    assert queue.rows == before


def test_answers_of_a_group_that_nobody_needs_are_neither_kept_nor_saved(queue: Queue, tmp_path: Path) -> None:
    QueueRows(lambda: [["g0", 0, []], ["g1", 1, []]]).save([], tmp_path / "first")
    rows = QueueRows(list)
    assert set(rows.load(tmp_path / "first")) == {("g0", 0), ("g1", 1)}
    rows.retain({"g1"})
    rows.save([], tmp_path / "second")
    assert set(QueueRows(list).load(tmp_path / "second")) == {("g1", 1)}


def again(row: Any, folder: Path) -> Any:
    save_rows([row], folder)
    return load_rows(folder)[0]


def test_what_reward_functions_return_comes_back(tmp_path: Path) -> None:
    given = {"acc": np.float32(0.5), "score": np.array(0.5), "hits": np.array([1, 2]), "overlong": torch.tensor(True)}
    row = again(given, tmp_path)
    assert (row["acc"], row["score"].shape) == (0.5, ())
    assert isinstance(row["hits"], np.ndarray)
    assert row["hits"].tolist() == [1, 2]
    assert row["overlong"].dtype is torch.bool
    assert bool(row["overlong"])


@pytest.mark.parametrize(
    "value",
    [
        datetime(2026, 1, 2, 3, tzinfo=timezone.utc),
        datetime(2026, 1, 2),
        date(2026, 1, 2),
        pd.Timestamp("2026-01-02 03:04:05.678901"),
        Decimal("1.10"),
    ],
)
def test_a_column_of_times_or_decimals_comes_back(tmp_path: Path, value: Any) -> None:
    assert again({"at": value, "extra_info": {"day": [value]}}, tmp_path) == {
        "at": value,
        "extra_info": {"day": [value]},
    }


def picture(mode: str) -> Image.Image:
    """Nine by five pixels, of which no two rows are alike."""
    ramp = Image.linear_gradient("L").resize((9, 5))
    return ramp.convert("RGB").convert(mode) if mode != "I;16" else Image.frombytes("I;16", (9, 5), bytes(range(90)))


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "I", "F", "I;16"])
def test_a_picture_comes_back_pixel_by_pixel(tmp_path: Path, mode: str) -> None:
    image = picture(mode)
    content = [{"type": "image", "image": image}, {"type": "text", "text": "What is in it?"}]
    row = again({"raw_prompt": [{"role": "user", "content": content}]}, tmp_path)
    back = row["raw_prompt"][0]["content"][0]["image"]
    assert isinstance(back, Image.Image)
    assert (back.mode, back.size) == (image.mode, image.size)
    assert back.tobytes() == image.tobytes()
    assert back.convert("RGB").tobytes() == image.convert("RGB").tobytes()


def test_the_bytes_of_a_picture_come_back_and_are_stored_once_for_all_rows_that_have_them(tmp_path: Path) -> None:
    photo = bytes(range(256)) * 100
    rows = [{"image": {"bytes": photo, "path": None}, "index": index} for index in range(8)]
    save_rows(rows, tmp_path)
    assert load_rows(tmp_path) == rows
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 2 * len(photo)


def test_what_is_no_value_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither a tensor nor a JSON value, .*: object"):
        save_rows([{"it": object()}], tmp_path)
    with pytest.raises(ValueError, match=r"neither a tensor nor a JSON value, .*: NaTType"):
        save_rows([{"it": pd.NaT}], tmp_path)  # a datetime, whose text is none


MARKS = st.sampled_from(["__tensor__", "__array__", "__pairs__", "__bytes__", "__png__", "__pixels__", "__time__"])
KEYS = st.one_of(MARKS, st.text(max_size=3), st.integers())
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.binary(max_size=5)
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=8,
)


@given(st.lists(VALUES, max_size=3))
def test_any_values_come_back_whatever_their_keys_are_called(tmp_path_factory: Any, rows: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("rows")
    save_rows(rows, folder)
    assert load_rows(folder) == rows


def test_the_pixels_that_the_rollouts_of_a_prompt_share_are_stored_once(tmp_path: Path) -> None:
    pixels = torch.randn(256, 64)
    inputs = [pixels.clone(), pixels.clone(), pixels.bfloat16(), pixels.reshape(64, 256), -pixels]
    save_rows([{"multi_modal_inputs": {"pixel_values": one}} for one in inputs], tmp_path)
    written = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert written < 4 * pixels.nbytes  # of five, one is there twice and one is half as large
    for row, one in zip(load_rows(tmp_path), inputs, strict=True):
        assert row["multi_modal_inputs"]["pixel_values"].dtype == one.dtype
        assert torch.equal(row["multi_modal_inputs"]["pixel_values"], one)
