"""The browser for page tests: the system's Chromium, driven by playwright."""

import shutil
from contextlib import contextmanager

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: the page needs a browser")
driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: nothing drives a browser")


@contextmanager
def chromium():
    """Return a headless browser."""
    with driver.sync_playwright() as playing:
        opened = playing.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()
