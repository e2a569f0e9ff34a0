"""The browser of the tests that look at pages."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
AVAILABLE = bool(CHROMIUM and DRIVER)
WHY_NOT = "no chromium and chromedriver here (scripts/install_chromium.sh installs them)"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1280,900"
)


def start_browser(profile: Path) -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))


PATIENCE_S = 300.0  # for what is sure to happen: a busy machine is not a mistake


def wait(condition: Callable[[], Any]) -> Any:
    """Return the condition's value once it is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return value


def script(browser: webdriver.Chrome, code: str) -> Any:
    return browser.execute_script(code)  # type: ignore[no-untyped-call]
