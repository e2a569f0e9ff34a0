"""What carrying surplus groups saves, and how long a step takes with and without prompts to spare.

    python benchmarks/refill.py

Both sides of each table are measured in one run, with the collector of the trainers and no model. The first table:
``batch_filter.prompt_oversampling_factor=2``, 64 groups of 8 rollouts, 20 updates. Groups beyond the batch are carried;
or each judgement keeps half of the groups it is shown and rejects the others, which applies the factor twice. The
second table: a batch of 512 of 1,536 prompts, where 35 % of the prompts are informative, on a simulated engine with a
slot for every rollout. A refill asks for what is missing over the keep rate; or for two standard deviations more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from omegaconf import OmegaConf

from goldilocks.config.settings import Settings
from goldilocks.core import Collector, ListSource, limits
from goldilocks.core.allocators import Fixed
from goldilocks.core.filters import Variance
from goldilocks.core.selectors import Uniform
from goldilocks.drive.backend import Rounds, places
from goldilocks.drive.driver import Driver
from goldilocks.drive.filter_gate import FilterGate
from goldilocks.drive.gate import Judgement
from goldilocks.drive.rows import NoRows
from goldilocks.filtering import PPOBatchFilter, PPOFilterConfig
from goldilocks.lab.simulate import EngineConfig, PassRates, SimulatedEngine, batches
from goldilocks.types import Group, Request, Rollout

UPDATES, GROUPS, N, TOKENS, FACTOR = 20, 64, 8, 5, 2.0
LONGEST, MEAN, PROMPTS, ROLLOUTS = 1_000, 200.0, 20_000, 200_000


# -- rollouts per row trained ------------------------------------------------------------------------------------------


def oversampled(informative: int, carries: bool) -> float:
    """Rollouts generated per row trained, where ``informative`` of every five prompts have right and wrong answers."""
    chosen = settings()
    own = chosen.collector(ListSource(list(range(10_000))))
    assert chosen.gate_config is not None
    gate = Judged(chosen.gate_config, half=not carries)
    driver = Driver(own, Rounds(partial(answers, informative=informative)), NoRows(), gate)
    trained = sum(len(group.trained) for _ in range(UPDATES) for group in driver.batch())
    return own.metrics()["accounts/generated_rollouts"] / trained


def settings() -> Settings:
    return Settings.from_config(
        OmegaConf.create(
            {
                "data": {"train_batch_size": GROUPS, "max_response_length": TOKENS, "seed": None},
                "actor_rollout_ref": {"rollout": {"n": N}},
                "algorithm": {"adv_estimator": "grpo", "use_kl_in_reward": False, "filter_groups": {"enable": True}},
                "batch_filter": {"prompt_oversampling_factor": FACTOR},
            }
        )
    )


class Judged(FilterGate):
    """The batch filter; with ``half``, each judgement keeps half of the groups it is shown."""

    def __init__(self, config: PPOFilterConfig, half: bool) -> None:
        super().__init__(config, seed=1)
        self._config, self._half = config, half

    def judge(self, groups: Sequence[Group]) -> Judgement:
        """Judge the rows that would be trained."""
        if self._half:
            self.filter = PPOBatchFilter(
                replace(self._config, target_num_groups=math.ceil(len(groups) / FACTOR)), {"seed": 1}
            )
        rollouts = [rollout for group in groups for rollout in group.trained]
        rewards = torch.tensor([rollout.reward for rollout in rollouts])
        data = {"rewards": rewards, "response_mask": torch.ones(len(rollouts), TOKENS).long()}
        return self.judge_rows([(rollout.uid, rollout.index) for rollout in rollouts], data)


def answers(requests: Sequence[Request], informative: int) -> Iterator[Rollout]:
    """Of every five prompts, ``informative`` have right and wrong answers."""
    for request, index, _ in places(requests):
        mixed = int(request.uid[1:]) % 5 < informative
        yield Rollout(request.uid, index, float(mixed and index % 2), TOKENS)


# -- the time of a step ------------------------------------------------------------------------------------------------


def step_time(deviations: float) -> tuple[float, float]:
    """The mean time of a step in units of the longest answer, and rollouts generated per rollout trained."""
    limits.SLACK = deviations
    draw = np.random.default_rng(0)
    rates = np.where(draw.random(PROMPTS) < 0.35, 0.5, 0.0)
    data = PassRates(tuple(range(PROMPTS)), rates, np.full(PROMPTS, MEAN))
    own = Collector(ListSource(data.contents), Uniform(), Fixed(N), Variance(), target_groups=512, gen_batch_size=1_536)
    engine = SimulatedEngine(data, EngineConfig(slots=10**6, spread=0.5, wait=0.0, max_tokens=LONGEST), seed=3)
    ends = [engine.clock for _ in batches(own, engine, rollouts=ROLLOUTS)]
    rollouts = own.accounts.rollouts
    return ends[-1] / len(ends) / LONGEST, sum(rollouts.values()) / rollouts["trained"]


def main() -> None:
    """Print both tables."""
    print(f"{'rollouts per row trained':<34}{'rejected':>10}{'carried':>10}")
    for informative in (5, 3):
        figures = [oversampled(informative, carries) for carries in (False, True)]
        print(f"  {20 * informative:>3} % informative{'':<15}" + "".join(f"{figure:>10.2f}" for figure in figures))
    print(f"\n{'refill':<34}{'no slack':>10}{'2 sd':>10}")
    without, with_slack = step_time(0.0), step_time(2.0)
    for row, name in enumerate(("step time / longest answer", "rollouts per rollout trained")):
        print(f"  {name:<32}{without[row]:>10.2f}{with_slack[row]:>10.2f}")


if __name__ == "__main__":
    main()
