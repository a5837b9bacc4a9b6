"""Where the installed PyTorch is, without importing it, which takes seconds."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def folder() -> Path:
    """The package's folder: `include` and `lib` lie in it."""
    spec = importlib.util.find_spec("torch")
    origin = spec.origin if spec else None
    assert origin, "the tests need PyTorch: make test installs it"
    return Path(origin).parent
