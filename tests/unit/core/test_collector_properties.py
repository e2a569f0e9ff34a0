"""What the collector keeps, whatever the engine, the policies, the faults and the moment it is cut."""

from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from builders import reloaded, source
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.core.driver import MAX_TOKENS, FaultyEngine, Log, run, take, train, turn

from goldilocks.config.recipes import names
from goldilocks.core import Beliefs, Collector, Exhausted, Limits, Surplus
from goldilocks.core.allocators import Adaptive, Allocator
from goldilocks.core.effects import Division
from goldilocks.core.filters import Everything, Variance
from goldilocks.lab.simulate import Setup, recipe_settings
from goldilocks.runs.checkpoints import save_state
from goldilocks.types import Failure, Rollout

SETTINGS = {name: recipe_settings(name, Setup()) for name in names()}
MAX_N = {"pilot": 16, "knapsack": 32, "adaptive": 32, "contrast": 32, "thompson_contrast": 32}

limits = st.builds(
    Limits,
    max_num_gen_batches=st.sampled_from([0, 3, 20]),
    max_rollouts_per_step=st.sampled_from([None, 60, 400]),
    max_tokens_per_step=st.sampled_from([None, 2_000, 20_000]),
    max_tokens_per_rollout=st.just(MAX_TOKENS),
    max_retries=st.integers(0, 3),
    on_exhausted=st.sampled_from(["shrink", "backfill"]),
)
surplus = st.one_of(
    st.builds(Surplus, max_carry_steps=st.integers(0, 2), on_full=st.sampled_from(["finish", "requeue"])),
    st.builds(Surplus, max_carry_steps=st.integers(1, 4), on_full=st.just("partial")),
)
cases = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(sorted(SETTINGS)),
        "prompts": st.integers(40, 80),  # a selector that repeats none in hand needs a batch's worth with signal
        "target_groups": st.integers(1, 10),
        "gen_batch_size": st.integers(1, 20),
        "limits": limits,
        "surplus": surplus,
        "seed": st.integers(0, 2**31),
    }
)
properties = settings(max_examples=settings.default.max_examples * 3 // 5)  # every example is a run


@functools.cache
def divisions(policy: str, prompts: int) -> list[Division]:
    """Made once: it takes longer than a run."""
    return SETTINGS[policy].strata().of(source(prompts)) if SETTINGS[policy].policies.prior == "strata" else []


def make(case: dict[str, Any], allocator: Allocator | None = None) -> Collector:
    chosen = SETTINGS[case["policy"]]
    bounds = {name: case[name] for name in ("target_groups", "gen_batch_size", "limits", "surplus", "seed")}
    prompts = source(case["prompts"])
    bounds["beliefs"] = Beliefs(prompts.keys(), divisions=divisions(case["policy"], case["prompts"]))
    return Collector(prompts, chosen.selector(), allocator or chosen.allocator(), chosen.filter(), **bounds)


def run_until_exhausted(case: dict[str, Any], steps: int = 4) -> tuple[Collector, Log]:
    collector, log, engine = make(case), Log(), FaultyEngine(case["seed"])
    try:
        for _ in range(steps):
            train(collector, engine, log)
    except Exhausted:
        pass  # not one group was to be had within the limits
    return collector, log


@properties
@given(cases)
def test_accounts_sum_at_every_event_and_end_where_the_batches_say(case: dict[str, Any]) -> None:
    collector, log = run_until_exhausted(case)  # every event is checked on the way
    assert all(len(batch) <= case["target_groups"] for batch in log.batches), "whatever the limits"
    accounts = collector.accounts.by_class(collector.accounts.rollouts)
    trained = sum(len(group.trained) for batch in log.batches for group in batch)
    assert accounts["trained"] + accounts["backfilled"] == trained
    assert accounts["carried"] == sum(len(group) for group in collector.kept)


@properties
@given(cases.filter(lambda case: isinstance(SETTINGS[case["policy"]].filter(), Variance)))
def test_no_group_without_variance_is_trained_unless_it_fills_up_an_exhausted_batch(case: dict[str, Any]) -> None:
    _, log = run_until_exhausted({**case, "limits": Limits(max_retries=case["limits"].max_retries)})
    for group in (group for batch in log.batches for group in batch if len(group) > 1):
        assert len(set(group.rewards)) > 1


@properties
@given(cases)
def test_without_limits_batches_are_full_of_groups_trained_once_in_issue_order_and_within_their_age(
    case: dict[str, Any],
) -> None:
    _, log = run_until_exhausted({**case, "limits": Limits()})
    assert [len(batch) for batch in log.batches] == [case["target_groups"]] * 4
    trained = [group.uid for batch in log.batches for group in batch]
    assert len(trained) == len(set(trained))
    for step, batch in enumerate(log.batches):
        order = [int(group.uid[1:]) for group in batch]
        assert order == sorted(order)
        assert all(step - group.version <= case["surplus"].max_carry_steps for group in batch)


@dataclass
class Belated(FaultyEngine):
    """Counts the tokens of what was cancelled in an earlier step, and belongs to that step's limit."""

    cancelled: set[str] = field(default_factory=set)
    late_tokens: int = 0

    def step(self) -> list[Rollout | Failure]:
        events = super().step()
        self.late_tokens += sum(event.tokens for event in events if event.uid in self.cancelled)
        return events


@properties
@given(cases)
def test_no_limit_is_exceeded(case: dict[str, Any]) -> None:
    bounds, collector, log = case["limits"], make(case), Log()
    engine, cancelled = Belated(case["seed"], duplicate_rate=0.0), set[str]()
    asked: dict[str, int] = {}
    try:
        for _ in range(3):
            before, engine.late_tokens = collector.accounts.generated_tokens, 0
            cancelled |= {decision[1] for decision in log.decisions if decision[0] == "cancel"}
            engine.cancelled = set(cancelled)
            log.decisions.clear()
            while not collector.ready:
                turn(collector, engine, log)
            rollouts = sum(decision[3] for decision in log.decisions if decision[0] == "ask")
            prompts = len({decision[1] for decision in log.decisions if decision[0] == "ask" and decision[4] == 0})
            for decision in (decision for decision in log.decisions if decision[0] == "ask"):
                asked[decision[1]] = asked.get(decision[1], 0) + decision[3]
            assert rollouts <= (bounds.max_rollouts_per_step or rollouts)
            assert prompts <= (bounds.max_num_gen_batches or prompts) * case["gen_batch_size"]
            tokens = collector.accounts.generated_tokens - before - engine.late_tokens
            assert tokens <= (bounds.max_tokens_per_step or tokens)
            batch = take(collector, engine, log)
            most = MAX_N.get(case["policy"], 8)
            assert all(len(group) <= most for group in batch)
            assert all(asked[group.uid] <= most * (bounds.max_retries + 1) for group in batch)
    except Exhausted:
        pass


@properties
@given(cases)
def test_the_same_seed_gives_the_same_decisions(case: dict[str, Any]) -> None:
    assert run_until_exhausted(case)[1].decisions == run_until_exhausted(case)[1].decisions


@properties
@given(cases)
def test_the_visits_to_a_prompt_are_numbered_in_the_order_they_are_issued(case: dict[str, Any]) -> None:
    _, log = run_until_exhausted(case)
    asks = [decision[1:] for decision in log.decisions if decision[0] == "ask"]
    groups = {(uid, prompt, visit) for uid, prompt, _, _, visit in asks}
    assert len(groups) == len({uid for uid, _, _ in groups})
    issued: dict[int, list[int]] = {}
    for _, prompt, visit in sorted(groups, key=lambda group: int(group[0][1:])):
        issued.setdefault(prompt, []).append(visit)
    assert all(numbers == list(range(len(numbers))) for numbers in issued.values())


@properties
@given(cases, st.integers(0, 2**31))
def test_the_order_of_arrival_changes_neither_a_group_nor_what_is_asked_for(case: dict[str, Any], order: int) -> None:
    """Each prompt is visited once, in waves: everything in flight arrives, in an order of its own, before the next."""

    def groups(shuffle: int) -> tuple[list[Any], Any]:
        subject, engine, asked = make(case), FaultyEngine(case["seed"], duplicate_rate=0.0), []
        subject.filter = Everything()
        while not subject.ready:
            requests = subject.requests()
            asked.append(requests)
            flights = [(request, request.first + i) for request in requests for i in range(request.n)]
            random.Random(shuffle).shuffle(flights)
            for request, index in flights:
                subject.observe(engine.outcome(request.uid, index, request.prompt.index))
            subject.cancelled()
        trained = [(group.uid, group.rewards, [r.index for r in group.trained]) for group in subject.take()]
        return [sorted(map(str, wave)) for wave in asked], trained

    case = {**case, "limits": Limits(max_retries=case["limits"].max_retries), "gen_batch_size": case["target_groups"]}
    assert groups(order) == groups(order + 1)


@properties
@given(cases, st.integers(1, 60))
def test_cut_at_any_event_saved_and_loaded_it_decides_as_if_uncut(
    tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any], cut: int
) -> None:
    case = {**case, "limits": Limits(max_retries=case["limits"].max_retries)}
    whole = run(make(case), FaultyEngine(case["seed"]), steps=3)
    collector, engine, log = make(case), FaultyEngine(case["seed"]), Log()
    path = tmp_path_factory.mktemp("state") / "collector.npz"
    events = 0
    for _ in range(3):
        while not collector.ready:
            for request in collector.requests(room=engine.free):
                index, n, first, visit = request.prompt.index, request.n, request.first, request.visit
                log.decisions.append(["ask", request.uid, index, n, first, visit])
                engine.submit(request)
            for event in engine.step():
                collector.observe(event)
                events += 1
                if events == cut:
                    collector = reloaded(collector, make(case), path)
            for uid in collector.cancelled():
                log.decisions.append(["cancel", uid])
                engine.abort(uid)
        take(collector, engine, log)
    assert log.decisions == whole.decisions


@properties
@given(cases, st.integers(1, 20))
def test_after_a_crash_that_loses_everything_in_flight_the_batches_are_still_full(
    tmp_path_factory: pytest.TempPathFactory, case: dict[str, Any], cut: int
) -> None:
    case = {**case, "limits": Limits()}
    collector, engine, log = make(case), FaultyEngine(case["seed"]), Log()
    for _ in range(cut):
        if collector.ready:
            take(collector, engine, log)
        turn(collector, engine, log)
    reborn = reloaded(collector, make(case), tmp_path_factory.mktemp("state") / "collector.npz")
    reborn.reissue()
    after = run(reborn, FaultyEngine(case["seed"] + 1), steps=2)
    trained = [group.uid for batch in log.batches + after.batches for group in batch]
    assert len(trained) == len(set(trained))
    assert all(len(batch) == case["target_groups"] for batch in after.batches)


@properties
@given(cases, st.data())
def test_what_is_rejected_is_replaced_until_the_batch_is_full(case: dict[str, Any], data: st.DataObject) -> None:
    case = {**case, "limits": Limits()}
    collector, engine, log = make(case), FaultyEngine(case["seed"]), Log()
    held = {group.uid for group in train(collector, engine, log)}
    for _ in range(3):
        gone = data.draw(st.sets(st.sampled_from(sorted(held))))
        if not gone:
            break
        assert set(collector.reject(gone, "gate")) == gone
        held -= gone
        fresh = {group.uid for group in train(collector, engine, log)}
        assert not fresh & held
        held |= fresh
        assert len(held) == case["target_groups"]
        collector.accounts.check()
    rejected = collector.accounts.by_class(collector.accounts.rollouts)["rejected"]
    assert rejected == sum(len(g) for batch in log.batches for g in batch if g.uid not in held)


@properties
@given(cases, st.data())
def test_rows_that_are_rejected_are_never_trained_and_no_group_is_left_without_one(
    case: dict[str, Any], data: st.DataObject
) -> None:
    """A group trains some of its rows only: what a gate has not seen does not take the place of what it refused."""
    case = {**case, "limits": Limits()}
    collector = make(case, allocator=Adaptive(max_n=8, min_rollouts=6, stop="contrast", max_train_n=2))
    engine, log = FaultyEngine(case["seed"]), Log()
    gone: set[tuple[str, int]] = set()
    for _ in range(3):
        indices = {group.uid: [rollout.index for rollout in group.trained] for group in train(collector, engine, log)}
        refused = {uid: data.draw(st.sets(st.sampled_from(some))) for uid, some in indices.items()}
        gone.update((uid, index) for uid, some in refused.items() for index in some)
        collector.reject(refused, "gate")
        collector.accounts.check()
        trained = [rollout for group in collector.in_hand for rollout in group.trained]
        assert all(group.trained for group in collector.in_hand)
        assert not gone & {(rollout.uid, rollout.index) for rollout in trained}
        assert collector.accounts.rollouts["trained"] == len(trained)
        if not collector.owed:
            break


def test_a_new_process_goes_on_with_the_same_decisions(tmp_path: Path) -> None:
    case = {
        "policy": "thompson_contrast",
        "prompts": 50,
        "target_groups": 6,
        "gen_batch_size": 9,
        "limits": Limits(),
        "surplus": Surplus(),
        "seed": 7,
    }
    collector, engine = make(case), FaultyEngine(7)
    run(collector, engine, steps=2)
    turn(collector, engine, Log())
    save_state(collector.state_dict(), tmp_path / "collector.npz")
    (tmp_path / "engine.json").write_text(json.dumps(asdict(engine)))
    here = run(collector, engine, steps=2).decisions
    script = (
        "import json, sys; from pathlib import Path; folder = Path(sys.argv[1]); "
        "from unit.core.driver import FaultyEngine, run; from unit.core.test_collector_properties import make; "
        "from goldilocks.runs.checkpoints import load_state; from goldilocks.core import Limits, Surplus; "
        "case = {**json.loads(sys.argv[2]), 'limits': Limits(), 'surplus': Surplus()}; collector = make(case); "
        "collector.load_state_dict(load_state(folder / 'collector.npz')); "
        "engine = FaultyEngine(**json.loads((folder / 'engine.json').read_text())); "
        "print(json.dumps(run(collector, engine, steps=2).decisions))"
    )
    plain = json.dumps({name: value for name, value in case.items() if name not in ("limits", "surplus")})
    there = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), plain],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": ":".join(path for path in sys.path if path), "PYTHONHASHSEED": "99"},
    )
    assert json.loads(there.stdout) == here
