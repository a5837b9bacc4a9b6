"""Which of a second's signals, stops and ends are told, when there are too many."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from probes.records import Event

MAX_EVENTS = 32
"""Events of helpers told per reading, and signals to one rank that read alike; a process that is sent signals in a
loop would fill the batch."""
PENDING = " (one is pending already)"
"""Ends the words of a signal that fell together with one before it."""


def told(of_ranks: list[Event], of_helpers: list[Event]) -> list[Event]:
    """Those events that are told, in order of time."""
    return sorted([*_alike_as_one(of_ranks), *_first_of(of_helpers)], key=_instant)


def _instant(event: Event) -> int:
    return event.at_ns


def _alike_as_one(events: list[Event]) -> Iterator[Event]:
    """All of the ranks' events: one of them is why a job ended. Of one sender's signals to one rank the first, and
    how many more."""
    alike: dict[tuple[str, int, str], list[Event]] = {}
    for event in events:
        if event.kind == "signal":
            alike.setdefault((event.job, event.rank, event.detail.removesuffix(PENDING)), []).append(event)
        else:
            yield event
    for (_, _, words), signals in alike.items():
        kept = signals if len(signals) <= MAX_EVENTS else signals[: MAX_EVENTS - 1]
        yield from kept
        if cut := len(signals) - len(kept):
            more = f"and {cut} more within a second, up to this one: {words}"
            yield msgspec.structs.replace(signals[-1], detail=more)


def _first_of(events: list[Event]) -> list[Event]:
    """The helpers' events, when there are many the first ones (what began it), stops and ends before signals: how
    a process ended tells the signal, too."""
    if len(events) <= MAX_EVENTS:
        return events
    events = sorted(events, key=lambda event: (event.kind == "signal", event.at_ns))
    kept = events[: MAX_EVENTS - 1]
    words = f"and {len(events) - len(kept)} more signals, stops or ends of helpers within a second"
    return [*kept, Event(kind="signal", at_ns=max(map(_instant, events)), detail=words)]
