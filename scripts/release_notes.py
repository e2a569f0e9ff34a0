#!/usr/bin/env python3
"""Prints what CHANGELOG.md says of a version; fails unless the tag, the package and CITATION.cff name the same version.

python3 scripts/release_notes.py v0.2.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = {  # where a version is written: one line of each file
    "pyproject.toml": r'^version = "(.+)"$',
    "src/goldilocks/__init__.py": r'^__version__ = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
}
HEADING = re.compile(r"^## \[(?P<version>[^]]+)\](?: - \d{4}-\d{2}-\d{2})?$", re.MULTILINE)


def versions(root: Path = ROOT) -> dict[str, str]:
    """Return the version that each file names."""
    found = {file: re.search(pattern, (root / file).read_text(), re.MULTILINE) for file, pattern in VERSIONS.items()}
    return {file: match[1] if match else "none" for file, match in found.items()}


def notes(changelog: str) -> dict[str, str]:
    """Return the text below the heading of each version, the newest first."""
    _, *parts = HEADING.split(changelog)
    return {version: text.strip() for version, text in zip(parts[::2], parts[1::2], strict=True)}


def main(tag: str, root: Path = ROOT) -> int:
    """Print the notes of the tag's version; return 1 if a file names another, or the changelog has none."""
    version = tag.removeprefix("v")
    wrong = [f"{file} says {found}" for file, found in versions(root).items() if found != version]
    text = notes((root / "CHANGELOG.md").read_text()).get(version)
    wrong += [] if text else ["CHANGELOG.md says nothing of it"]
    print(text if not wrong else f"{tag}: {'; '.join(wrong)}", file=sys.stderr if wrong else sys.stdout)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
