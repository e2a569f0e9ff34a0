"""Texts of prompts by their keys, found in the dumped answers and in the training data."""

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
    """Return the texts of these prompts, as far as they are found."""
    wanted, texts = set(keys), {}
    for content, text in _contents(config, dumps):
        key = content_key(content)
        if key in wanted:
            texts[key] = text
            if len(texts) == len(wanted):
                break
    return texts


def _contents(config: Mapping[str, Any], dumps: Sequence[Dump]) -> Iterator[tuple[object, str]]:
    """Yield everything that a key may be the hash of, with its text."""
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
    """Return a column of a parquet file; empty if the file has changed since the run."""
    if file.suffix != ".parquet" or not file.is_file():
        return []
    try:
        return list(pq.read_table(file, columns=[name]).column(0).to_pylist())
    except (pa.ArrowException, KeyError, IndexError):  # the file has changed: keys are shown in place of texts
        return []


def _text(prompt: object) -> str:
    """Return the messages of a chat as one text."""
    if not isinstance(prompt, list):
        return str(prompt)
    return "\n".join(str(turn.get("content")) if isinstance(turn, dict) else str(turn) for turn in prompt)
