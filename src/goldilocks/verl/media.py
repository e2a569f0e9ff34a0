"""Refuses images, films and sounds that a run could not read, before anything is started."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from goldilocks.dotted_keys import value_at
from goldilocks.errors import require
from goldilocks.hashing import MEDIA

SPLITS = ("train", "val")


def check_text(data: Any, reader: str, splits: Sequence[str] = SPLITS) -> None:
    """Raise ``ValueError`` for data with more than text, as far as the files are on this machine.

    ``reader`` is what takes text, with what to use in its place.
    """
    for key, column, file in _found(data, splits):
        require(False, f"data.{key}", column, f"a name that is no column of {file}: {reader}")


def check_readable(config: Any) -> None:
    """Raise ``ValueError`` for data with more than text that verl would fail to read, after minutes or in silence."""
    found = next(_found(config.data), None)
    if found is None or value_at(config, "data.custom_cls.path"):  # a data set of the user's own reads as it likes
        return
    key, column, file = found
    problem = _missing_library() or _missing_processor(config.actor_rollout_ref.model)
    require(not problem, f"data.{key}", column, f"a name that is no column of {file}, since {problem}")
    features = value_at(config, "goldilocks.features.kind")
    require(features != "hidden", "goldilocks.features.kind", features, f"text, since {file} has the column {column!r}")


def _found(data: Any, splits: Sequence[str] = SPLITS) -> Iterator[tuple[str, str, Path]]:
    """Yield the keys that name a column of the data, with the column and a file that has it."""
    files = [file for split in splits for file in _parquet(data.get(f"{split}_files"))]
    for key in MEDIA:
        for file in files:
            if data.get(key) in _columns(file):
                yield key, data.get(key), file


def _parquet(files: Any) -> list[Path]:
    names = [files] if isinstance(files, str) else list(files or ())
    return [path for path in (Path(str(name)).expanduser() for name in names) if path.suffix == ".parquet"]


def _columns(file: Path) -> set[str]:
    """Return the columns that have a value somewhere, by what the file says of its chunks."""
    from pyarrow import parquet

    if not file.is_file():
        return set()
    opened = parquet.ParquetFile(file)
    groups = [opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups)]
    leaves = [opened.schema.column(place) for place in range(opened.metadata.num_columns)]
    typed = [place for place, leaf in enumerate(leaves) if str(leaf.logical_type) != "Null"]
    chunks = (group.column(place) for group in groups for place in typed)
    return {chunk.path_in_schema.split(".")[0] for chunk in chunks if not _is_empty(chunk)}


def _is_empty(chunk: Any) -> bool:
    known = chunk.statistics
    return known is not None and known.has_null_count and known.null_count == chunk.num_values


def _missing_library() -> str:
    """verl drops every prompt whose image it cannot read, and says so once a prompt."""
    try:
        importlib.import_module("qwen_vl_utils")
    except Exception as error:  # torchvision raises a RuntimeError where it does not fit torch
        return f"verl reads images with qwen_vl_utils and torchvision, which fail here: {error}"
    return ""


def _missing_processor(model: Any) -> str:
    """verl goes on without a processor that it cannot make, and fails at the first prompt."""
    folder = Path(str(model.get("path"))).expanduser()
    if model.get("trust_remote_code") or not folder.is_dir():
        return ""
    from verl.utils.tokenizer import hf_processor

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made = hf_processor(str(folder), trust_remote_code=False)
    reasons = [str(one.message) for one in said if "processor" in str(one.message)]
    return "" if made is not None else f"verl makes no processor of {folder} ({(reasons or ['it has none'])[-1]})"
