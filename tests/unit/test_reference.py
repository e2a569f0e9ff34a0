"""``docs/reference.md`` is what the code says, and every metric that the code logs has its line there."""

from __future__ import annotations

import ast
import functools
import math
import random
import re
from pathlib import Path
from typing import Any

import make_reference
import pytest
import torch
from builders import fill, source
from documented_metrics import METRICS, entry, undocumented

import goldilocks
from goldilocks.config.recipes import choose, compose_config
from goldilocks.core import Collector, Limits
from goldilocks.core.allocators import Adaptive
from goldilocks.core.filters import Variance
from goldilocks.core.selectors import Greso, Thompson
from goldilocks.drive.driver import TIMED
from goldilocks.filtering import PPOBatchFilter, PPOFilterConfig
from goldilocks.losses.policy_loss import clipping_metrics
from goldilocks.runs.history import accuracy_by, belief_name
from goldilocks.types import Failure, Request, Rollout

ROOT = Path(__file__).parents[2]
PACKAGE = Path(goldilocks.__file__).parent
LOGGING = ("core", "filtering", "losses", "verl", "trl", "drive")


@pytest.mark.parametrize("page", ["reference", "patches"])
def test_a_page_that_is_made_is_fresh(page: str) -> None:
    made = {"reference": make_reference.render, "patches": make_reference.render_patches}[page]()
    assert (ROOT / "docs" / f"{page}.md").read_text() == made, f"docs/{page}.md is stale: run make docs"


def test_the_keys_of_verl_that_the_reference_names_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf import OmegaConf

    monkeypatch.setenv("GOLDILOCKS_TASK", "nowhere")
    config = compose_config(choose([], "cpu"))
    named = re.findall(r"^\| `([\w.]+)` \|", make_reference.VERL_KEYS, re.MULTILINE)
    missing = object()
    assert len(named) == 8
    assert [key for key in named if OmegaConf.select(config, key, default=missing) is missing] == []


def test_a_key_without_a_comment_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"goldilocks\.novel has no comment"):
        make_reference.row("goldilocks.novel", "1", "")


def test_whatever_a_collector_logs_is_documented_and_nothing_else_is() -> None:
    by_column = [*accuracy_by("level", [1], [1.0]), belief_name("level", 1)]
    logged = {*collector_names(), *filter_names(), *gspo_names(), *by_column, *written_names(), *TIMED}
    assert undocumented(logged) == []
    assert set(METRICS) - {entry(name) for name in logged} == set()


def collector_names() -> set[str]:
    """A few steps with everything that can happen to a rollout."""
    rng = random.Random(0)
    collector = Collector(
        source(60),
        Greso(),
        Adaptive(max_n=8, rollouts_per_batch=2, max_train_n=4),
        Variance(),
        target_groups=4,
        limits=Limits(max_retries=0),
        components=["brevity"],
    )
    collector.accounts.charge({"calls": 1})
    names: set[str] = set()

    def outcome(request: Request, index: int) -> Rollout | Failure:
        if rng.random() < 0.1:
            return Failure(request.uid, index, "lost")
        return Rollout(request.uid, index, float(rng.random() < request.prompt.index % 3 / 2), 5, {"brevity": 0.5})

    for place in range(8):
        fill(collector, outcome)
        batch = collector.take()
        if place % 2 == 0:
            collector.reject([batch[0].uid], "batch_filter")
        names |= set(collector.metrics())
    return names | set(Thompson().metrics())


def filter_names() -> set[str]:
    """One call with both gates, and one without their tensors."""
    config = PPOFilterConfig(target_group_size=4, enable_two_gate_filter=True, reward_threshold=-1.0)
    plain = {"rewards": torch.tensor([0.0, 1.0] * 6), "response_mask": torch.ones(12, 5)}
    log_probs = torch.full((12, 5), math.log(0.5))
    gated = {**plain, "old_log_probs": log_probs, "rollout_log_probs": log_probs, "top_log_probs": log_probs}
    uids = ["a"] * 6 + ["b"] * 6
    return {name for data in (plain, gated) for name in PPOBatchFilter(config).filter_batch(data, uids)[1]}


def gspo_names() -> set[str]:
    return set(clipping_metrics(torch.ones(2), torch.ones(2, 3), torch.ones(2, 3), 3e-4, 4e-4))


@functools.cache
def written_names() -> list[str]:
    """Names that stand in the source as a metric's key: ``metrics["a/b"] = …`` and ``{"a/b": …}``."""
    found: list[str] = []
    for package in LOGGING:
        for file in (PACKAGE / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                keys: list[Any] = list(node.keys) if isinstance(node, ast.Dict) else []
                if isinstance(node, ast.Assign):
                    keys += [target.slice for target in node.targets if isinstance(target, ast.Subscript)]
                values = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
                found += [value for value in values if re.fullmatch(r"[a-z_]+(/[a-z0-9_]+)+", value)]
    return found
