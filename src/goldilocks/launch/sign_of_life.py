"""Whether a run still does anything: a run whose log and metrics no longer grow is stuck."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path


class SignOfLife:
    """Watches the files that a run writes to."""

    def __init__(self, files: Sequence[Path], limit_s: float) -> None:
        self._files = files
        self._limit_s = limit_s
        self._sizes: list[int] = []
        self._since = time.monotonic()

    def lost(self) -> bool:
        """True when nothing was written for the limit; to be asked again and again."""
        sizes = [file.stat().st_size if file.exists() else 0 for file in self._files]
        if sizes != self._sizes:
            self._sizes, self._since = sizes, time.monotonic()
        return time.monotonic() - self._since > self._limit_s
