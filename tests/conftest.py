"""For all tests: Ctrl-C means Ctrl-C, also where they were started in the background, which ignores it; verl has every
patch, as in a run of ours. hypothesis draws the same examples each time, so that no run fails by the luck of a draw,
and an example may take its time, since a busy machine is not a mistake; ``pytest --hypothesis-profile=thorough`` draws
others each time, and 500 of them. The order of the tests is shuffled by pytest-randomly, which prints its seed:
``--randomly-seed=N`` repeats an order, ``-p no:randomly`` keeps the order of the files."""

import os
import signal
from collections.abc import Iterator

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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the launches first: a launch that comes last keeps one core waiting. The shuffled order stays otherwise."""
    items.sort(key=lambda item: "integration" not in item.path.parts)
