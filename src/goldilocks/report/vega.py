"""Vega, Vega-Lite and Vega-Embed as one script, so that the page needs no network.

Making it takes seconds, so it is made once for each version and kept in the user's cache directory.
"""

from __future__ import annotations

import contextlib
from importlib.metadata import version

import vl_convert

from goldilocks import __version__
from goldilocks.runs.atomic import write_text
from goldilocks.runs.directory import cache_folder

SNIPPET = "window.vegaEmbed = vegaEmbed;"


def vega_script() -> str:
    """Return the script, which defines ``vegaEmbed``."""
    file = cache_folder() / f"vega-{version('vl-convert-python')}-{__version__}.js"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    script = vl_convert.javascript_bundle(SNIPPET).replace("</script", "<\\/script")
    with contextlib.suppress(OSError):  # a cache that cannot be written costs the next report a few seconds
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, script)
    return script
