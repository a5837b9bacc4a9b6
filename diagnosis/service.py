"""One diagnosis, from a store's address to a verdict: what runs in a worker process."""

from __future__ import annotations

import msgspec

from diagnosis.engine import diagnose
from diagnosis.limits import STALE_NS, WINDOW_NS
from diagnosis.store import JobInfo, UnknownJob, open_store
from diagnosis.verdict import Verdict


def diagnose_job(
    store_url: str, job: str, *, start_ns: int | None, end_ns: int | None, now_ns: int
) -> Verdict:
    """Diagnose ``job`` from what the store holds; arguments and result can be sent between processes.

    Instants are UTC nanoseconds. ``end_ns`` None: up to the job's newest data; ``start_ns`` None: ten minutes
    before the end. Raises :class:`diagnosis.store.UnknownJob`, :class:`diagnosis.store.StoreError`, and
    :class:`ValueError` for a window that ends before it starts.
    """
    store = open_store(store_url, read_only=True)
    try:
        newest = _newest(store.jobs(), job)
        if newest is None:
            # The store knows the nearest names.
            store.evidence(job, 0, 1)
            raise UnknownJob(job, [])
        end = newest + 1 if end_ns is None else end_ns
        start = end - WINDOW_NS if start_ns is None else start_ns
        if start >= end:
            raise ValueError(f"the window ends before it starts ({start} to {end} ns)")
        verdict = diagnose(store.evidence(job, start, end))
    finally:
        store.close()
    age = now_ns - newest
    if age <= STALE_NS:
        return verdict
    stale = f"the newest data of this job is {_duration(age)} old: what happens now is not seen"
    return msgspec.structs.replace(verdict, not_seen=[*verdict.not_seen, stale])


def _newest(jobs: list[JobInfo], job: str) -> int | None:
    return next((info.last_ns for info in jobs if info.job == job), None)


def _duration(ns: int) -> str:
    seconds = ns // 1_000_000_000
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
