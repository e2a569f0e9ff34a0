"""Vega, Vega-Lite and Vega-Embed as one script, so that the page needs no network.

Making it takes seconds, so it is made once for each version and kept in the user's cache directory.
"""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import vl_convert

from goldilocks import __version__

SNIPPET = "window.vegaEmbed = vegaEmbed;"


def vega_script() -> str:
    """The script; afterwards ``vegaEmbed`` is there."""
    file = cache_directory() / f"vega-{version('vl-convert-python')}-{__version__}.js"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    script = vl_convert.javascript_bundle(SNIPPET).replace("</script", "<\\/script")
    _keep(file, script)
    return script


def cache_directory() -> Path:
    """Where it is kept: ``$XDG_CACHE_HOME/goldilocks``, else ``~/.cache/goldilocks``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "goldilocks"


def _keep(file: Path, script: str) -> None:
    """Written whole and renamed, so that two reports at once do no harm."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(script, encoding="utf-8")
        temporary.replace(file)
    except OSError:  # a cache that cannot be written costs the next report a few seconds, nothing else
        temporary.unlink(missing_ok=True)
