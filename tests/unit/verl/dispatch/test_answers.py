"""An answer in parts is one answer: its tokens, log-probs and versions are in order, and it can be saved."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from verl.workers.rollout.replica import TokenOutput

from goldilocks.types import Prompt, Request
from goldilocks.verl.dispatch.answers import ResumableAnswer, continued, name_of
from goldilocks.verl.dispatch.client import Session
from goldilocks.verl.store import UNFINISHED, QueueRows, load_rows, save_rows


def part(tokens: list[int], version: int, stop_reason: str = "aborted") -> TokenOutput:
    probs = [-0.5 * token for token in tokens]
    extra = {"global_steps": version, "top_log_probs": [-0.25 * token for token in tokens]}
    return TokenOutput(token_ids=tokens, log_probs=probs, stop_reason=stop_reason, num_preempted=1, extra_fields=extra)


parts = st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=2, max_size=5)


def written(tokens: list[list[int]]) -> ResumableAnswer:
    return ResumableAnswer("p", [part(one, version) for version, one in enumerate(tokens)])


@given(parts)
def test_every_token_keeps_its_log_prob_and_its_version(tokens: list[list[int]]) -> None:
    answer = written(tokens)
    output = answer.output()
    whole = [token for one in tokens for token in one]
    assert output.token_ids == whole
    assert output.log_probs == [-0.5 * token for token in whole]
    assert output.extra_fields["top_log_probs"] == [-0.25 * token for token in whole]
    versions = [version for version, one in enumerate(tokens) for _ in one]
    assert [version for version, count in answer.versions for _ in range(count)] == versions
    assert output.extra_fields["min_global_steps"] == min(versions, default=None)
    assert output.extra_fields["max_global_steps"] == max(versions, default=None)
    assert output.num_preempted == len(tokens)


def test_an_answer_in_one_part_is_what_the_server_returned_and_a_part_without_tokens_lacks_nothing() -> None:
    only = part([1, 2], 3, "completed")
    assert ResumableAnswer("p", [only]).output() is only
    nothing = TokenOutput(token_ids=[], log_probs=None, stop_reason="aborted", extra_fields={"global_steps": 0})
    output = ResumableAnswer("p", [nothing, part([3], 1)]).output()
    assert output.log_probs == [-1.5]
    assert output.extra_fields["top_log_probs"] == [-0.75]


@pytest.mark.parametrize("lacking", [0, 1])
def test_values_that_a_part_with_tokens_lacks_are_not_those_of_the_other_part(lacking: int) -> None:
    both = [part([1, 2], 0), part([3], 1)]
    both[lacking].log_probs = None
    del both[lacking].extra_fields["top_log_probs"]
    output = ResumableAnswer("p", both).output()
    assert output.log_probs is None
    assert "top_log_probs" not in output.extra_fields


def test_experts_of_later_parts_are_those_of_their_own_tokens() -> None:
    first, second = part([1, 2], 0), part([3], 1)
    first.routed_experts, second.routed_experts = np.zeros((5, 1)), np.ones((6, 1))  # of prompt and answer
    assert ResumableAnswer("p", [first, second]).output().routed_experts[:, 0].tolist() == [0] * 5 + [1]


def test_what_was_saved_comes_back_and_is_given_once(tmp_path: Path) -> None:
    answer = written([[1, 2], [], [3]])
    QueueRows(lambda: [["g7", 2, answer.state_dict()]]).save([], tmp_path / "first")
    loaded = QueueRows(list)
    assert set(loaded.load(tmp_path / "first")) == {("g7", 2)}
    loaded.save([], tmp_path / "again")  # a run that is cut before it goes on still has it
    assert load_rows(tmp_path / "again" / UNFINISHED)[0][:2] == ["g7", 2]
    assert ResumableAnswer.from_state_dict(loaded.give(Request("g7", Prompt(0, 0), n=3, first=1))[2]) == answer
    assert not loaded.give(Request("g7", Prompt(0, 0), n=3, first=1))
    save_rows([answer.state_dict()], tmp_path)
    assert "[1" not in (tmp_path / "values.json").read_text(), "arrays are stored as tensors"


def test_a_saved_answer_is_gone_on_with_only_if_the_same_is_asked() -> None:
    saved = ResumableAnswer(name_of([1, 2]), [part([3], 0)])
    same, other = (Session("g0", 0, answers=[saved]) for _ in range(2))
    assert same.next_answer([1, 2]) is saved
    assert same.next_answer([1, 2, 3]).parts == []
    assert other.next_answer([1, 9]).parts == []
    assert [answer.prompt for answer in other.answers] == [name_of([1, 9])]


def test_parts_that_one_policy_wrote_count_as_one() -> None:
    """A batch that a gate rejects is refilled under the same policy: its rollouts pause, go on, and pause again."""
    answer = ResumableAnswer("asked", [part([1, 2], 0), part([3], 0), part([], 1), part([4], 1), part([5, 6], 1)])
    assert answer.versions == [[0, 3], [1, 3]]


@pytest.mark.parametrize(("engine", "same"), [("transformers", True), ("vllm", False)])
def test_the_rest_of_an_answer_draws_noise_of_its_own(engine: str, same: bool) -> None:
    rollout = SimpleNamespace(name=engine, prompt_length=10, response_length=20)
    given: dict[str, Any] = {"seed": 11, "temperature": 0.7}
    assert continued(given, rollout, prompt=10, written=0) == given
    rest = continued(given, rollout, prompt=10, written=6)
    assert (rest["max_tokens"], rest["temperature"]) == (14, 0.7)
    assert (rest["seed"] == 11) is same
    assert continued({"max_new_tokens": 9}, rollout, prompt=28, written=6) == {"max_tokens": 3}
