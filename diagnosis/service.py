"""One diagnosis, from a store's address to a verdict: what runs in a worker process."""

from __future__ import annotations

import msgspec

from diagnosis.evidence import Evidence
from diagnosis.limits import LONG_WINDOW_NS, LONG_WINDOW_ROWS, STALE_NS, WINDOW_NS
from diagnosis.store import JobInfo, UnknownJob, open_store
from diagnosis.verdict import Verdict
from diagnosis.wording import instant, to_the_second


def diagnose_job(store_url: str, job: str, *, now_ns: int, last_ns: int | None = None) -> Verdict:
    """Diagnose ``job`` from what the store holds; arguments and result can be sent between processes.

    ``last_ns``: nanoseconds before now to look at. None: the ten minutes up to the job's newest data, however old
    that is; where that is not enough evidence, as of long steps, up to three hours. Of an imported job None is all
    of it, and ``last_ns`` is that long before its own end. ``now_ns`` is UTC. Raises
    :class:`diagnosis.store.UnknownJob` and :class:`diagnosis.store.StoreError`.
    """
    # Here, because whoever has a worker run this should not load SciPy too: a second, and 100 MB.
    from diagnosis.engine import diagnose

    store = open_store(store_url, read_only=True)
    try:
        info = next((info for info in store.jobs() if info.job == job), None)
        if info is None:
            # The store knows other names.
            store.evidence(job, 0, 1)
            raise UnknownJob(job)
        start, end = _window(info, now_ns, last_ns)
        evidence = store.evidence(job, start, end)
        verdict = diagnose(evidence)
        earlier = end - _further_back(evidence)
        if last_ns is None and verdict.status == "insufficient" and max(earlier, info.first_ns) < start:
            del evidence  # both would be in memory
            evidence = store.evidence(job, earlier, end)
            longer = diagnose(evidence)
            verdict = verdict if longer.status == "insufficient" else longer
    finally:
        store.close()
    if info.imported:
        return verdict
    age = now_ns - info.last_ns
    if last_ns is not None and not evidence.ranks:
        return _nothing_there(verdict, _duration(last_ns), _duration(age), instant(info.last_ns))
    if age <= STALE_NS:
        return verdict
    stale = f"the newest data of this job is {_duration(age)} old: what happens now is not seen"
    return msgspec.structs.replace(verdict, not_seen=[*verdict.not_seen, stale])


def _window(info: JobInfo, now_ns: int, last_ns: int | None) -> tuple[int, int]:
    """From when to when to look; the end is not part of it."""
    if info.imported:
        end = info.last_ns + 1
        return (info.first_ns if last_ns is None else max(info.first_ns, end - last_ns)), end
    end = info.last_ns + 1 if last_ns is None else max(info.last_ns, now_ns) + 1
    return end - (WINDOW_NS if last_ns is None else last_ns), end


def _further_back(evidence: Evidence) -> int:
    """How long a window may be looked at where this one says nothing, ns. The rate is that of the time in which
    anything came: a job that has just gone on sent nothing in most of the window."""
    lives = evidence.ranks.values()
    rows = sum(len(one.collectives.seq) + sum(len(thread.at_ns) for thread in one.threads) for one in lives)
    if not rows:
        return LONG_WINDOW_NS
    came_ns = max(one.last_ns for one in lives) - min(one.first_ns for one in lives)
    return min(LONG_WINDOW_NS, LONG_WINDOW_ROWS * came_ns // rows)


def _nothing_there(verdict: Verdict, window: str, age: str, newest: str) -> Verdict:
    """The answer for a job that is known and sent nothing in the window that was asked for."""
    at = to_the_second(newest)
    why = f"nothing of {verdict.job} came in the last {window}; its newest data is {age} old ({at})"
    return msgspec.structs.replace(
        verdict,
        summary=f"Not enough evidence: {why}.",
        not_seen=[why],
        actions=[
            "If the job runs, see whether the agents on its nodes do: sysom doctor there says what is missing.",
            f"For what was last seen of it: sysom diagnose {verdict.job}",
        ],
    )


def _duration(ns: int) -> str:
    seconds = ns // 1_000_000_000
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
