"""Our functions for nested rows return exactly what verl's own return."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils import losses
from verl.workers.utils.padding import response_from_nested
from verl_world import nested

from goldilocks.verl import plugin
from goldilocks.verl.patches.log_probs import padding_at_once, responses

plugin.additions()


def drawn(lengths: list[int], seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return nested(torch.randn(length, generator=draw) for length in lengths)


def assert_same(ours: torch.Tensor, verls: torch.Tensor) -> None:
    assert ours.is_nested == verls.is_nested
    assert ours.dtype == verls.dtype
    if not ours.is_nested:
        assert torch.equal(ours, verls)
        return
    assert ours.layout == verls.layout == torch.jagged
    assert torch.equal(ours.offsets(), verls.offsets())
    assert torch.equal(ours.values(), verls.values())
    assert torch.equal(ours.to_padded_tensor(0), verls.to_padded_tensor(0))


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(prompts=lengths, data=st.data())
def test_responses_are_verls(prompts: list[int], data: st.DataObject) -> None:
    answers = data.draw(st.lists(st.integers(0, 7), min_size=len(prompts), max_size=len(prompts)))
    if not any(answers):
        answers[0] = 1
    whole = drawn([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    mask = drawn(answers)
    assert_same(responses(whole, mask), response_from_nested(whole, mask))


@given(prompts=lengths, data=st.data())
def test_padded_responses_of_a_loss_are_verls_with_their_gradient(prompts: list[int], data: st.DataObject) -> None:
    answers = data.draw(st.lists(st.integers(1, 7), min_size=len(prompts), max_size=len(prompts)))
    prompts = [max(1, prompt) for prompt in prompts]
    whole = drawn([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    batch = TensorDict({"prompts": drawn(prompts), "responses": drawn(answers)}, batch_size=len(prompts))
    ours = padding_at_once(losses.ppo_loss).__globals__["no_padding_2_padding"]
    assert ours is not losses.no_padding_2_padding
    found = []
    for pad in (ours, losses.no_padding_2_padding):
        values = whole.values().float().requires_grad_()
        rows = pad(torch.nested.nested_tensor_from_jagged(values, whole.offsets()), batch)
        (rows * torch.arange(rows.numel()).view_as(rows)).sum().backward()
        found.append((rows.detach(), values.grad))
    assert all(map(torch.equal, *found))


def test_what_the_quick_padding_does_not_know_is_left_to_verl() -> None:
    ours = padding_at_once(losses.ppo_loss).__globals__["no_padding_2_padding"]
    rows = {"prompts": drawn([1, 2]), "responses": drawn([2, 3])}
    wide = TensorDict(rows, batch_size=2)
    tu.assign_non_tensor(wide, max_response_len=9)
    assert torch.equal(ours(drawn([3, 5]), wide), losses.no_padding_2_padding(drawn([3, 5]), wide))
    two = torch.nested.nested_tensor_from_jagged(torch.randn(8, 2), torch.tensor([0, 3, 8]))
    plain = TensorDict(rows, batch_size=2)
    assert torch.equal(ours(two, plain), losses.no_padding_2_padding(two, plain))
    with pytest.raises(AssertionError, match="assumes prompt_len > 0"):
        ours(drawn([2, 5]), TensorDict({"prompts": drawn([0, 2]), "responses": drawn([2, 3])}, batch_size=2))
    assert padding_at_once(len) is len
