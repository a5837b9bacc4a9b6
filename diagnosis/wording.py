"""Numbers, instants and lists of ranks as they read in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

_SHOWN = 16


def instant(utc_ns: int) -> str:
    """RFC 3339, UTC, to the millisecond."""
    moment = datetime.fromtimestamp(utc_ns // 1_000_000_000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{utc_ns // 1_000_000 % 1000:03d}Z"


def ms(value: float) -> str:
    return f"{value:.1f} ms" if abs(value) < 1000 else f"{value:,.0f} ms"


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def ranks(numbers: Sequence[int]) -> str:
    """rank 3; ranks 1, 2 and 5; ranks 0, 1, … and 40 more."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > _SHOWN:
        return f"ranks {', '.join(str(n) for n in numbers[:_SHOWN])} and {len(numbers) - _SHOWN} more"
    return f"ranks {listed([str(n) for n in numbers])}"
