"""What vLLM's engine sends when it keeps outputs back: every token and log-prob once, in few messages a request."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from goldilocks.verl.patches.vllm import TOGETHER, HeldOutputs

# vLLM's structs, as far as they are read here; tests/with_vllm has the real ones.
Kind = Enum("Kind", "CUMULATIVE DELTA FINAL_ONLY")


class LogProbs(NamedTuple):
    tokens: np.ndarray
    log_probs: np.ndarray
    ranks: np.ndarray
    offsets: list[int] | None = None


@dataclass
class Output:
    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogProbs | None = None
    finish_reason: str | None = None
    routed_experts: np.ndarray | None = None


@dataclass
class Step:
    outputs: list[Output] = field(default_factory=list)
    finished_requests: set[str] | None = None
    scheduler_stats: object = None


def request(detokenize: bool = False, kind: Kind = Kind.CUMULATIVE) -> Any:
    return SimpleNamespace(sampling_params=SimpleNamespace(detokenize=detokenize, output_kind=kind))


def log_probs(tokens: list[int]) -> LogProbs:
    ids = np.array(tokens)
    return LogProbs(ids[:, None], -ids[:, None] / 7, ids % 3)


def output(name: str, tokens: list[int], finish_reason: str | None = None) -> Output:
    return Output(name, tokens, log_probs(tokens) if tokens else None, finish_reason)


def held(requests: dict[str, Any]) -> tuple[HeldOutputs, list[Any]]:
    sent: list[Any] = []
    return HeldOutputs(sent.append, requests, lambda array: array), sent


def outputs_of(sent: list[Any], name: str) -> list[Output]:
    return [one for _, step in sent for one in step.outputs if one.request_id == name]


lengths = st.dictionaries(st.sampled_from("abcde"), st.integers(1, 3 * TOGETHER), min_size=1)


@given(lengths=lengths, more=st.integers(1, 3), aborted=st.booleans())
def test_a_request_has_a_first_output_and_few_with_the_rest(lengths: dict[str, int], more: int, aborted: bool) -> None:
    queue, sent = held({name: request() for name in lengths})
    tokens = {name: [list(range(step, step + more)) for step in range(steps)] for name, steps in lengths.items()}
    for step in range(max(lengths.values())):
        ended = {name: aborted is False and step == steps - 1 for name, steps in lengths.items()}
        due = [output(name, tokens[name][step], "stop" if ended[name] else None)
               for name, steps in lengths.items() if step < steps]  # fmt: skip
        queue.put((0, Step(due)))
    if aborted:
        queue.put((0, Step([output(name, [], "abort") for name in lengths])))
    for name, steps in tokens.items():
        whole = [token for step in steps for token in step]
        found = outputs_of(sent, name)
        assert [token for one in found for token in one.new_token_ids] == whole
        assert [one.finish_reason for one in found][:-1] == [None] * (len(found) - 1)
        assert len(found) == 1 + math.ceil((len(steps) - 1 + aborted) / TOGETHER)
        columns = zip(*(one.new_logprobs[:3] for one in found if one.new_logprobs is not None), strict=True)
        for column, expected in zip(map(np.concatenate, columns), log_probs(whole)[:3], strict=True):
            np.testing.assert_array_equal(column, expected)


@pytest.mark.parametrize("one", [request(detokenize=True), request(kind=Kind.DELTA), request(kind=Kind.FINAL_ONLY)])
def test_outputs_that_somebody_reads_as_they_come_are_sent_as_they_come(one: Any) -> None:
    queue, sent = held({"a": one})
    for token in range(5):
        queue.put((0, Step([output("a", [token])])))
    assert [one.new_token_ids for one in outputs_of(sent, "a")] == [[0], [1], [2], [3], [4]]


def test_a_step_with_nothing_to_send_sends_nothing_and_any_other_message_goes_through() -> None:
    queue, sent = held({"a": request()})
    queue.put((0, Step([output("a", [1])])))
    queue.put((0, Step([output("a", [2])])))
    assert len(sent) == 1
    others = [b"ENGINE_CORE_DEAD", (0, Step()), (-1, Step(scheduler_stats="stats"))]
    others += [(0, Step([output("a", [3])], finished_requests={"b"})), (0, Step([output("a", [4])], scheduler_stats=1))]
    for message in others:
        queue.put(message)
    assert sent[1:] == others


def test_what_a_request_without_a_client_left_is_dropped() -> None:
    requests: dict[str, Any] = {}
    queue, _ = held(requests)
    for number in range(100):  # each is aborted by its client, and ends without an output
        name = f"r{number}"
        requests[name] = request()
        queue.put((0, Step([output(name, [1])])))
        del requests[name]
    assert len(queue._held) <= 3


def test_a_row_of_log_probs_is_as_wide_as_the_request_wants_it_beside_one_that_wants_more() -> None:
    """vLLM makes the rows of a step as wide as its widest request wants them."""
    queue, sent = held({"a": request()})
    for width in (1, 3, 2, 1):
        ids = np.arange(width)[None] + 5
        ended = "stop" if width == 1 and sent else None
        queue.put((0, Step([Output("a", [5], LogProbs(ids, -ids / 7, np.array([1])), ended)])))
    last = outputs_of(sent, "a")[-1]
    assert last.new_logprobs is not None
    assert last.new_logprobs.tokens.tolist() == [[5], [5], [5]]


def test_routed_experts_of_every_token_are_sent() -> None:
    queue, sent = held({"a": request()})
    for token in range(4):
        experts = np.full((1, 2, 2), token)
        queue.put((0, Step([Output("a", [token], None, "stop" if token == 3 else None, experts)])))
    found = [one.routed_experts for one in outputs_of(sent, "a")]
    assert np.concatenate([one for one in found if one is not None])[:, 0, 0].tolist() == [0, 1, 2, 3]


def test_a_request_with_the_name_of_one_whose_client_is_gone_begins_anew() -> None:
    requests = {"a": request()}
    queue, sent = held(requests)
    for token in (1, 2):
        queue.put((0, Step([output("a", [token])])))
    requests["a"] = request()
    for token in (3, 4):
        queue.put((0, Step([output("a", [token], "stop" if token == 4 else None)])))
    assert [one.new_token_ids for one in outputs_of(sent, "a")] == [[1], [3], [4]]
