"""How a coroutine is a test, and what makes many small tests cheap: nothing of it changes what a test sees."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import importlib.metadata
import inspect
import os
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra import version
from hydra._internal import config_loader_impl as hydra
from hydra._internal import defaults_list
from hydra._internal.defaults_list import DefaultsList, Overrides
from omegaconf import OmegaConf, _utils, base, flag_override

from goldilocks.cli import main
from goldilocks.config import recipes

PATIENCE_S = 600.0  # for a coroutine that waits for what is sure to happen: it fails, and does not hang


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    fixtures = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**fixtures), PATIENCE_S))
    return True


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], str]:
    """``refused(words)`` gives the command words that it refuses; returns the one line that it says."""

    def said(words: list[str]) -> str:
        capsys.readouterr()  # what was printed before
        assert main(words) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        return printed.err

    return said


gc.disable()  # importing verl and its company makes a million objects, all of which stay
# transformers, TRL and others each read every package's list of files when they are imported.
importlib.metadata.packages_distributions = functools.cache(importlib.metadata.packages_distributions)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(500_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_parsed_twice() -> Iterator[None]:
    """Hydra parses some thirty files for a config, in Python, and they are the same for nearly every test; so are the
    interpolations in them, which OmegaConf parses whenever it resolves one, and the recipes that a simulation reads."""
    load, parse = OmegaConf.load, functools.cache(base.parse)

    @functools.cache
    def read(text: str, loader: Any) -> bytes:
        return pickle.dumps(yaml.load(text, loader))

    recipe = SimpleNamespace(load=lambda *given: pickle.loads(read(*given)), YAMLError=yaml.YAMLError)

    @functools.cache
    def loaded(path: str, written: int, size: int) -> bytes:
        return pickle.dumps(load(path))

    def copied(file: Any) -> Any:
        path = os.fspath(file if isinstance(file, str | os.PathLike) else file.name)
        status = os.stat(path)
        return pickle.loads(loaded(path, status.st_mtime_ns, status.st_size))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OmegaConf, "load", staticmethod(copied))
        for module in (base, _utils):
            patched.setattr(module, "parse", parse)
        patched.setattr(recipes, "yaml", recipe)
        yield


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_merged_twice() -> Iterator[None]:
    """Hydra chooses its files by the groups among the overrides and merges them before it looks at a value. The same
    files are chosen and merged once, unless one is a test's own, and verl's, which come before the device's, once for
    all of ours. Each config is a copy, and the values go into that. To choose, a file is read once, since only its
    defaults are looked at, and what an interpolation among them may name is collected only where there is one."""
    choose, merge = hydra.create_defaults_list, hydra.ConfigLoaderImpl._compose_config_from_defaults_list
    collect_choices = defaults_list._create_interpolation_map
    chosen: dict[Any, DefaultsList] = {}
    merged: dict[Any, bytes] = {}
    read: dict[Any, dict[str, Any]] = {}

    def share_files(self: Any, delegate: Any) -> None:
        self.delegate, self.cache = copy.copy(delegate), {}  # Hydra copies its sources too, and changes none

    def sources(repo: Any) -> tuple[str, ...]:
        return tuple(f"{source.provider} {source.path}" for source in repo.get_sources())

    def choose_once(repo: Any, config_name: Any, overrides_list: Any, **options: Any) -> DefaultsList:
        groups = [one for one in overrides_list if repo.group_exists(one.key_or_group)]
        key = sources(repo), config_name, *(one.input_line for one in groups), *options.items()
        if "recipe_file" in str(key):
            chosen[key] = choose(repo, config_name, groups, **options)
        elif key not in chosen:
            reader = copy.copy(repo)
            reader.cache = read.setdefault(key[0], {})
            chosen[key] = choose(reader, config_name, groups, **options)
        first, values = chosen[key], Overrides(repo, overrides_list).config_overrides
        return DefaultsList(first.defaults, first.defaults_tree, values, first.overrides)

    def merge_once(self: Any, defaults: Any, repo: Any) -> Any:
        key = sources(repo), str(defaults)
        if key not in merged or "recipe_file" in str(key):
            ours = next((place for place, one in enumerate(defaults) if one.config_path.startswith("device/")), 0)
            config = merge_once(self, defaults[:ours], repo) if ours else merge(self, defaults, repo)
            if ours:
                with flag_override(config, "no_deepcopy_set_nodes", True):  # as Hydra merges: a file is of one config
                    config.merge_with(*(self._load_single_config(one, repo).config for one in defaults[ours:]))
            merged[key] = pickle.dumps(config)
            return config
        return pickle.loads(merged[key])

    def choices_for_interpolations(overrides: Any, defaults: Any, self_added: bool) -> Any:
        used = any(one.is_interpolation() for one in defaults)
        return collect_choices(overrides, defaults, self_added) if used else None

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(version, "_get_version", functools.cache(version._get_version))
        patched.setattr(defaults_list, "_create_interpolation_map", choices_for_interpolations)
        patched.setattr(hydra, "create_defaults_list", choose_once)
        patched.setattr(hydra.CachingConfigRepository, "__init__", share_files)
        patched.setattr(hydra.ConfigLoaderImpl, "_compose_config_from_defaults_list", merge_once)
        yield
