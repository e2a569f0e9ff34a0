"""Rows that wait in the queue: saved, put back as they were, and freed when nobody needs them."""

from __future__ import annotations

import pickle
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from PIL import Image
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType
from verl_world import Queue

from goldilocks.types import Rollout
from goldilocks.verl.store.queue_rows import QueueRows, Tag, Unfinished

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
    QueueRows(Unfinished(list)).save([rollout(queue, "g0", 0), rollout(queue, "g1", 0)], tmp_path)
    queue.rows.clear()
    queue.tags.clear()

    rows = QueueRows(Unfinished(list))
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


def test_a_copy_of_a_tag_is_changed_by_itself_and_any_dict_elsewhere() -> None:
    tag = Tag(global_steps=3, versions=[[1, 2], [2, 5]])
    copy = deepcopy([tag])[0]
    copy["global_steps"] = 4
    assert tag == {"global_steps": 3, "versions": [[1, 2], [2, 5]]}
    assert copy == {**tag, "global_steps": 4}
    assert copy["versions"] is tag["versions"]
    assert type(pickle.loads(pickle.dumps(tag))) is dict
    message = ZMQMessage.create(request_type=ZMQRequestType.SET_CUSTOM_META, sender_id="sender", body={"tags": [tag]})
    assert ZMQMessage.deserialize(message.serialize()).body["tags"] == [dict(tag)]


def test_rows_that_verl_frees_are_not_freed_again(queue: Queue) -> None:
    rows = QueueRows(Unfinished(list))
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
    QueueRows(Unfinished(list)).save([], tmp_path)
    before = dict(queue.rows)
    QueueRows(Unfinished(list)).load(tmp_path)
    assert queue.rows == before


def test_answers_of_a_group_that_nobody_needs_are_neither_kept_nor_saved(queue: Queue, tmp_path: Path) -> None:
    QueueRows(Unfinished(lambda: [["g0", 0, []], ["g1", 1, []]])).save([], tmp_path / "first")
    rows = QueueRows(Unfinished(list))
    assert set(rows.load(tmp_path / "first")) == {("g0", 0), ("g1", 1)}
    rows.retain({"g1"})
    rows.save([], tmp_path / "second")
    assert set(QueueRows(Unfinished(list)).load(tmp_path / "second")) == {("g1", 1)}
