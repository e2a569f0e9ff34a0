"""What TRL's checkpoint lacks: the batch that each process was training."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from builders import plain_collector

from goldilocks.drive.backend import Rounds
from goldilocks.drive.driver import Driver
from goldilocks.trl.collection import Collection, Processes
from goldilocks.trl.on_disk import Saved
from goldilocks.trl.rows import CompletionRows

CPU = torch.device("cpu")


def saved(processes: int) -> Saved:
    """Return the first process's of so many; what it decides reaches nobody."""
    rows, nothing, alone, several = CompletionRows(), cast("Any", None), first_of(1), first_of(processes)
    collection = Collection(nothing, rows, alone, nothing, keeps=True, seed=1)
    collection.driver = Driver(plain_collector(), Rounds(lambda _: ()), rows)
    return Saved(collection, several)


def first_of(processes: int) -> Processes:
    return Processes(SimpleNamespace(num_processes=processes, process_index=0))


def test_a_batch_that_is_only_partly_trained_goes_on(tmp_path: Path) -> None:
    saved(1).write(tmp_path, 3, [{"advantages": torch.ones(2)}])
    step, batch = saved(1).read(tmp_path, CPU)
    assert step == 3
    assert batch is not None
    assert torch.equal(batch[0]["advantages"], torch.ones(2))


def test_with_another_number_of_processes_a_new_batch_is_generated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A process has its own part of the batch only: half of it would be trained as if it were all."""
    saved(2).write(tmp_path, 3, [{"advantages": torch.ones(2)}])
    assert saved(1).read(tmp_path, CPU) == (0, None)
    assert "written by 2 processes, and this run has 1" in caplog.text


def test_between_two_batches_the_number_of_processes_does_not_matter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(2).write(tmp_path, 4, None)
    assert saved(1).read(tmp_path, CPU) == (4, None)
    assert not caplog.text
