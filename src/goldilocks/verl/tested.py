"""Which versions of other packages the tests were run with, and what is said of any other version.

docs/compatibility.md says what was run on each, and when.
"""

from __future__ import annotations

import contextlib
import importlib.util
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion

TESTED: dict[str, tuple[str, ...]] = {
    "verl": ("==0.9.1", "==0.10.0.dev0"),
    "torch": ("==2.13.0", "==2.11.0"),
    "transformers": ("==5.10.4",),
    "ray": ("==2.60.0",),
    "trl": (">=1.14,<1.17",),
    "vllm": ("==0.27.1", "==0.20.2"),
}


def installed(name: str) -> str | None:
    """Return the version of a package, None if there is none.

    verl has its version in a file: a checkout on the path is imported in the place of the installed package.
    """
    if name == "verl" and (spec := importlib.util.find_spec(name)) and spec.origin:
        with contextlib.suppress(OSError):
            return Path(spec.origin).with_name("version").joinpath("version").read_text().strip()
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def is_tested(name: str, version: str) -> bool:
    """Return whether the tests were run with this version."""
    return any(is_within(version, spec) for spec in TESTED[name])


def is_within(version: str, spec: str) -> bool:
    """Return whether a version is one of ``spec``; one that cannot be read is not."""
    try:
        return SpecifierSet(spec).contains(version, prereleases=True)
    except InvalidVersion:
        return False


def tested_versions(name: str) -> str:
    return " and ".join(spec.removeprefix("==") for spec in TESTED[name])


def untested(name: str) -> str | None:
    """Return the sentence for the log of a run on a version that was not tested; None where it was."""
    version = installed(name)
    if version is None or is_tested(name, version):
        return None
    return (
        f"Goldilocks was tested with {name} {tested_versions(name)}, not with {version}: "
        "goldilocks doctor says which patches still fit, docs/compatibility.md what was run"
    )
