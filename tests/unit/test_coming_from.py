"""The keys that ``docs/coming-from.md`` names are keys: of verl and of ours as composed, of TRL's ``GRPOConfig``."""

from __future__ import annotations

import re
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path

import pytest
from trl import GRPOConfig

from goldilocks.config.recipes import choose, compose_config
from goldilocks.launch.on_trl import leaves

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from.md").read_text()
KEY = re.compile(r"\+?((?:actor_rollout_ref|algorithm|data|goldilocks|reward|trainer)(?:\.\w+)+)")


def test_every_dotted_key_is_one_of_the_composed_config() -> None:
    known = list(leaves(compose_config(choose(["grpo"], "cpu"))))
    named = {key for span in re.findall(r"`([^`]+)`", PAGE) for key in KEY.findall(span)}
    assert len(named) > 30
    assert [key for key in sorted(named) if not any(is_part(key, one) for one in known)] == []


def is_part(key: str, known: str) -> bool:
    """Whether a key is the known one, a section of it, or, where it ends in an underscore, the family of it."""
    return known == key or known.startswith(key if key.endswith("_") else f"{key}.")


@pytest.mark.skipif(version("trl") != "1.16.0", reason="the page is about TRL 1.16.0")
def test_every_name_of_trls_table_is_a_field() -> None:
    table = PAGE.partition("| `GRPOConfig` |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1].partition(":")[0] for line in table.splitlines()[2:]]
    named = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    assert len(named) > 15
    assert named - {field.name for field in fields(GRPOConfig)} == {"reward_funcs"}  # an argument of the trainer
