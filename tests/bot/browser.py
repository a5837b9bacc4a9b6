"""Headless Chromium for tests of pages."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_NEEDED = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: install it to test the page"
)


def in_browser(test: Any) -> Any:
    """A test that opens a page in Chromium, started as `launch(executable_path=CHROMIUM, args=QUIET)`."""
    return pytest.mark.browser(_NEEDED(test))
