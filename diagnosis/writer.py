"""The process that writes: one store and one ingest in it, and a thread that deletes what is not kept.

A process of its own, because decoding a batch holds the interpreter's lock: 8 MiB in one piece would hold up
everything else in the server, Slack above all. These functions are called in it, one at a time.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from diagnosis.ingest import Ingest, Refusal, Taken
from diagnosis.orders import Signer, signer
from diagnosis.store import Keep, Store, StoreError, StoreHealth, open_store

log = logging.getLogger(__name__)

TIDY_EVERY_S = 60.0


@dataclass(frozen=True)
class Place:
    """Where a writer writes; can be sent between processes."""

    store_url: str
    command_key: Path | None
    """The key that commands are signed with; None: no commands are sent."""
    keep: Keep


def ready(place: Place) -> None:
    """Open what is needed. Raises ``StoreError`` and ``SigningError``."""
    _ingest(place)


def take(place: Place, node: str, wire: bytes) -> Taken:
    """See :meth:`diagnosis.ingest.Ingest.take`."""
    try:
        ingest = _ingest(place)
    except StoreError as error:  # this process was made anew, and the store does not open again
        raise Refusal(503, "store", str(error), retry_after_s=10) from error
    return ingest.take(node, wire)


def health(place: Place) -> StoreHealth:
    """How the store stands. Raises ``StoreError`` when it does not open."""
    return _store(place).health()


@functools.cache
def _ingest(place: Place) -> Ingest:
    return Ingest(_store(place), {}, signer=_signer(place.command_key))


def _signer(path: Path | None) -> Signer | None:
    return None if path is None else signer(path)


@functools.cache
def _store(place: Place) -> Store:
    store = open_store(place.store_url, keep=place.keep)
    atexit.register(store.close)
    threading.Thread(target=_tidy, args=(store,), name="tidy", daemon=True).start()
    return store


def _tidy(store: Store) -> None:
    while True:
        try:
            gone = store.tidy(time.time_ns())
        except StoreError as error:
            log.error("what is not kept could not be deleted: %s", error)
        except Exception:  # this thread must not end: without it the disk fills up, weeks later
            log.exception("tidying the store failed; it is tried again")
        else:
            if gone:
                log.info("%d batches that are not kept were deleted", gone)
        time.sleep(TIDY_EVERY_S)
