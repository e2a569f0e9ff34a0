"""For all tests: Ctrl-C means Ctrl-C, also where they were started in the background, which ignores it; verl has every
patch, as in a run of ours. hypothesis draws the same examples each time, so that no run fails by the luck of a draw,
and an example may take its time, since a busy machine is not a mistake; ``pytest --hypothesis-profile=thorough`` draws
others each time, and 500 of them. The order of the tests is shuffled by pytest-randomly, which prints its seed:
``--randomly-seed=N`` repeats an order, ``-p no:randomly`` keeps the order of the files."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from process_state import restorer

os.environ.setdefault("GOLDILOCKS_PATCHES", "all")
signal.signal(signal.SIGINT, signal.default_int_handler)
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("the same each time", patient, max_examples=25, derandomize=True)
settings.register_profile("thorough", patient, max_examples=500)
settings.load_profile("the same each time")


@pytest.fixture(autouse=True)
def _each_test_leaves_the_process_as_it_was() -> Iterator[None]:
    restore = restorer()
    yield
    restore()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for sockets, whose path is short wherever the tests have their files: a socket's has 107 characters."""
    with tempfile.TemporaryDirectory(prefix="gl", dir="/tmp") as folder:
        yield Path(folder)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the launches first, those of several runs before the others, on all workers alike.

    What takes seconds is left for the end, where a worker that has nothing to do takes over half of another's rest. The
    shuffled order stays otherwise.
    """
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    items[:] = dealt(sorted(items, key=lambda item: (-runs(item), "integration" not in item.path.parts)), workers)


def runs(item: pytest.Item) -> int:
    """How many runs of a trainer a test starts, one after the other."""
    several = item.get_closest_marker("runs")
    return several.args[0] if several else int(item.get_closest_marker("integration") is not None)


def dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Order the tests for workers that each begin with an equal part of the list, the first with the first.

    The launches are dealt one by one. The other tests stay beside those of their file, with which they share fixtures.
    """
    launches, others = [one for one in items if runs(one)], [one for one in items if not runs(one)]
    order: list[pytest.Item] = []
    for worker in range(workers):
        end = len(items) * (worker + 1) // workers
        order += launches[worker::workers]
        part = max(0, end - len(order))
        order, others = [*order, *others[:part]], others[part:]
    return order
