"""The noise of a rollout: two runs with one seed draw the same, and no two rollouts of a run do."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from omegaconf import OmegaConf

from goldilocks.verl.dispatch.backend import request_number, run_seeds, seeded, visit_seed

PARAMS = {"temperature": 1.0}


def config(data_seed: int | None = 1, rollout_seed: int = 42) -> Any:
    return OmegaConf.create({"data": {"seed": data_seed}, "actor_rollout_ref": {"rollout": {"seed": rollout_seed}}})


def engine(name: str, *, deterministic: bool = False) -> Any:
    return SimpleNamespace(name=name, full_determinism=deterministic)


def seeds(run: Any) -> list[int]:
    """Of every rollout of a small run: two prompts, one of them twice in the data, two visits, four rollouts each."""
    prompts = [(7, 0), (7, 1), (8, 2)]
    visits = [visit_seed(run_seeds(run), key, place, visit) for (key, place), visit in product(prompts, range(2))]
    return [seeded(PARAMS, engine("transformers"), visit, index)["seed"] for visit in visits for index in range(4)]


def test_a_run_with_the_same_seed_draws_the_same_noise_and_no_rollout_that_of_another() -> None:
    first = seeds(config())
    assert seeds(config()) == first
    assert len(set(first)) == len(first)
    assert all(0 <= seed < 2**63 for seed in first)


@pytest.mark.parametrize("other", [config(data_seed=2), config(rollout_seed=43), config(data_seed=None)])
def test_a_run_with_another_seed_draws_other_noise(other: Any) -> None:
    assert not set(seeds(config())) & set(seeds(other))


@pytest.mark.parametrize(
    ("rollout_config", "added"),
    [
        (engine("transformers"), {"seed"}),
        (engine("vllm"), set()),
        (engine("vllm", deterministic=True), {"seed"}),
        (engine("sglang", deterministic=True), {"sampling_seed"}),
        (engine("unheard_of", deterministic=True), set()),
    ],
)
def test_an_engine_is_told_by_its_own_name_for_a_seed_and_only_where_it_costs_nothing_or_is_asked_for(
    rollout_config: Any, added: set[str]
) -> None:
    assert set(seeded(PARAMS, rollout_config, 1, 0)) - set(PARAMS) == added


def test_requests_that_verl_would_name_alike_have_numbers_of_their_own() -> None:
    rows = [{"uid": uid, "session_id": index} for uid in ("g0", "g1") for index in range(4)]
    assert len({request_number(row) for row in rows}) == 8
    assert [request_number(row) for row in rows] == [request_number(row) for row in rows]
