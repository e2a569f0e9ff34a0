"""The collector goes through verl's data in the order of verl's own loader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch.utils.data import Sampler, SequentialSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler
from verl.trainer.ppo.utils import create_rl_sampler

from goldilocks.verl.source import loader_order

SIZE = 20


@pytest.mark.parametrize("data", [{"shuffle": False}, {"shuffle": True, "seed": 7}, {"shuffle": True}])
def test_every_epoch_is_in_the_order_of_verls_loader(data: dict[str, Any]) -> None:
    config = OmegaConf.create(data)
    order = loader_order(create_rl_sampler(config, range(SIZE)))
    loader = StatefulDataLoader(range(SIZE), batch_size=SIZE, sampler=create_rl_sampler(config, range(SIZE)))
    for epoch in range(3):
        assert order(epoch).tolist() == next(iter(loader)).tolist()
    assert order(0).tolist() == order(0).tolist()


def test_a_sampler_of_the_users_own_seed_is_honoured() -> None:
    seeded = RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(3))
    assert loader_order(seeded)(0).tolist() == list(seeded)
    assert np.array_equal(loader_order(SequentialSampler(range(SIZE)))(5), np.arange(SIZE))


class HardestFirst(Sampler[int]):
    """What a curriculum would be."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Any:
        return iter(reversed(range(SIZE)))


@pytest.mark.parametrize(
    "sampler",
    [HardestFirst(), WeightedRandomSampler([1.0] * SIZE, SIZE), RandomSampler(range(SIZE), num_samples=5)],
)
def test_a_sampler_whose_order_is_not_known_is_refused(sampler: Any) -> None:
    name = type(sampler).__name__
    with pytest.raises(ValueError, match=rf"train_sampler={name} is not accepted: .* write a selector"):
        loader_order(sampler)
