"""Prompts' texts by their keys: from the answers that were dumped and from the data the run was trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from goldilocks.nested import value_at
from goldilocks.runs.dumps import Dump
from goldilocks.types import content_key


def prompt_texts(keys: Iterable[int], config: Mapping[str, Any], dumps: Sequence[Dump]) -> dict[int, str]:
    """The texts of these prompts, as far as they can be found."""
    wanted, texts = set(keys), {}
    for content, text in _contents(config, dumps):
        key = content_key(content)
        if key in wanted:
            texts[key] = text
            if len(texts) == len(wanted):
                break
    return texts


def _contents(config: Mapping[str, Any], dumps: Sequence[Dump]) -> Iterator[tuple[object, str]]:
    """Everything that a key may be the hash of, with its text."""
    for dump in dumps:
        for group in dump.groups:
            yield group.prompt, group.prompt
    column = value_at(config, "data.prompt_key") or "prompt"
    for file in _training_files(config):
        for prompt in _column(file, column):
            yield prompt, _text(prompt)


def _training_files(config: Mapping[str, Any]) -> list[Path]:
    files = value_at(config, "data.train_files")
    names = [files] if isinstance(files, str) else files if isinstance(files, list) else []
    return [Path(name).expanduser() for name in names if isinstance(name, str)]


def _column(file: Path, name: str) -> list[Any]:
    """A parquet file's column; nothing where the data have moved on since the run."""
    if file.suffix != ".parquet" or not file.is_file():
        return []
    try:
        return list(pq.read_table(file, columns=[name]).column(0).to_pylist())
    except (pa.ArrowException, KeyError, IndexError):  # not the file it was: the keys stand in for the texts
        return []


def _text(prompt: object) -> str:
    """A chat as its messages, one after the other."""
    if not isinstance(prompt, list):
        return str(prompt)
    return "\n".join(str(turn.get("content")) if isinstance(turn, dict) else str(turn) for turn in prompt)
