"""What makes many small tests cheap: nothing here changes what a test sees."""

from __future__ import annotations

import copy
import functools
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf, _utils, base

gc.disable()  # importing verl and its company makes a million objects, all of which stay


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_parsed_twice() -> Iterator[None]:
    """Hydra parses some thirty files for a config, in Python, and they are the same for nearly every test; so are the
    interpolations in them, which OmegaConf parses whenever it resolves one."""
    load, parse = OmegaConf.load, functools.cache(base.parse)

    @functools.cache
    def loaded(path: str, written: int, size: int) -> Any:
        return load(path)

    def copied(file: Any) -> Any:
        path = os.fspath(file if isinstance(file, str | os.PathLike) else file.name)
        status = os.stat(path)
        return copy.deepcopy(loaded(path, status.st_mtime_ns, status.st_size))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OmegaConf, "load", staticmethod(copied))
        for module in (base, _utils):
            patched.setattr(module, "parse", parse)
        yield
