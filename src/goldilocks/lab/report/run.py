"""A run directory as it is now, complete or not, with a line for everything that is missing.

====================================  ====================================================================
``config.yaml``                       the configuration, resolved
``metrics.jsonl``                     a line per step; ``metrics.1.jsonl``, … of earlier starts
``rollouts/<step>.jsonl``             answers, where ``trainer.rollout_data_dir`` points here
``checkpoints/global_step_N/…``       ``goldilocks.npz``, the collector with its beliefs about the prompts; TRL's are
                                      ``checkpoint-N/…``, there or in the run's own folder
====================================  ====================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from goldilocks.core.source import conversation_text
from goldilocks.dotted_keys import value_at
from goldilocks.errors import require
from goldilocks.hashing import MEDIA, content_key, with_media
from goldilocks.runs.checkpoints import SavedBeliefs, checkpoints, read_beliefs
from goldilocks.runs.costs import Spending, spending
from goldilocks.runs.files import Lines
from goldilocks.runs.history import History
from goldilocks.runs.records import Dump, evenly, read_dumps

METRICS = "metrics.jsonl"
FEW_ROWS = 64  # at a time: an image may be a megabyte
BELIEFS_OVER_TIME = 20


@dataclass(frozen=True)
class Run:
    """Everything a report shows of one run."""

    name: str
    config: Mapping[str, Any]
    history: History
    spending: Spending
    dumps: tuple[Dump, ...]
    beliefs: tuple[SavedBeliefs, ...]
    texts: Mapping[int, str]
    missing: tuple[str, ...]


def read_run(path: Path, name: str) -> Run:
    """Read what is there. Raises ``ValueError`` if the directory has nothing of a run."""
    made = any((path / name).exists() for name in ("config.yaml", METRICS, "rollouts", "checkpoints"))
    accepted = "a run directory, as goldilocks train makes it: with config.yaml, metrics.jsonl, rollouts or checkpoints"
    require(made or bool(checkpoints(path) or _earlier(path / METRICS)), "RUN", str(path), accepted)
    missing: list[str] = []
    ours, hydras = path / "config.yaml", path / ".hydra" / "config.yaml"  # hydra.run.dir on verl's own command
    config = _config(hydras if hydras.is_file() and not ours.is_file() else ours, missing)
    history = _history(path / METRICS, missing)
    dumps = _dumps(path / "rollouts", missing)
    beliefs = _beliefs(path, missing)
    keys = [row.key for row in beliefs[-1].rows] if beliefs else []
    texts = prompt_texts(keys, config, dumps)
    if len(texts) < len(keys):
        missing.append(f"the texts of {len(keys) - len(texts):,} of {len(keys):,} prompts: their keys stand in")
    return Run(name, config, history, spending(history, config), tuple(dumps), tuple(beliefs), texts, tuple(missing))


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read several runs; each is named by the shortest end of its path that is unique."""
    resolved = [path.resolve() for path in paths]
    require(len(set(resolved)) == len(resolved), "RUN", ", ".join(map(str, paths)), "each run once")
    return [read_run(path, name) for path, name in zip(paths, run_names(resolved), strict=True)]


def run_names(paths: Sequence[Path]) -> list[str]:
    """``a/x b/y`` are ``x y``; ``a/x b/x`` are ``a/x b/x``."""
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _config(file: Path, missing: list[str]) -> Mapping[str, Any]:
    if not file.is_file():
        missing.append("config.yaml is not there")
        return {}
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        missing.append("config.yaml cannot be read: it is not YAML, or only half of it was written")
        return {}
    return config if isinstance(config, dict) else {}


def _history(file: Path, missing: list[str]) -> History:
    starts = [Lines(start) for start in (*_earlier(file), file) if start.is_file()]
    if not starts:
        missing.append(f"{METRICS} is not there: no step has been logged (trainer.logger needs 'file')")
        return History({})
    history = History.of(chain(*starts))
    if broken := sum(lines.broken for lines in starts):
        missing.append(f"{METRICS}: lines that are not whole and left out: {broken}")
    if not history:
        missing.append(f"{METRICS} holds no step")
    return history


def _earlier(file: Path) -> list[Path]:
    found = {path.suffixes[0][1:]: path for path in file.parent.glob(f"{file.stem}.*{file.suffix}")}
    return [found[number] for number in sorted(filter(str.isdecimal, found), key=int)]


def _dumps(directory: Path, missing: list[str]) -> list[Dump]:
    dumps = read_dumps(directory) if directory.is_dir() else []
    if not dumps:
        missing.append("rollouts/ holds no answers: trainer.rollout_data_dir did not point there")
    if broken := sum(dump.broken for dump in dumps):
        missing.append(f"rollouts/: lines that are not whole and left out: {broken}")
    return [dump for dump in dumps if dump.groups]


def _beliefs(path: Path, missing: list[str]) -> list[SavedBeliefs]:
    read: list[SavedBeliefs] = []
    for step, file in evenly([*checkpoints(path), *checkpoints(path / "checkpoints")], BELIEFS_OVER_TIME):
        try:
            read.append(read_beliefs(step, file))
        except (ValueError, OSError):
            missing.append(f"the beliefs of step {step} cannot be read: the checkpoint is not whole")
    if not read:
        missing.append("checkpoints/ holds no beliefs: nothing was saved yet, or the run had no collector")
    return read


def prompt_texts(keys: Iterable[int], config: Mapping[str, Any], dumps: Sequence[Dump]) -> dict[int, str]:
    """Return the texts of these prompts, as far as they are found."""
    wanted: set[int] = set(keys)
    texts: dict[int, str] = {}
    for key, text in _keyed(config, dumps):
        if len(texts) == len(wanted):
            break
        if key in wanted:
            texts[key] = text
    return texts


def _keyed(config: Mapping[str, Any], dumps: Sequence[Dump]) -> Iterator[tuple[int, str]]:
    for dump in dumps:
        for group in dump.groups:
            yield content_key(group.prompt) if group.key is None else group.key, group.prompt
    prompt = value_at(config, "data.prompt_key") or "prompt"
    media = [value_at(config, f"data.{key}") or column for key, column in MEDIA.items()]
    files = value_at(config, "data.train_files")
    for file in files if isinstance(files, list) else [files]:
        for row in _rows(Path(str(file)).expanduser(), [prompt, *media]):
            if prompt in row:
                content = with_media(row[prompt], [row[name] for name in media if name in row])
                is_chat = isinstance(row[prompt], list)
                yield content_key(content), conversation_text(row[prompt]) if is_chat else str(row[prompt])


def _rows(file: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a parquet file with those of these columns that it has; none if it cannot be read any more."""
    if file.suffix != ".parquet" or not file.is_file():
        return
    try:
        opened = pq.ParquetFile(file)
        there = [name for name in opened.schema_arrow.names if name in names]
        for batch in opened.iter_batches(FEW_ROWS, columns=there):
            yield from batch.to_pylist()
    except (pa.ArrowException, KeyError, IndexError):  # keys are shown in place of texts
        return
