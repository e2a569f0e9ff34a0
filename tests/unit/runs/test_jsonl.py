"""JSON lines are read strictly, as far as they are whole, or as they come."""

from __future__ import annotations

from pathlib import Path

import pytest

from goldilocks.runs.files import Lines, Tail, read_objects


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.jsonl"


def test_every_object_is_read_and_empty_lines_are_passed_over(file: Path) -> None:
    file.write_text('{"a": 1}\n\n  \n{"a": "é"}')
    assert list(read_objects(file)) == list(Lines(file)) == [{"a": 1}, {"a": "é"}]


@pytest.mark.parametrize(
    ("line", "message"), [(b'{"a": ', "not JSON"), (b"[1]", "this is a list"), (b'"\xff"', "not JSON")]
)
def test_a_line_that_holds_no_object_is_named_or_counted(file: Path, line: bytes, message: str) -> None:
    file.write_bytes(b'{"a": 1}\n' + line + b"\n" + b'{"a": 2}\n')
    with pytest.raises(ValueError, match=rf"a.jsonl:2: .*{message}"):
        list(read_objects(file))
    lines = Lines(file)
    assert list(lines) == [{"a": 1}, {"a": 2}]
    assert lines.broken == 1


def test_a_tail_gives_what_is_new_and_passes_over_what_is_broken(file: Path) -> None:
    tail = Tail(file)
    assert list(tail.new()) == []
    file.write_text('{"a": 1}\nnoise\n{"a"')
    assert list(tail.new()) == [{"a": 1}]
    with file.open("a") as open_file:
        open_file.write(": 2}\n")
    assert list(tail.new()) == [{"a": 2}]
    assert list(tail.new()) == []
