"""Where recorded evidence of others lies, beside the project: in development and CI only. Tests skip without it."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
DUMPS = DATA / "flight-recorder"
WHAT_IF = DATA / "what-if"
