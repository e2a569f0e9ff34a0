"""The collector goes through verl's data in the order of verl's own loader."""

from __future__ import annotations

import io
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Features, Image, List, Value, load_from_disk
from omegaconf import OmegaConf
from PIL import Image as Pictures
from torch.utils.data import Sampler, SequentialSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler
from verl.trainer.ppo.utils import create_rl_sampler

from goldilocks.core.source import undecoded
from goldilocks.hashing import content_key
from goldilocks.verl.driven import DatasetSource, loader_order
from goldilocks.verl.store import check_columns

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


def png(shade: int) -> bytes:
    file = io.BytesIO()
    Pictures.new("L", (4, 4), shade).save(file, format="PNG")
    return file.getvalue()


class Frame(SimpleNamespace):
    """The attributes of verl's data set."""

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, index: int) -> Any:
        return self.dataframe[index]


STORED = {"bytes": Value("binary"), "path": Value("string")}


@pytest.mark.parametrize("feature", [STORED, Image()])
def test_prompts_that_differ_in_their_images_alone_have_keys_of_their_own(feature: Any) -> None:
    seen = [[{"bytes": png(shade), "path": None}] for shade in (0, 1, 0)] + [None]
    features = Features({"prompt": Value("string"), "images": List(feature)})
    table = Dataset.from_dict({"prompt": ["<image> which?"] * 3 + ["which?"], "images": seen}, features=features)
    keys = DatasetSource(Frame(dataframe=table, prompt_key="prompt", image_key="images")).keys().tolist()
    assert keys[0] == keys[2] != keys[1]
    assert keys[3] == content_key("which?")  # of a prompt without images nothing changes


@pytest.mark.parametrize("feature", [Image(), List(Image())], ids=["image", "images"])
def test_images_are_read_as_they_are_stored_and_nothing_is_written_to_the_disk(tmp_path: Path, feature: Any) -> None:
    stored = [{"bytes": png(shade), "path": None} for shade in range(3)]
    seen = [*(stored if isinstance(feature, Image) else [[one, stored[0]] for one in stored]), None]
    features = Features({"prompt": Value("string"), "seen": feature})
    Dataset.from_dict({"prompt": list("abcd"), "seen": seen}, features=features).save_to_disk(tmp_path)
    table = load_from_disk(tmp_path)
    chosen = table.select([3, 2, 0])
    files = set(tmp_path.iterdir())
    assert list(undecoded(table, "seen")) == seen
    assert list(undecoded(chosen, "seen")) == [seen[3], seen[2], seen[0]]
    assert set(tmp_path.iterdir()) == files


@pytest.mark.parametrize("late", [timedelta(1), {"spans": [{"in": timedelta(1)}]}, time(9), {1, 2}])
def test_a_column_that_no_checkpoint_can_hold_is_named_though_the_first_row_has_no_value_there(late: Any) -> None:
    fine = {"raw_prompt": "a", "day": date(2026, 1, 2), "price": Decimal("1.10")}
    rows: Any = [{**fine, "late": one} for one in (None, late)]
    if not isinstance(late, set):  # Arrow has no column of these
        rows = Frame(dataframe=Dataset.from_list(rows), prompt_key="raw_prompt")
    named = r"column 'late[\w.]*' cannot be saved .*: (timedelta|time|set) .*; leave it out, or"
    with pytest.raises(ValueError, match=named):
        check_columns(DatasetSource(rows).values())


def test_the_key_of_messages_with_an_image_is_that_of_its_pixels() -> None:
    first, same, other = (
        [{"role": "user", "content": [{"image": Pictures.new("L", (2, 2), shade)}]}] for shade in (0, 0, 1)
    )
    assert content_key(first) == content_key(same) != content_key(other)
    assert content_key([b"a"]) != content_key([b"b"])
