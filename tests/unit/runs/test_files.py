"""A file or a folder is whole or not there; JSON lines are read strictly, as far as they are whole, or as they come."""

from __future__ import annotations

from pathlib import Path

import pytest

from goldilocks.runs.files import Lines, Tail, cache_folder, make_folder, read_objects, replacing, write_text


def test_a_file_is_replaced_when_it_is_whole_and_one_that_fails_halfway_leaves_the_old_one_alone(
    tmp_path: Path,
) -> None:
    file = tmp_path / "a.txt"
    write_text(file, "old")
    with pytest.raises(KeyboardInterrupt), replacing(file) as temporary:  # noqa: PT012
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    with replacing(file) as temporary:
        temporary.write_text("new")
        assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert file.read_text() == "new"


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "a").touch()

    for _ in range(2):
        make_folder(tmp_path / "deep" / "folder", make)
    assert len(made) == 1
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["folder"]
    assert (tmp_path / "deep" / "folder" / "a").is_file()


def test_of_two_processes_that_make_a_folder_the_quicker_one_has_made_it(tmp_path: Path) -> None:
    path = tmp_path / "folder"

    def slow(folder: Path) -> None:
        (folder / "slow").touch()
        make_folder(path, lambda quicker: (quicker / "quick").touch())

    make_folder(path, slow)
    assert [file.name for file in path.iterdir()] == ["quick"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_fails_halfway_is_not_there(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "a").touch()
        raise RuntimeError

    with pytest.raises(RuntimeError):
        make_folder(tmp_path / "folder", fail)
    assert list(tmp_path.iterdir()) == []


def test_the_cache_is_where_the_user_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "goldilocks"


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


def test_a_tail_reads_a_new_file_of_the_same_name_from_its_beginning(file: Path) -> None:
    file.write_text('{"a": "of an earlier start"}\n')
    tail = Tail(file)
    file.rename(file.with_name("earlier"))
    file.write_text('{"a": 1}\n')
    assert list(tail.new()) == [{"a": 1}]
