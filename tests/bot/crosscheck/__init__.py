"""Checks by parties that know Slack apart from us: an npm package that plays Slack, and one that draws its blocks.

`deploy/setup test` installs them into deploy/crosscheck/node_modules, where npm is there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "deploy" / "crosscheck"
LOCAL_SLACK = FOLDER / "node_modules" / "local-slack-linux-x64" / "bin" / "local-slack"
RENDERER = FOLDER / "node_modules" / "slack-blocks-to-jsx"

needs_local_slack = pytest.mark.skipif(
    not LOCAL_SLACK.exists(),
    reason="no local-slack (npm, Linux on x64): deploy/setup test installs it where npm is there",
)
needs_renderer = pytest.mark.skipif(
    not RENDERER.exists(),
    reason="no slack-blocks-to-jsx (npm): deploy/setup test installs it where npm is there",
)
