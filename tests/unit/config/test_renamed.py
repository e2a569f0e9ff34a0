"""A config key that has a new name is read under the old one for two minor versions, with a warning."""

from __future__ import annotations

import logging

import pytest
from packaging.version import Version

from goldilocks import __version__
from goldilocks.config.settings import RENAMED, Renamed, read_renamed, rename_override

TABLE = (Renamed("goldilocks.replay.count", "goldilocks.replay.groups", since="0.2"),)


def test_an_old_key_is_read_with_a_warning_and_before_a_default(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read_renamed("goldilocks.replay", {"count": 3, "groups": 0, "max_age": 2}, TABLE) == {
            "groups": 3,
            "max_age": 2,
        }
    assert "goldilocks.replay.count is now goldilocks.replay.groups" in caplog.text


def test_other_keys_and_sections_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    assert read_renamed("goldilocks.budget", {"count": 3}, TABLE) == {"count": 3}
    assert read_renamed("goldilocks.replay", {"groups": 3}, TABLE) == {"groups": 3}
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("goldilocks.replay.count=3", "goldilocks.replay.groups=3"),
        ("+goldilocks.replay.count=3", "+goldilocks.replay.groups=3"),
        ("~goldilocks.replay.count", "~goldilocks.replay.groups"),
        ("goldilocks.replay.counts=3", "goldilocks.replay.counts=3"),
        ("note=goldilocks.replay.count=3", "note=goldilocks.replay.count=3"),
    ],
)
def test_an_override_is_written_with_the_new_name(word: str, meant: str) -> None:
    assert rename_override(word, TABLE) == meant


def is_over(since: str, version: str) -> bool:
    """Whether the two minor versions of a rename are behind this version."""
    first, now = Version(since), Version(version)
    return (now.major, now.minor) >= (first.major, first.minor + 2)


def test_an_old_name_goes_after_two_minor_versions() -> None:
    assert [is_over("0.2", version) for version in ("0.2.0", "0.3.9", "0.4.0", "1.0.0")] == [False, False, True, True]
    assert [one.old for one in RENAMED if is_over(one.since, __version__)] == []


def test_a_renamed_key_stays_in_its_section() -> None:
    assert [one.old for one in RENAMED if one.old.rpartition(".")[0] != one.new.rpartition(".")[0]] == []
