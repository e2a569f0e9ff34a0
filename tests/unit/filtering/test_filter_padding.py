"""Padding rows fill a batch up and change nothing that is trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from goldilocks.filtering import pad_batch
from goldilocks.filtering.rows import PADDING_UID, PaddedBatch

PROMPT, RESPONSE, GROUP = 3, 16, 4


def batch_of(sizes: list[int], seed: int = 0) -> tuple[dict[str, Any], list[str]]:
    """A batch as verl has it. Lengths are powers of two and rewards few bits, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    uids = [f"prompt {group}" for group, size in enumerate(sizes) for _ in range(size)]
    rows = len(uids)
    lengths = 2 ** torch.randint(0, 5, (rows,), generator=generator)
    mask = (torch.arange(RESPONSE)[None] < lengths[:, None]).long()
    scores = torch.zeros(rows, RESPONSE)
    scores[torch.arange(rows), lengths - 1] = torch.randint(-8, 9, (rows,), generator=generator) / 8
    return {
        "input_ids": torch.randint(0, 99, (rows, PROMPT + RESPONSE), generator=generator),
        "responses": torch.randint(0, 99, (rows, RESPONSE), generator=generator),
        "prompts": torch.randint(0, 99, (rows, PROMPT), generator=generator),
        "attention_mask": torch.cat([torch.ones(rows, PROMPT, dtype=torch.int64), mask], dim=1),
        "response_mask": mask,
        "token_level_scores": scores,
        "token_level_rewards": scores.clone(),
        "data_source": np.array(["sums"] * rows, dtype=object),
        "acc": [float(score) for score in scores.sum(-1)],
    }, uids


def padded(sizes: list[int], group_size: int | None = GROUP, divisor: int = 8) -> tuple[dict[str, Any], PaddedBatch]:
    batch, uids = batch_of(sizes)
    return batch, pad_batch(batch, uids, group_size, divisor)


def test_groups_are_filled_up_first_if_they_have_a_size_and_then_the_batch() -> None:
    _, result = padded([3, 4, 1])
    assert result.is_padding.int().tolist() == [0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert result.uids[:3] == ["prompt 0"] * 3
    assert result.uids[4:9] == ["prompt 1"] * 4 + ["prompt 2"]
    _, result = padded([3, 5, 1], group_size=None, divisor=4)
    assert result.is_padding.int().tolist() == [0] * 9 + [1] * 3


def test_a_padding_row_is_a_group_of_its_own() -> None:
    _, result = padded([3, 2])
    made = [uid for uid, padding in zip(result.uids, result.is_padding, strict=True) if padding]
    assert len(set(made)) == len(made) == 3
    assert all(str(uid).startswith(PADDING_UID) for uid in made)


def test_a_batch_that_fits_gets_no_padding() -> None:
    batch, result = padded([4, 4])
    assert not result.is_padding.any()
    assert all(torch.equal(batch[name], result.batch[name]) for name in ("responses", "response_mask"))


def test_real_rows_keep_every_value_and_their_order() -> None:
    batch, result = padded([3, 1, 2])
    real = ~result.is_padding
    for name, values in batch.items():
        if isinstance(values, torch.Tensor):
            assert torch.equal(result.batch[name][real], values)
        else:
            assert [v for v, keep in zip(result.batch[name], real.tolist(), strict=True) if keep] == list(values)


def test_a_padding_row_is_a_prompt_with_an_empty_response() -> None:
    batch, result = padded([3, 1])
    shortest = batch["response_mask"].sum(-1).argmin()
    pad = result.is_padding
    for name in ("response_mask", "token_level_scores", "token_level_rewards"):
        assert not result.batch[name][pad].any()
    assert (result.batch["attention_mask"][pad, :PROMPT] == 1).all()
    assert not result.batch["attention_mask"][pad, PROMPT:].any()
    assert (result.batch["input_ids"][pad] == batch["input_ids"][shortest]).all()


def test_groups_that_do_not_stand_together_are_brought_together() -> None:
    batch, _ = batch_of([4])
    result = pad_batch(batch, np.array(["a", "b", "a", "b"]), 2, 1)
    assert result.uids == ["a", "a", "b", "b"]
    assert torch.equal(result.batch["responses"], batch["responses"][[0, 2, 1, 3]])


def test_fields_to_zero_may_be_numpy_arrays_or_not_there_and_must_be_numbers() -> None:
    batch, uids = batch_of([3])
    assert pad_batch(batch | {"rewards": np.ones(3)}, uids, GROUP, 1).batch["rewards"].tolist() == [1, 1, 1, 0]
    with pytest.raises(ValueError, match="='list' is not accepted: a tensor or a numpy array"):
        pad_batch(batch | {"rewards": [1.0] * 3}, uids, GROUP, 1)
    del batch["attention_mask"]
    assert pad_batch(batch, uids, GROUP, 1).is_padding.tolist() == [False, False, False, True]


def test_what_cannot_be_padded_is_named() -> None:
    batch, uids = batch_of([5])
    with pytest.raises(ValueError, match="group_size=4 is not accepted: 5 or more, the size of the largest group"):
        pad_batch(batch, uids, 4, 1)
    with pytest.raises(ValueError, match="divisor=0 is not accepted: 1 or more"):
        pad_batch(batch, uids, None, 0)
    with pytest.raises(ValueError, match=r"uids=.* is not accepted: one for each of the 5 rows"):
        pad_batch(batch, uids[:2], None, 1)
    with pytest.raises(ValueError, match="response_mask='no rows' is not accepted: at least one row"):
        pad_batch({"response_mask": torch.zeros(0, 4)}, [], None, 1)


# --- verl's own arithmetic, with and without


SIZES = [3, 4, 1, 2, 4, 3]


@pytest.mark.parametrize("estimator", ["grpo", "grpo_vectorized", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_verls_advantages_are_equal_to_the_bit(estimator: str) -> None:
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    batch, uids = batch_of(SIZES)
    result = pad_batch(batch, uids, GROUP, 7)

    def of(fields: dict[str, Any], index: list[object]) -> torch.Tensor:
        return core_algos.get_adv_estimator_fn(estimator)(
            token_level_rewards=fields["token_level_rewards"].clone(),
            response_mask=fields["response_mask"],
            index=np.array(index, dtype=object),
            config={},
        )[0]

    padded_advantages = of(result.batch, result.uids)
    assert torch.equal(padded_advantages[~result.is_padding], of(batch, list(uids)))
    assert not padded_advantages[result.is_padding].any()


MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]


@pytest.mark.parametrize("mode", MODES)
def test_every_loss_of_verls_and_its_gradient_are_equal_to_the_bit(mode: str) -> None:
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    batch, uids = batch_of(SIZES)
    exact = torch.randint(-64, 65, batch["response_mask"].shape, generator=torch.Generator().manual_seed(1)) / 64
    result = pad_batch(batch | {"losses": exact}, uids, GROUP, 7)

    def with_gradient(losses: torch.Tensor, mask: torch.Tensor) -> tuple[float, torch.Tensor]:
        losses = losses.clone().requires_grad_()
        loss = core_algos.agg_loss(losses, mask, mode)
        return loss.item(), torch.autograd.grad(loss, losses)[0]

    loss, gradient = with_gradient(exact, batch["response_mask"])
    padded_loss, padded_gradient = with_gradient(result.batch["losses"], result.batch["response_mask"])
    assert padded_loss == loss != 0
    assert torch.equal(padded_gradient[~result.is_padding], gradient)
    assert not padded_gradient[result.is_padding].any()


def test_these_are_all_the_aggregations_verl_has() -> None:
    core_algos = pytest.importorskip("verl.trainer.ppo.core_algos")
    import inspect
    import re

    assert set(re.findall(r'"((?:token|seq)-[a-z-]+)"', inspect.getsource(core_algos.agg_loss))) == set(MODES)


def test_verls_statistics_of_scores_and_lengths_are_equal() -> None:
    metric_utils = pytest.importorskip("verl.trainer.ppo.metric_utils")
    from verl import DataProto

    batch, uids = batch_of(SIZES)
    result = pad_batch(batch, uids, GROUP, 7)

    def statistics(fields: dict[str, Any]) -> dict[str, Any]:
        tensors = {name: value for name, value in fields.items() if isinstance(value, torch.Tensor)}
        tensors |= {"advantages": tensors["token_level_scores"], "returns": tensors["token_level_scores"]}
        metrics = metric_utils.compute_data_metrics(DataProto.from_single_dict(tensors), use_critic=False)
        return {name: value for name, value in metrics.items() if name.startswith("critic") or "non_aborted" in name}

    assert statistics(result.batch) == statistics(batch)
