"""What strata are worth where most prompts are out of reach, against DAPO at equal cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from run_files import write_records

from goldilocks.dotted_keys import merged
from goldilocks.lab.simulate import PassRates, Setup, SimulatedEngine, batches, read_pass_rates, simulate
from goldilocks.lab.simulate.run import recipe_config, settings_of

PROMPTS = 1_024
SKILLS = ("add", "double", "reverse", "sort")
RATES = (0.35, 0.04, 0.005, 0.0, 0.0, 0.0, 0.0, 0.0)  # by level: nine in ten are out of reach
SEEDS = (1, 2)
BY_LEVEL = {"strata": {"columns": ["level"]}}


def rows(seed: int = 0) -> list[dict[str, Any]]:
    """Prompts of four skills and eight levels, the rates of each spread around its level's."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(PROMPTS):
        level, skill = int(rng.integers(1, 9)), str(rng.choice(SKILLS))
        rate = RATES[level - 1] * (0.4 if skill == "sort" else 1)
        spread = rng.beta(16 * rate + 1e-3, 16 * (1 - rate) + 1e-3)
        number = int(rng.integers(10 ** (level - 1), 10**level))
        text = f"{skill}: {number} + {int(rng.integers(10, 99))} ="
        found.append({"prompt": text, "pass_rate": float(spread), "extra_info": {"level": level, "skill": skill}})
    return found


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> PassRates:
    write_records(file := tmp_path_factory.mktemp("rates") / "rates.jsonl", rows())
    return read_pass_rates(file)


@pytest.fixture(scope="module")
def dapo(prompts) -> dict[int, float]:
    return {rollouts: groups("dapo", {}, prompts, rollouts) for rollouts in (2_048, 4_096)}


def groups(policy: str, keys: dict[str, Any], prompts: PassRates, rollouts: int) -> float:
    found = []
    for seed in SEEDS:
        setup = Setup(rollouts=rollouts, seed=seed, target_groups=32)
        settings = settings_of(merged(recipe_config(policy), {"goldilocks": keys}), setup)
        found.append(simulate(policy, settings, prompts, setup).informative_groups_per_1k_rollouts)
    return float(np.mean(found))


@pytest.mark.parametrize(
    "keys", [BY_LEVEL, {"strata": {"columns": ["skill", "level"]}}, {}], ids=["level", "skill and level", "text"]
)
def test_strata_find_the_prompts_that_teach_by_a_column_or_by_the_text(prompts, dapo, keys):
    assert groups("frontier", keys, prompts, 2_048) > 3.5 * dapo[2_048]
    assert groups("frontier", keys, prompts, 4_096) > 4 * dapo[4_096]
    assert groups("dapo_strata", keys, prompts, 4_096) > 2.5 * dapo[4_096]


def test_strata_that_say_nothing_cost_nothing():
    told = rows()
    shuffled = np.random.default_rng(1).permutation([row["pass_rate"] for row in told])
    prompts = PassRates(
        tuple(row["prompt"] for row in told), shuffled, np.full(PROMPTS, 64.0),
        columns={"level": [row["extra_info"]["level"] for row in told]},
    )  # fmt: skip
    for policy in ("dapo_strata", "frontier"):
        assert groups(policy, BY_LEVEL, prompts, 4_096) > 0.97 * groups("dapo", {}, prompts, 4_096)


def test_what_uniform_sampling_needs_is_right_where_hopeless_groups_are_given_up() -> None:
    """Of four runs together: each explores a hundred prompts, and has a sixth of noise."""
    rng = np.random.default_rng(0)
    levels = rng.integers(1, 6, 4_096)
    mean = np.array([0.7, 0.4, 0.15, 0.05, 0.02])[levels - 1]
    rates = rng.beta(2 * mean, 2 * (1 - mean))
    prompts = PassRates(
        tuple(range(len(rates))), rates, np.full(len(rates), 50.0), columns={"level": levels.astype(str).tolist()}
    )
    needed = found = 0.0
    for seed in range(4):
        setup = Setup(rollouts=8_192, seed=seed, target_groups=16, gen_batch_size=32)
        settings = settings_of(merged(recipe_config("frontier"), {"goldilocks": BY_LEVEL}), setup)
        collector = settings.collector(prompts.source())
        for _ in batches(collector, SimulatedEngine(prompts, setup.engine, seed=seed), setup.rollouts):
            pass
        metrics = collector.selector.metrics()
        assert collector.allocator.metrics()["allocator/given_up"] > 100
        needed += metrics["selector/uniform_rollouts"]
        found += metrics["selector/informative_groups"]
    informative = float(np.mean(1 - rates**8 - (1 - rates) ** 8))
    assert needed == pytest.approx(8 * found / informative, rel=0.15)
