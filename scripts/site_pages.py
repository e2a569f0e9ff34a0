"""Pages of the documentation's site that are no files of ``docs/``; ``mkdocs.yml`` names this file as its hooks.

The API's pages are a table here: mkdocstrings fills them from the docstrings. The files of the repository that a page
links to, such as a README or a module, become pages under ``repository/``: one relative link works on GitHub
and on the site.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()([^)#\s]+)((?:#[^)\s]*)?)(?=\))")
LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".toml": "toml"}
API = {
    "types": ("The vocabulary", "What the collector, engines and trainers say to each other.", ["goldilocks.types"]),
    "collector": (
        "The collector",
        "It decides which prompts are rolled out, how often, and which groups are trained. "
        "See [how it works](../how-it-works.md).",
        [f"goldilocks.core.{name}" for name in ("collector", "source", "limits", "accounts", "beliefs")],
    ),
    "policies": (
        "Policies",
        "Selectors choose prompts, allocators say how many rollouts, filters judge groups. "
        "[A policy of your own](../adding-a-policy.md) writes one.",
        ["goldilocks.core.selectors", "goldilocks.core.allocators", "goldilocks.core.filters"],
    ),
    "driver": (
        "The driver",
        "The loop of every trainer, and the parts an adapter brings. "
        "[A trainer of your own](../adding-a-trainer.md) uses them.",
        [
            "goldilocks.drive.driver",
            "goldilocks.drive.backend",
            "goldilocks.drive.rows",
            "goldilocks.drive.gate",
        ],
    ),
    "filtering": (
        "The batch filter",
        "See [the guide](../batch-filter.md).",
        ["goldilocks.filtering.config", "goldilocks.filtering.batch_filter"],
    ),
    "engine": (
        "The rollout engine",
        "See [what it promises](../rollout-server.md).",
        ["goldilocks.engine.engine"],
    ),
    "verl": (
        "verl's V0 trainer",
        "See [the guide](../drop-in-class.md).",
        ["goldilocks.verl.v0.trainer.RayPPOTrainerWithSampling"],
    ),
    "trl": (
        "TRL",
        "See [the guide](../trl.md).",
        ["goldilocks.trl.algorithms.GoldilocksGRPOTrainer", "goldilocks.trl.algorithms.GoldilocksRLOOTrainer"],
    ),
    "report": ("Reports", "See [the guide](../report.md).", ["goldilocks.lab.report.page"]),
    "testing": ("Contract checks", "For policies and parts of trainers of your own.", ["goldilocks.testing"]),
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the API, and of every file of the repository that a page links to."""
    for name, about in API.items():
        files.append(File.generated(config, f"api/{name}.md", content=api_page(*about)))
    for path in linked(ROOT / "docs" / file.src_uri for file in list(files.documentation_pages())):
        page = File.generated(config, uri(path), content=repository_page(path), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Have links to files of the repository lead to their pages."""
    source = page.file.src_uri
    place = ROOT / source.removeprefix("repository/") if source.startswith("repository/") else ROOT / "docs" / source
    return LINK.sub(lambda found: _link(found, place, source), markdown)


def _link(found: re.Match[str], place: Path, source: str) -> str:
    path = destination(place, found[1])
    if path is None:
        return found[0]
    return os.path.relpath(uri(path), os.path.dirname(source)) + found[2]


def api_page(title: str, about: str, modules: Iterable[str]) -> str:
    """Return a page of which mkdocstrings makes the documentation of the modules."""
    return "\n\n".join([f"# {title}", about, *(f"::: {name}" for name in modules)])


def linked(pages: Iterable[Path]) -> Iterator[Path]:
    """Yield each path outside ``docs/`` that the pages link to, and what those pages link to, once."""
    seen: set[Path] = set()
    left = list(pages)
    while left:
        page = left.pop()
        if page.suffix != ".md" or not page.is_file():
            continue
        for target, _ in LINK.findall(page.read_text()):
            path = destination(page, target)
            if path is not None and not path.is_relative_to(ROOT / "docs") and path not in seen:
                seen.add(path)
                left.append(path)
                yield path


def destination(page: Path, target: str) -> Path | None:
    """Return the file or folder of the repository that a link means; None for an address elsewhere, or no file."""
    path = (page.parent / target).resolve()
    return path if "://" not in target and path.exists() and path.is_relative_to(ROOT) else None


def uri(path: Path) -> str:
    """Return the place of a file's page among the sources of the site."""
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"repository/{name}" if path.suffix == ".md" else f"repository/{name}.md"


def repository_page(path: Path) -> str:
    """Return a page as it is, a file as a block of code, a folder as the list of its files."""
    if path.suffix == ".md":
        return path.read_text()
    title = f"# `{path.relative_to(ROOT).as_posix()}`\n\n"
    if path.is_dir():
        return title + "\n".join(f"- `{one.relative_to(path).as_posix()}`" for one in sorted(_files(path)))
    return f"{title}````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}````\n"


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
