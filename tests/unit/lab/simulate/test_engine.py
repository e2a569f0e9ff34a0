"""What a rollout turns out to be does not depend on what else is in flight; slots, clock and aborts add up."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from goldilocks.core import ListSource
from goldilocks.lab.simulate import EngineConfig, PassRates, SimulatedEngine
from goldilocks.lab.simulate.pass_rates import interpret
from goldilocks.types import Failure, Group, Request, Rollout

LIFTED = ((0.5, 1.0), (0.3, 1.0), (0.1, 0.5), (0.01, 0.0))  # pass rates, and what they gain in log-odds


def prompts(*rates: float, tokens: float = 100.0) -> PassRates:
    return PassRates(tuple(range(len(rates))), np.array(rates), np.full(len(rates), tokens))


def engine(data: PassRates, *, seed: int = 1, **config: Any) -> SimulatedEngine:
    return SimulatedEngine(data, EngineConfig(**config), seed=seed)


def request(data: PassRates, uid: str, index: int = 0, n: int = 1, first: int = 0) -> Request:
    return Request(uid, ListSource(data.contents)[index], n, first)


def train(machine: SimulatedEngine, data: PassRates, *rewards: float) -> None:
    """Train a group of the first prompt."""
    rollouts = tuple(Rollout("g0", index, reward, 9) for index, reward in enumerate(rewards))
    machine.train([Group("g0", ListSource(data.contents)[0], rollouts, trained=rollouts)])


def answering(n: int, *, tokens: float = 100.0, **config: Any) -> SimulatedEngine:
    """Return an engine that was asked for so many answers to a prompt that half of them solve."""
    data = prompts(0.5, tokens=tokens)
    machine = engine(data, **config)
    machine.submit([request(data, "g0", n=n)])
    return machine


def log_odds(p: float) -> float:
    return math.log(p / (1 - p))


def drained(machine: SimulatedEngine) -> list[Rollout | Failure]:
    return [event for events in iter(machine.events, []) for event in events]


@settings(max_examples=30)
@given(order=st.permutations(range(8)), slots=st.integers(1, 8), failure_rate=st.sampled_from([0.0, 0.4]))
def test_answers_do_not_depend_on_order_or_on_slots(order: list[int], slots: int, failure_rate: float) -> None:
    data = prompts(*np.linspace(0, 1, 8))
    together = engine(data, failure_rate=failure_rate)
    for place in range(8):
        together.submit([request(data, f"g{place}", place, n=3)])
    apart = engine(data, slots=slots, failure_rate=failure_rate)
    events = []
    for place in order:
        for first in range(3):
            if not apart.free:
                events += apart.events()
            apart.submit([request(data, f"g{place}", place, first=first)])
    assert {(e.uid, e.index): e for e in drained(together)} == {(e.uid, e.index): e for e in events + drained(apart)}


def test_seed_and_uid_and_index_each_change_the_answer() -> None:
    data = prompts(0.5)

    def lengths(seed: int, uid: str, first: int) -> list[int]:
        machine = engine(data, seed=seed)
        machine.submit([request(data, uid, n=6, first=first)])
        return sorted(event.tokens for event in drained(machine))

    base = lengths(1, "g0", 0)
    assert base == lengths(1, "g0", 0)
    assert base not in (lengths(2, "g0", 0), lengths(1, "g1", 0), lengths(1, "g0", 6))


def test_a_full_engine_takes_no_more() -> None:
    machine = answering(3, slots=4)
    assert machine.free == 1
    with pytest.raises(ValueError, match=r"request\.n=2 is not accepted: at most the 1 free slots"):
        machine.submit([request(prompts(0.5), "g1", n=2)])


def test_a_rollout_takes_one_step_a_token_and_the_shortest_comes_first() -> None:
    machine = answering(20, wait=0.0)
    seen = []
    while events := machine.events():
        assert {event.tokens for event in events} == {machine.clock}
        seen += events
    assert len(seen) == 20
    assert machine.free == machine.config.slots


def test_an_aborted_rollout_costs_what_it_had_written() -> None:
    machine = answering(4, wait=0.0)
    machine.submit([request(prompts(0.5), "g1", n=1)])
    (first,) = machine.events()
    machine.cancel(["g0"])
    aborted = [event for event in machine.events() if event.uid == "g0" and event is not first]
    assert len(aborted) == 4 - (first.uid == "g0")
    assert all(isinstance(event, Failure) and event.tokens == first.tokens for event in aborted)
    left = drained(machine)
    assert [event.uid for event in [first, *left]].count("g1") == 1
    assert machine.free == machine.config.slots
    assert all(isinstance(event, Rollout) for event in left)


def test_a_rollout_that_began_late_or_still_waits_has_written_less() -> None:
    machine = answering(1, tokens=200.0, wait=0.0, spread=0.0)
    machine.events()
    machine.submit([request(prompts(0.5), "g1")])
    machine.cancel(["g1"])
    assert machine.events() == [Failure("g1", 0, "cancelled", 0)]
    assert machine.clock == 200

    patient = answering(20, tokens=200.0, wait=1e6, spread=0.0)
    (first,) = patient.events()
    patient.cancel(["g0"])
    assert first.tokens == 200
    assert patient.clock > 1_000
    assert [event.tokens for event in patient.events()] == [0] * 19


def test_rewards_and_lengths_have_the_means_of_the_prompt() -> None:
    data = prompts(0.3, tokens=400.0)
    machine = engine(data, slots=20_000)
    machine.submit([request(data, "g0", n=20_000)])
    events = drained(machine)
    rewards = [event.reward for event in events if isinstance(event, Rollout)]
    assert len(rewards) == 20_000
    assert abs(statistics.fmean(rewards) - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 20_000)
    tokens = [event.tokens for event in events]
    assert abs(statistics.fmean(tokens) - 400) < 4 * statistics.stdev(tokens) / math.sqrt(20_000)


@pytest.mark.parametrize(
    "rows",
    [
        [{"input": "a", "score": score, "tokens": tokens} for score, tokens in ((0, 10), (1, 90), (1, 512))],
        [{"prompt": "a", "rewards": [0, 1, 1], "tokens": 204, "lengths": [10, 90, 512]}],
    ],
)
def test_answers_are_as_long_as_those_that_the_data_have(rows: list[dict[str, Any]]) -> None:
    data = interpret(rows)
    machine = engine(data)
    machine.submit([request(data, "g0", n=200)])
    assert data.tokens.tolist() == [204.0]
    assert {event.tokens for event in drained(machine)} == {10, 90, 512}


def test_the_share_of_failures_is_the_failure_rate_and_a_failure_costs_part_of_its_tokens() -> None:
    data = prompts(1.0, tokens=100.0)
    machine = engine(data, slots=4_000, failure_rate=0.25, spread=0.0)
    machine.submit([request(data, "g0", n=4_000)])
    failures = [event for event in drained(machine) if isinstance(event, Failure)]
    assert abs(len(failures) / 4_000 - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 4_000)
    assert {event.reason for event in failures} == {"engine"}
    assert 45 < statistics.fmean(event.tokens for event in failures) < 55


def test_answers_beyond_max_tokens_are_truncated() -> None:
    events = drained(answering(50, tokens=1_000.0, max_tokens=900))
    assert max(event.tokens for event in events) == 900
    assert all(isinstance(event, Rollout) and event.truncated == (event.tokens == 900) for event in events)


def test_training_an_informative_group_raises_its_prompt_most_and_others_a_little() -> None:
    data = prompts(0.2, 0.2, 0.0, 1.0)
    machine = engine(data, improvement=1.0)
    train(machine, data, 0.0, 1.0)
    own, other, impossible, trivial = (machine.learner.pass_rate(index) for index in range(4))
    assert log_odds(own) == pytest.approx(log_odds(0.2) + 1.25)
    assert log_odds(other) == pytest.approx(log_odds(0.2) + 0.25)
    assert (impossible, trivial) == (0.0, 1.0)


def test_a_lift_raises_all_prompts_of_a_stratum_and_the_next_harder_one_by_half() -> None:
    data = replace(prompts(0.5, 0.3, 0.1, 0.01), columns={"level": [1, 1, 2, 3]})
    machine = engine(data, lift=1.0, lift_by="level")
    train(machine, data, 0.0, 1.0)
    raised = [log_odds(machine.learner.pass_rate(index)) for index in range(4)]
    assert raised == pytest.approx([log_odds(p) + gain for p, gain in LIFTED])


def test_training_groups_without_contrast_teaches_nothing() -> None:
    data = prompts(0.2, 0.7)
    machine = engine(data, improvement=1.0)
    train(machine, data, 1.0, 1.0)
    assert [machine.learner.pass_rate(index) for index in range(2)] == [0.2, 0.7]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"slots": 0}, "slots=0"),
        ({"failure_rate": 1.0}, r"failure_rate=1\.0"),
        ({"wait": math.inf}, "wait=inf"),
        ({"spread": -1.0}, r"spread=-1\.0"),
        ({"max_tokens": 0}, "max_tokens=0"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**config)


def test_what_pauses_says_what_it_has_written_and_ends_as_it_would_have() -> None:
    paused, whole = answering(8, wait=0.0), answering(8, wait=0.0)
    events = paused.events()
    written = {event.index: event.tokens for event in paused.pause()}
    assert set(written) == set(range(8)) - {event.index for event in events}
    assert set(written.values()) == {paused.clock}  # without a wait, a token a step
    assert paused.free == whole.free + len(events)  # who pauses keeps its slot
    assert [*events, *drained(paused)] == drained(whole)
