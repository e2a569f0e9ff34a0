"""Under `prompt-mean` every prompt weighs the same, through verl's own aggregation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

from goldilocks.losses.prompt_mean import (
    AGG_MODES,
    LOSS_MODES,
    ROW_MODES,
    prompt_mean_weights,
    weigh_prompts_equally,
)

WIDTH = 5
SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=6)


def actor(agg_mode: str, loss_mode: str = "gspo", **batch_info: Any) -> ActorConfig:
    config = ActorConfig(
        strategy="fsdp2",
        rollout_n=4,
        use_dynamic_bsz=True,
        clip_ratio_low=3e-4,
        clip_ratio_high=4e-4,
        loss_agg_mode=agg_mode,
        policy_loss={"loss_mode": loss_mode, "rollout_correction": {"loss_type": "ppo_clip"}},
    )
    config.global_batch_info.update(batch_info)
    return config


def rows_of(sizes: list[int], padding: int, seed: int) -> tuple[list[str], dict[str, Tensor]]:
    """Groups of the given sizes and some rows of padding, shuffled together."""
    random = torch.Generator().manual_seed(seed)
    uids = [f"prompt{group}" for group, size in enumerate(sizes) for _ in range(size)] + ["pad"] * padding
    order = torch.randperm(len(uids), generator=random).tolist()
    uids = [uids[place] for place in order]
    lengths = torch.tensor([0 if uid == "pad" else 1 + (seed + place) % WIDTH for place, uid in enumerate(uids)])
    old = -torch.rand(len(uids), WIDTH, generator=random, dtype=torch.float64) - 0.1
    return uids, {
        "old_log_prob": old,
        "log_prob": old + 1e-3 * torch.randn(len(uids), WIDTH, generator=random, dtype=torch.float64),
        "advantages": torch.randn(len(uids), 1, generator=random, dtype=torch.float64).repeat(1, WIDTH),
        "response_mask": torch.arange(WIDTH) < lengths.unsqueeze(-1),
    }


def loss_of(rows: dict[str, Tensor], agg_mode: str, loss_mode: str = "gspo", **batch_info: Any) -> Tensor:
    config = actor(agg_mode, loss_mode, **batch_info)
    loss: Tensor = core_algos.get_policy_loss_fn(loss_mode)(**rows, loss_agg_mode=agg_mode, config=config)[0]
    return loss


def weighed(rows: dict[str, Tensor], uids: list[str], agg_mode: str) -> dict[str, Tensor]:
    advantages = weigh_prompts_equally(rows["advantages"], rows["response_mask"], uids, agg_mode)
    return {**rows, "advantages": advantages}


def of_prompt(rows: dict[str, Tensor], uids: list[str], prompt: str) -> dict[str, Tensor]:
    mine = torch.tensor([uid == prompt for uid in uids])
    return {name: value[mine] for name, value in rows.items()}


@pytest.mark.parametrize("agg_mode", AGG_MODES)
@settings(max_examples=12)
@given(sizes=SIZES, padding=st.integers(0, 3), seed=st.integers(0, 1000))
def test_the_loss_is_the_mean_over_prompts_of_each_prompts_own_loss(
    agg_mode: str, sizes: list[int], padding: int, seed: int
) -> None:
    uids, rows = rows_of(sizes, padding, seed)
    alone = [loss_of(of_prompt(rows, uids, f"prompt{group}"), agg_mode) for group in range(len(sizes))]
    together = loss_of(weighed(rows, uids, agg_mode), agg_mode, global_batch_size=len(uids))
    torch.testing.assert_close(together, torch.stack(alone).mean(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("agg_mode", ROW_MODES)
@settings(max_examples=12)
@given(sizes=st.lists(st.integers(1, 6), min_size=2, max_size=5), seed=st.integers(0, 1000))
def test_it_holds_over_ranks_and_mini_batches(agg_mode: str, sizes: list[int], seed: int) -> None:
    """Two mini-batches on two ranks: groups are torn apart, and padding fills up to a multiple of four."""
    uids, rows = rows_of(sizes, -sum(sizes) % 4, seed)
    alone = [loss_of(of_prompt(rows, uids, f"prompt{group}"), agg_mode) for group in range(len(sizes))]
    parts = {name: value.chunk(4) for name, value in weighed(rows, uids, agg_mode).items()}
    losses = [
        loss_of({name: part[place] for name, part in parts.items()}, agg_mode, "gspo", **divided)
        for divided in [{"dp_size": 2, "global_batch_size": len(uids) // 2}]
        for place in range(4)
    ]
    torch.testing.assert_close(torch.stack(losses).mean(), torch.stack(alone).mean(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_a_weight_inside_the_advantage_is_a_weight_on_the_loss_and_its_gradient(loss_mode: str) -> None:
    uids, rows = rows_of([1, 5, 2], 0, 4)
    rows["log_prob"] = (rows["old_log_prob"] + 300 * (rows["log_prob"] - rows["old_log_prob"])).requires_grad_()
    together = loss_of(weighed(rows, uids, "seq-mean-token-mean"), "seq-mean-token-mean", loss_mode)
    alone = [loss_of(of_prompt(rows, uids, f"prompt{group}"), "seq-mean-token-mean", loss_mode) for group in range(3)]
    mean = torch.stack(alone).mean()
    torch.testing.assert_close(together, mean, rtol=1e-5, atol=1e-7)
    (got,), (wanted,) = (torch.autograd.grad(value, rows["log_prob"]) for value in (together, mean))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)


def test_equal_groups_are_left_as_they_are() -> None:
    uids, rows = rows_of([4, 4, 4], 0, 1)
    assert torch.equal(weighed(rows, uids, "seq-mean-token-mean")["advantages"], rows["advantages"])


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=30))
def test_every_prompt_has_an_equal_share_of_the_total(rows: list[tuple[int, int]]) -> None:
    uids, mass = [uid for uid, _ in rows], torch.tensor([tokens for _, tokens in rows])
    weighed_mass = prompt_mean_weights(uids, mass, total=100.0) * mass
    shares = {uid: weighed_mass[[row for row, (one, _) in enumerate(rows) if one == uid]].sum() for uid in set(uids)}
    prompts = {uid for uid, tokens in rows if tokens}
    equal = {uid: 100.0 / len(prompts) if uid in prompts else 0.0 for uid in set(uids)}
    assert {uid: share.item() for uid, share in shares.items()} == pytest.approx(equal, rel=1e-5)


def test_rows_counted_is_what_the_aggregation_divides_by() -> None:
    uids, rows = rows_of([1, 3], 4, 2)
    advantages, mask = rows["advantages"], rows["response_mask"]
    all_rows = weigh_prompts_equally(advantages, mask, uids, "seq-mean-token-mean")
    real_rows = weigh_prompts_equally(advantages, mask, uids, "seq-mean-token-mean", rows_counted=4)
    torch.testing.assert_close(all_rows, 2 * real_rows)
    ours = loss_of({**rows, "advantages": real_rows}, "seq-mean-token-mean", global_batch_size=4)
    assert ours.item() == pytest.approx(
        loss_of({**rows, "advantages": all_rows}, "seq-mean-token-mean", global_batch_size=8).item()
    )


def test_a_sum_over_tokens_has_no_mean_over_prompts() -> None:
    uids, rows = rows_of([2, 2], 0, 0)
    with pytest.raises(ValueError, match=r"loss_agg_mode='token-sum' is not accepted: .*seq-mean-token-mean"):
        weighed(rows, uids, "token-sum")


def test_one_uid_per_row_is_needed() -> None:
    with pytest.raises(ValueError, match="uids='2 uids' is not accepted: one for each of the 3 rows"):
        prompt_mean_weights(["a", "b"], torch.ones(3))
