"""Where the time of a generation goes, by what it was spent on."""

from __future__ import annotations

import time

TIMED = (
    "timing_s/gen_submit",
    "timing_s/gen_wait",
    "timing_s/gen_pause",
    "timing_s/gen_drain",
    "timing_s/gen_clear",
)
PREFIX = "timing_s/gen_"


class Stopwatch:
    """Adds up seconds by name until they are read."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def timed(self, name: str) -> Timed:
        """Count the time inside as spent on ``name``. Coroutines that wait at the same time count each."""
        return Timed(self, name)

    def add(self, name: str, seconds: float) -> None:
        """Count these as well."""
        metric = PREFIX + name
        assert metric in TIMED, metric
        self._seconds[metric] = self._seconds.get(metric, 0.0) + seconds

    def read(self) -> dict[str, float]:
        """The seconds since the last reading, by metric."""
        seconds, self._seconds = self._seconds, {}
        return seconds


class Timed:
    """A block that is timed. A driver enters two for each arrival: a generator would take twice as long."""

    __slots__ = ("_name", "_started", "_watch")

    def __init__(self, watch: Stopwatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._watch.add(self._name, time.perf_counter() - self._started)
