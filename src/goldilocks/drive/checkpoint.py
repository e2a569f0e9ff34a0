"""A driver's part of a checkpoint: ``goldilocks.npz`` and a folder of rows. Loading either executes no code.

The rows are written first, under a name of their own, and the state names the rows it goes with. A run that ends while
it writes over an older checkpoint leaves the older state with the older rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from goldilocks.core import Collector
from goldilocks.drive.rows import Place, RowStore
from goldilocks.runs.checkpoints import FILE, load_state, save_state

ROWS = "goldilocks_rows"


def save(folder: Path, collector: Collector, rows: RowStore[Any], parts: dict[str, Any]) -> None:
    """Write the collector, the rows that a later batch may need, and ``parts``: what else decides how a run goes on."""
    folder.mkdir(parents=True, exist_ok=True)
    before = list(folder.glob(f"{ROWS}*"))
    name = f"{ROWS}_{collector.accounts.generated_rollouts}"
    rows.save(collector.waiting_rollouts, folder / name)
    save_state({"collector": collector.state_dict(), "rows": name, **parts}, folder / FILE)
    for old in before:
        if old.name != name:
            shutil.rmtree(old)


def exists(folder: Path) -> bool:
    """Return whether ``save`` has written into the folder."""
    return (folder / FILE).exists()


def load(folder: Path, rows: RowStore[Any]) -> tuple[dict[str, Any], Collection[Place]]:
    """Return the state, and the unfinished rollouts that can go on; the rows are loaded."""
    state = load_state(folder / FILE)
    return state, rows.load(folder / state.get("rows", ROWS))
