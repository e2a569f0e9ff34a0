"""Saved rollouts come back as the rows that were written, and what cannot be read says where in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_files import write_records

from goldilocks.runs.records import columns_of, group_uid, read_dumps, read_records, whole_rollouts
from goldilocks.types import row_key, split_row_key

ROWS = [
    {"uid": "a", "reward": 1.0, "length": 12, "text": "first\nsecond, with a comma", "solved": True},
    {"uid": "b", "reward": -0.5, "length": 7, "text": "Übung", "solved": False},
]


def verl_row(step: int, score: float, **extra: object) -> dict[str, object]:
    return {"input": "2+2=", "output": "4", "gts": "4", "score": score, "step": step, **extra}


@pytest.mark.parametrize("extension", ["jsonl", "parquet", "JSONL"])
def test_written_rows_are_read_back_as_they_were(tmp_path: Path, extension: str) -> None:
    path = tmp_path / "deep" / f"rows.{extension}"
    write_records(path, ROWS)
    assert read_records(path) == ROWS


def test_csv_columns_get_the_type_all_their_values_have_and_may_be_longer_than_a_block(tmp_path: Path) -> None:
    path, long = tmp_path / "rows.csv", "x" * 3_000_000
    path.write_text('uid,reward,text\na,1,"two\nlines"\nb,0.5,x\n')
    assert read_records(path) == [
        {"uid": "a", "reward": 1.0, "text": "two\nlines"},
        {"uid": "b", "reward": 0.5, "text": "x"},
    ]
    path.write_text(f"uid,text\na,{long}\n")
    assert read_records(path)[0]["text"] == long


def test_a_directory_of_verl_dumps_is_read_in_the_order_of_its_steps(tmp_path: Path) -> None:
    for step in (10, 9, 1):
        write_records(tmp_path / f"{step}.jsonl", [verl_row(step, 1.0), verl_row(step, 0.0)])
    write_records(tmp_path / "summary.jsonl", [{"not": "a dump"}])
    assert [row["step"] for row in read_records(tmp_path)] == [1, 1, 9, 9, 10, 10]


def test_verl_v1_dumps_are_grouped_by_what_precedes_session_and_index() -> None:
    rows = [verl_row(1, 0.0, uid="3f_a_0_0"), verl_row(1, 0.0, uid="3f_a_11_0"), verl_row(1, 0.0, uid="whole")]
    assert list(map(group_uid, rows)) == ["3f_a", "3f_a", "whole"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"a": 1}\n{"a": \n', r"rows\.jsonl:2: not JSON"),
        ("rows.jsonl", "", r"rows\.jsonl: the file holds no rows"),
        ("rows.csv", "", r"rows\.csv: the file holds no rows"),
        ("rows.csv", "a,b\n", r"rows\.csv: the file holds no rows"),
        ("rows.csv", "a,b\n1,2\n3\n", r"rows\.csv:3: .*Expected 2 columns, got 1"),
        ("rows.csv", b"\xff\xfea,b\n\x00", r"rows\.csv"),
        ("rows.parquet", "not parquet", r"rows\.parquet: not a parquet file"),
        ("rows.txt", "a", r"rows\.txt: unknown extension '\.txt'; accepted are \.jsonl, \.csv, \.parquet"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError, match=message) as caught:
        read_records(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_directory_without_dumps_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.jsonl: no such file"):
        read_records(tmp_path / "gone.jsonl")
    with pytest.raises(ValueError, match=r"no <step>\.jsonl file"):
        read_records(tmp_path)


def test_verls_own_writer_is_read_back(tmp_path: Path) -> None:
    ray_trainer = pytest.importorskip("verl.trainer.ppo.ray_trainer")
    v1 = pytest.importorskip("verl.trainer.ppo.v1.trainer_base")
    samples = (["2+2=", "2+2="], ["4", "5"], ["4", "4"], [1.0, 0.0])
    ray_trainer.RayPPOTrainer._write_generations(*samples, {"acc": [1, 0]}, str(tmp_path), 3)
    v1_class = next(c for c in vars(v1).values() if hasattr(c, "_write_generations"))
    v1_class._write_generations(*samples, {"uid": ["u_0_0", "u_1_0"]}, str(tmp_path), 4)
    rows = read_records(tmp_path)
    assert rows[0] == {"input": "2+2=", "output": "4", "gts": "4", "score": 1.0, "step": 3, "acc": 1}
    assert list(map(group_uid, rows)) == ["3/2+2=", "3/2+2=", "u", "u"]
    assert json.loads((tmp_path / "4.jsonl").read_text().splitlines()[0])["uid"] == "u_0_0"


def test_the_name_of_a_row_says_its_group_and_rollout() -> None:
    assert split_row_key(row_key("g12", 3, 0)) == ("g12", 3)
    assert split_row_key(row_key("a_1_b", 0, 2)) == ("a_1_b", 0)  # a group may have any name
    with pytest.raises(ValueError, match=r"'g12' is not the name of a row: \{group\}_\{rollout\}_\{part\}"):
        split_row_key("g12")


def test_columns_are_those_of_the_rows_and_of_their_extra_info():
    rows = [{"input": "a", "extra_info": {"level": 3}}, {"input": "b", "extra_info": None, "level": 4}, {"input": "c"}]
    found = columns_of(rows)
    assert found["input"] == ["a", "b", "c"]
    assert found["level"] == [3, 4, None]


def test_parts_of_a_rollout_in_a_dump_are_one_row(tmp_path: Path) -> None:
    rows = [
        verl_row(1, 1.0, uid=row_key("g", rollout, part)) | {"output": f"{rollout}{part}"}
        for rollout, parts in enumerate((2, 1, 3))
        for part in range(parts)
    ]
    write_records(tmp_path / "1.jsonl", rows)
    read = read_records(tmp_path)
    assert [row["output"] for row in read] == ["00\n01", "10", "20\n21\n22"]
    assert [row["uid"] for row in read] == ["g_0_0", "g_1_0", "g_2_0"]
    assert list(map(group_uid, read)) == ["g"] * 3
    (dump,) = read_dumps(tmp_path)
    assert [group.scores for group in dump.groups] == [[1.0, 1.0, 1.0]]


def test_a_rollout_is_read_without_the_rest_of_its_file() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from (verl_row(1, 1.0, uid=key) | {"output": key} for key in ("g_0_0", "g_0_1", "g_1_0"))
        yield from ({"output": "not a dump"}, {"output": "not a dump"})
        raise AssertionError("the rest was read")

    rollouts = whole_rollouts(rows())
    assert [next(rollouts)["output"] for _ in range(3)] == ["g_0_0\ng_0_1", "g_1_0", "not a dump"]
