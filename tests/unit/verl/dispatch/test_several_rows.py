"""An agent loop that cuts a conversation into rows: the rollout counts once, and rows know who wrote their tokens."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verl.experimental.agent_loop import agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
from verl_world import Queue, Server, Worker, prompt, written

from goldilocks.core.groups import pack_rollout
from goldilocks.types import Group, Prompt, Rollout
from goldilocks.verl.dispatch.backend import rollout_of
from goldilocks.verl.dispatch.client import Session
from goldilocks.verl.store import VERSIONS, batch_of, untrained_of, version_of

ANSWER = [1, 2, 3, 4, 5]


class Cut(SingleTurnAgentLoop):
    """verl's single-turn loop, whose answer becomes as many rows as the rollout's number says: two or three."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        whole = await super().run(sampling_params, **kwargs)
        ends = [0, 1, 3, len(ANSWER)] if kwargs["session_id"] % 2 else [0, 2, len(ANSWER)]
        return [self._part(whole, *span) for span in itertools.pairwise(ends)]

    def _part(self, whole: AgentLoopOutput, start: int, end: int) -> AgentLoopOutput:
        return AgentLoopOutput(
            prompt_ids=whole.prompt_ids + whole.response_ids[:start],
            response_ids=whole.response_ids[start:end],
            response_mask=whole.response_mask[start:end],
            response_logprobs=whole.response_logprobs[start:end],
            num_turns=2,
            metrics=whole.metrics,
            extra_fields=dict(whole.extra_fields),
        )


async def test_rows_of_a_rollout_are_stored_together_and_told_of_once(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(Server(lambda name, ids, seed: written(name, ANSWER)), whole=False)
    monkeypatch.setitem(agent_loop._agent_loop_registry, "cut", {"_target_": f"{__name__}.{Cut.__name__}"})
    await worker.start([prompt(1, 2, agent_name="cut")])
    rollouts = await worker.finish()
    assert [(one.index, one.tokens, len(one.payload)) for one in rollouts] == [(0, 5, 2), (1, 5, 3)]
    assert [key for one in rollouts for key, _ in one.payload] == ["g1_0_0", "g1_0_1", "g1_1_0", "g1_1_1", "g1_1_2"]
    assert sorted(queue.rows) == sorted(key for one in rollouts for key, _ in one.payload)
    assert all(row["rm_scores"].sum() == rollouts[0].reward for row in queue.rows.values())
    for row in queue.rows.values():
        assert row["extra_fields"]["top_log_probs"] == [-0.5] * len(row["responses"])
    group = Group("g1", Prompt(1, 1), tuple(rollouts), trained=tuple(rollouts[1:]))
    assert batch_of([group]).keys == ["g1_1_0", "g1_1_1", "g1_1_2"]
    assert untrained_of([group]) == {"g1": [(rollouts[0].reward, 5)]}
    assert Rollout("g1", *pack_rollout(rollouts[1])) == rollouts[1]


def output(prompt_ids: list[int], tokens: int, said: int = 0) -> Any:
    """An output of verl's agent loop, with tokens of a tool between its first and its other tokens."""
    mask = [1] * min(1, tokens) + [0] * said + [1] * (tokens - 1)
    return SimpleNamespace(
        prompt_ids=prompt_ids, response_ids=[9] * len(mask), response_mask=mask, reward_score=1.0, extra_fields={}
    )


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=5), st.data())
def test_each_row_knows_which_policy_wrote_each_of_its_tokens(rows: list[tuple[int, int]], data: Any) -> None:
    total = sum(tokens for tokens, _ in rows)
    wrote = sorted(data.draw(st.lists(st.integers(3, 5), min_size=total, max_size=total)))
    versions = [[version, wrote.count(version)] for version in sorted(set(wrote))]
    rollout = rollout_of(Session("g", 0), [output([1], tokens, said) for tokens, said in rows], 6, False, versions)
    assert (rollout.tokens, rollout.tool_tokens) == (total, sum(said for _, said in rows))
    assert rollout.version == min(wrote)
    left = iter(wrote)
    for (tokens, _), (_, tag) in zip(rows, rollout.payload, strict=True):
        own = [next(left) for _ in range(tokens)]
        assert version_of(tag) == min(own)
        assert tag["max_global_steps"] == max(own)
        assert [version for version, count in tag.get(VERSIONS, [[own[0], tokens]]) for _ in range(count)] == own


def test_rows_with_other_tokens_than_were_answered_are_as_old_as_the_oldest() -> None:
    """An agent loop that writes a part of a conversation twice, or leaves one out."""
    rollout = rollout_of(Session("g", 0), [output([1], 2), output([1], 4)], 6, False, [[3, 2], [4, 3]])
    assert [(version_of(tag), VERSIONS in tag) for _, tag in rollout.payload] == [(3, False), (3, False)]
    assert isinstance(rollout, Rollout)
