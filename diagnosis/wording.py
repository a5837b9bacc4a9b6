"""Numbers, instants and lists of ranks as they read in sentences: the verdict's own, and those around it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime

MINUS = "−"
_SHOWN = 16

IN_PART = ", in part: "
"""Between the name of a probe that works and what it does not see."""


def instant(utc_ns: int) -> str:
    """RFC 3339, UTC, to the millisecond."""
    moment = datetime.fromtimestamp(utc_ns // 1_000_000_000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{utc_ns // 1_000_000 % 1000:03d}Z"


def to_the_second(instant: str) -> str:
    """An instant of :func:`instant` as it stands in a sentence: ``2026-01-02T14:05:12Z``."""
    return f"{instant.partition('.')[0]}Z" if "." in instant else instant


def ms(value: float) -> str:
    """Milliseconds: ``0.4 ms``, ``52.1 ms``, ``1,234 ms``; from ten seconds on ``12.3 s``."""
    if not math.isfinite(value):
        return "unknown ms"
    number, unit = (value / 1000, "s") if abs(value) >= 10_000 else (value, "ms")
    text = f"{number:,.{1 if abs(number) < 99.95 else 0}f}"
    return f"{'0.0' if text == '-0.0' else text.replace('-', MINUS)} {unit}"


def more_ms(value: float) -> str:
    """:func:`ms` with its sign: ``+15.0 ms``."""
    text = ms(value)
    return text if text.startswith(("0.0 ", MINUS, "u")) else f"+{text}"


def percent(share: float) -> str:
    """A share as a percentage. Never rounds to certainty: ``over 99 %``, ``under 1 %``."""
    if not math.isfinite(share):
        return "unknown"
    if 0.995 <= share < 1:
        return "over 99 %"
    if 0 < share < 0.005:
        return "under 1 %"
    return f"{share * 100:,.0f} %".replace("-", MINUS)


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def ranks(numbers: Sequence[int]) -> str:
    """rank 3; ranks 0–2 and 5; ranks 0, 2, … and 40 more."""
    ordered = sorted(set(numbers))
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    shown = runs if len(runs) <= _SHOWN else runs[:_SHOWN]
    words = [w for run in shown for w in ([f"{run[0]}–{run[-1]}"] if len(run) > 2 else map(str, run))]
    left = len(ordered) - sum(map(len, shown))
    return f"ranks {listed([*words, f'{left:,} more'] if left else words)}"
