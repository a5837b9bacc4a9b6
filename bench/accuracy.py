"""Verdicts on recorded evidence whose truth others published, beside what simpler methods say of the same files.

Each data set goes the way of a user's files, in a process of its own: the importers, a SQLite store, the engine.
``python -m bench.accuracy FOLDER`` takes the recordings from another folder.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
LIMIT_S = 300


@dataclass(frozen=True)
class Case:
    """One data set and what is known to be true of it."""

    path: str
    status: tuple[str, ...]
    """Statuses that are right; ``refused`` is an error in words."""
    ranks: tuple[int, ...]
    """Who must be named, and nobody else."""
    owner: str = ""
    """Who must own it; "" where that is not known."""
    slowdown: float = 0.0
    """S of arXiv 2505.05713, where it was published."""


Line = dict[str, Any]
"""One row of the table, as JSON between processes."""

UNKNOWN = ("healthy", "slow", "insufficient")
CASES = (
    Case("what-if/trace-AR.parquet", ("slow",), (0,), "node", 1.973),
    Case("what-if/trace-SE.parquet", ("slow",), (), "job", 1.537),
    Case("flight-recorder/gpu_error_1st", ("hang",), (12, 14)),
    Case("flight-recorder/lock_gil_1st", ("hang",), (9, 14)),
    Case("kineto/two-of-128-ranks", UNKNOWN, ()),
    Case("kineto/a100-rank0-of-2.json.gz", UNKNOWN, ()),
    Case("kineto/cpu-only-rank-34-of-300.json.gz", UNKNOWN, ()),
    Case("kineto/malformed/no-distributed-info.json.gz", ("refused", "insufficient"), ()),
    Case("kineto/malformed/rank-not-found.json.gz", ("refused", "insufficient"), ()),
)


def main(folder: Path = DATA) -> None:
    if not folder.is_dir():
        print(f"there are no recordings at {folder}: python -m bench.accuracy FOLDER names another place")
        return
    print(f"{'data set':45} {'by':22} {'answer':28} {'truth':20} {'':6} {'CPU s':>6} {'MiB':>6}")
    wrong = 0
    for case in CASES:
        if not (folder / case.path).exists():
            print(f"{case.path:45} missing: {folder / case.path} is not there")
            continue
        for line in _measured(folder, case):
            wrong += line["by"] == "sysom" and not line["right"]
            verdict = {True: "right", False: "WRONG", None: "–"}[line["right"]]
            print(
                f"{case.path:45} {line['by']:22} {line['answer']:28} {_truth(case):20} {verdict:6} "
                f"{line['seconds']:6.2f} {line['mib']:6.0f}"
            )
            if line.get("note"):
                print(f"{'':45} {line['note']}")
    print(f"sysom: {wrong} of {len(CASES)} wrong" if wrong else "sysom: all right")


def _truth(case: Case) -> str:
    if case.ranks:
        return f"ranks {', '.join(map(str, case.ranks))}"
    return "a message" if "refused" in case.status else "nobody"


def _measured(folder: Path, case: Case) -> list[Line]:
    """A process each: the peak of memory is a process's own."""
    lines = []
    for by in ("sysom", "others"):
        command = [sys.executable, "-m", "bench.accuracy", str(folder), case.path, by]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1]
            lines.append({"by": by, "answer": "failed", "right": False, "seconds": 0, "mib": 0, "note": last})
        else:
            lines += [json.loads(line) for line in done.stdout.splitlines()]
    return lines


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# --- sysom -------------------------------------------------------------------------------------------------


def sysom(path: Path, case: Case) -> Line:
    """Import into an empty store, diagnose from it."""
    from bot.importing import digests_of, store_import
    from diagnosis.service import diagnose_job
    from diagnosis.store import StoreError, open_store
    from probes.importers import Unusable, gather

    begin = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/store.db"
        store = open_store(url)
        try:
            gathered = gather([path])
            store_import(store, gathered, job="recorded", digests=digests_of(gathered.files), nodes={})
        except (Unusable, StoreError) as error:
            right = "refused" in case.status
            return _line(
                "sysom", "refused", right, begin, f"“{str(error).partition('/')[0]}…{str(error)[-90:]}”"
            )
        finally:
            store.close()
        read = time.process_time()
        verdict = diagnose_job(url, "recorded", now_ns=time.time_ns())
        took = time.process_time() - read
        named = tuple(sorted({culprit.rank for culprit in verdict.culprits}))
        right = verdict.status in case.status and named == case.ranks
        right = right and (not case.owner or verdict.owner == case.owner)
        note = f"the verdict {took:.2f} s of it"
        if case.slowdown:
            slowdown, off = _slowdown(url)
            right = right and abs(slowdown / case.slowdown - 1) <= 0.03
            note += (
                f"; slowdown {slowdown:.3f}, published {case.slowdown}; replay {off:+.2%} of the recording"
            )
    who = f"ranks {', '.join(map(str, named))}" if named else "nobody"
    answer = f"{verdict.status}: {who}" + (f" ({verdict.owner})" if verdict.owner else "")
    return _line("sysom", answer, right, begin, note)


def _slowdown(url: str) -> tuple[float, float]:
    """S of the replay, and how far the replay is from the recording."""
    from diagnosis.replay.trace import trace_of
    from diagnosis.replay.whatif import what_if
    from diagnosis.store import open_store

    store = open_store(url, read_only=True)
    try:
        info = store.jobs()[0]
        trace = trace_of(store.evidence("recorded", info.first_ns, info.last_ns + 1))
    finally:
        store.close()
    if trace is None:
        return 0.0, 0.0
    replayed = what_if(trace)
    return replayed.slowdown, replayed.error


def _line(by: str, answer: str, right: bool | None, begin: float, note: str = "") -> Line:
    seconds = time.process_time() - begin
    return {"by": by, "answer": answer, "right": right, "seconds": seconds, "mib": _peak_mib(), "note": note}


# --- others' methods, as their documents describe them -----------------------------------------------------

RELATIVE_SCORE = 0.75
"""NVIDIA Resiliency Extension: a rank's score is the best median of all ranks over its own; below, a straggler."""
SIGMAS = 3.0
ROBUST_Z = 3.5
"""Iglewicz and Hoaglin (1993): 0.6745 · (x − median) / MAD."""


def others(path: Path, case: Case) -> list[Line]:
    """What each simple method names, from the same importers' rows."""
    from probes.importers import Unusable, gather

    begin = time.process_time()
    try:
        work, meetings = _rows(gather([path]))
    except Unusable:
        return []
    lines = []
    methods: tuple[tuple[str, Callable[[], list[int] | None]], ...] = (
        ("relative score < 0.75", lambda: _relative(work)),
        ("3 sigma", lambda: _sigma(work)),
        ("robust z > 3.5", lambda: _robust(work)),
        ("shortest collective", lambda: _extreme(meetings, shortest=True)),
        ("latest start", lambda: _extreme(meetings, shortest=False)),
    )
    for name, method in methods:
        named = method()
        if named is None:
            continue
        answer = f"{len(named)} ranks" if len(named) > 4 else f"ranks {', '.join(map(str, named))}"
        right = tuple(named) == case.ranks
        lines.append(_line(name, answer if named else "nobody", right, begin))
    return lines


Work = dict[int, list[float]]
"""Rank → its computation in each step, in seconds."""
Meetings = dict[tuple[int, str, int, int], dict[int, tuple[int, int]]]
"""One collective → rank → start and duration, in ns."""


def _rows(gathered: object) -> tuple[Work, Meetings]:
    from probes.importers import Gathered, Part, read
    from probes.records import Lane

    assert isinstance(gathered, Gathered)
    steps: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    meetings: Meetings = defaultdict(dict)
    for part in read(gathered, job="recorded"):
        if not isinstance(part, Part):
            continue
        batch, table = part.rank_batch, part.rank_batch.operations
        for kind, lane, step, start, duration, seq in zip(
            table.kind, table.lane, table.step, table.start_ns, table.duration_ns, table.seq, strict=True
        ):
            name = table.names[kind]
            if lane == Lane.COMPUTE:
                steps[batch.rank][step] += duration / 1e9
            elif "reduce-scatter" in name:
                meetings[step, name, seq, batch.place.stage][batch.rank] = (start, duration)
    return {rank: list(by_step.values()) for rank, by_step in steps.items()}, meetings


def _relative(work: Work) -> list[int] | None:
    from statistics import median

    medians = {rank: median(values) for rank, values in work.items()}
    if len(medians) < 2:
        return None
    best = min(medians.values())
    return sorted(rank for rank, own in medians.items() if own > 0 and best / own < RELATIVE_SCORE)


def _sigma(work: Work) -> list[int] | None:
    from statistics import fmean, pstdev

    means = {rank: fmean(values) for rank, values in work.items()}
    if len(means) < 2:
        return None
    centre, spread = fmean(means.values()), pstdev(means.values())
    return sorted(rank for rank, own in means.items() if own > centre + SIGMAS * spread)


def _robust(work: Work) -> list[int] | None:
    from statistics import fmean, median

    means = {rank: fmean(values) for rank, values in work.items()}
    if len(means) < 2:
        return None
    centre = median(means.values())
    spread = median(abs(own - centre) for own in means.values())
    return sorted(rank for rank, own in means.items() if 0.6745 * (own - centre) > ROBUST_Z * spread)


def _extreme(meetings: Meetings, *, shortest: bool) -> list[int] | None:
    """The rank that most often has the shortest duration, or the latest start, in the gradients' reduce-scatter of
    its group: one per group."""
    votes: dict[int, Counter[int]] = {}
    for key, members in meetings.items():
        if len(members) > 1:
            rank = (
                min(members, key=lambda r: members[r][1])
                if shortest
                else max(members, key=lambda r: members[r][0])
            )
            votes.setdefault(key[3], Counter())[rank] += 1
    return sorted(counter.most_common(1)[0][0] for counter in votes.values()) if votes else None


def _one(folder: Path, path: str, by: str) -> None:
    case = next(case for case in CASES if case.path == path)
    for line in [sysom(folder / path, case)] if by == "sysom" else others(folder / path, case):
        print(json.dumps(line))


if __name__ == "__main__":
    if len(sys.argv) == 4:
        _one(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    else:
        main(*map(Path, sys.argv[1:2]))
