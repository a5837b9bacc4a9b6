"""Forgetting and giving back, in steps of some milliseconds, so that batches are added all the while."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from contextlib import AbstractContextManager

from sqlite_utils import Database

from diagnosis.store import Keep, opening, retention
from diagnosis.store.opening import transaction

FULL_SHARE = 0.95
"""The oldest go above this share of the size that is kept: the rest takes what comes until the next tidying."""
FREE_SHARE = 0.1
"""More of the file than this is not kept free for batches to come, but given back to the disk."""
FREE_KEPT_BYTES = 4 << 20
"""So much may be free in any file."""

Connection = Callable[[], AbstractContextManager[Database]]
"""Opens a connection; for writing it holds the store's lock meanwhile."""


def forget(
    reading: Connection, writing: Connection, keep: Keep, now_ns: int, go_on: Callable[[], bool]
) -> int:
    """Delete the oldest minutes that are over age, or that the file has no room for; how many batches went.

    ``go_on`` is asked before each step. What is left when it says no comes with the next call.
    """
    too_old_ns = now_ns - int(keep.days * 86_400e9)
    most_bytes = int(keep.gb * 1e9 * FULL_SHARE)
    with reading() as db:
        oldest = retention.oldest(db)
    heapq.heapify(oldest)
    batches = 0
    while oldest and go_on():
        received_ns, sender = oldest[0]
        with writing() as db:
            if received_ns >= too_old_ns and opening.used_bytes(db) <= most_bytes:
                break
            with transaction(db):
                batches += retention.forget_step(db, sender)
                next_ns = retention.first_arrival(db, sender)
        if next_ns is None:
            heapq.heappop(oldest)
        else:
            heapq.heapreplace(oldest, retention.Oldest(next_ns, sender))
    return batches


def give_back(writing: Connection, keep: Keep, go_on: Callable[[], bool]) -> None:
    """Give the disk what is free in the file and will not soon be used."""
    while go_on():
        with writing() as db:
            size, free = opening.size_bytes(db), opening.free_bytes(db)
            too_much = free > max(size * FREE_SHARE, FREE_KEPT_BYTES) or (free and size > keep.gb * 1e9)
            if not too_much or not opening.shrinks(db):
                break
            opening.shrink_step(db)
