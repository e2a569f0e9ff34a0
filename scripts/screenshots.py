#!/usr/bin/env python3
"""Takes the pictures of a report that the guide shows, light and dark, in the browser that the tests use.

    python scripts/screenshots.py docs/results/report.html docs/pictures/report

writes ``docs/pictures/report-light.png`` and ``-dark.png``: the top of the page, in few colours to keep
them small.
"""

from __future__ import annotations

import argparse
import io
import shutil
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
COLOURS = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, help="a report, as goldilocks report writes it")
    parser.add_argument("out", type=Path, help="the pictures without -light.png and -dark.png")
    parser.add_argument("--size", type=int, nargs=2, default=(1100, 1500), metavar=("WIDTH", "HEIGHT"))
    args = parser.parse_args()
    browser = start()
    try:
        for theme in ("light", "dark"):
            take(browser, args.page, theme, *args.size).save(f"{args.out}-{theme}.png", optimize=True)
    finally:
        browser.quit()


def start() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in FLAGS:
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def take(browser: webdriver.Chrome, page: Path, theme: str, width: int, height: int) -> Image.Image:
    """Return the top of the page in a colour scheme, once every plot is drawn."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": theme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    browser.get(page.resolve().as_uri())
    deadline = time.monotonic() + 60
    while not browser.execute_script("return document.documentElement.dataset.drawn"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{page} did not say within a minute that its plots are drawn")
        time.sleep(0.1)
    picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
    return picture.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)


if __name__ == "__main__":
    main()
