"""Real faults put into a real job, and what the verdict says of each: cause injected × cause named.

    python -m bench faults                        every fault with 5 seeds, and 50 healthy runs: some hours
    python -m bench faults --fault sigstop --fault gil --seeds 2 --healthy 0
    python -m bench faults --fault sigstop --seed 7      one run again
    python -m bench faults --table                only print what is there

Each run adds a line to ``results.jsonl`` in the folder (``--out``), with its recording beside it. Started again, it
goes on where it was stopped, whatever stopped it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import math
import shutil
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec

from diagnosis.causes import TITLES
from tests.scenarios import ground as left_behind
from tests.scenarios import runner
from tests.scenarios.catalogue import FAULTS
from tests.scenarios.fault import Fault
from tests.scenarios.runner import BITES, Ground, Result

OUT = Path(__file__).resolve().parent.parent / "build" / "faults"
SEEDS, HEALTHY = 5, 50
Z = 1.959964
"""95 % of a normal distribution, two-sided."""
NONE = "(none)"


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run in the file: its result, or why there is none."""

    fault: str
    seed: int
    result: Result | None = None
    error: str = ""


Who = Literal["right", "wrong", "none"]


def main(arguments: Sequence[str] = ()) -> None:
    """Do the runs that are missing, then print the table."""
    options = _options(arguments)
    faults = options.fault or list(FAULTS)
    if unknown := [name for name in faults if name not in FAULTS]:
        raise SystemExit(f"no such fault: {', '.join(unknown)}; there are {', '.join(FAULTS)}")
    if not options.table:
        seeds = [options.seed] if options.seed is not None else range(1, options.seeds + 1)
        healthy = seeds if options.seed is not None else range(1, options.healthy + 1)
        with _ending_in_order():
            do(wanted(faults, seeds, healthy), options.out, again=options.seed is not None)
    print(table(read(options.out / "results.jsonl")))


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--fault", action="append", metavar="NAME", help="this one (may be given several times)"
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each fault")
    parser.add_argument("--seed", type=int, help="the run of this seed alone, also when it was done already")
    parser.add_argument("--healthy", type=int, default=HEALTHY, help="runs without a fault")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="for results and recordings")
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    return parser.parse_args(arguments)


# --- runs --------------------------------------------------------------------------------------------------


def wanted(faults: Iterable[str], seeds: Iterable[int], healthy: Iterable[int]) -> list[tuple[str, int]]:
    """All runs, each seed of all faults before the next seed: whenever it is stopped, faults are as far as each
    other."""
    pairs = [
        (number, name) for name in faults for number in (healthy if FAULTS[name].bite == "nothing" else seeds)
    ]
    order = {name: place for place, name in enumerate(FAULTS)}
    return [(name, number) for number, name in sorted(pairs, key=lambda pair: (pair[0], order[pair[1]]))]


def missing(runs: Iterable[tuple[str, int]], lines: Iterable[Line]) -> list[tuple[str, int]]:
    """Runs that have no result yet. One that failed is done again, one that was void is not."""
    done = {(line.fault, line.seed) for line in lines if line.result is not None}
    return [run for run in runs if run not in done]


def do(runs: list[tuple[str, int]], out: Path, *, again: bool = False) -> None:
    """Do the runs that are missing in ``out`` (``again``: all), one after the other."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / "results.jsonl"
    with path.open("a+b") as file:
        _alone(file, out)
        _whole_lines(file)
        todo = list(runs) if again else missing(runs, read(path))
        print(f"{len(todo)} of {len(runs)} runs to do; results in {path}", flush=True)
        with contextlib.ExitStack() as standing:
            on: Ground | None = None
            for fault, seed in todo:
                for name in left_behind.sweep():
                    print(f"  taken away, left by a run that was killed: {name}", flush=True)
                try:
                    on = on or standing.enter_context(runner.ground())
                    line = Line(fault=fault, seed=seed, result=_run(FAULTS[fault], seed, on, out))
                except Exception as error:  # whatever it was: the others are still to be done
                    line = Line(fault=fault, seed=seed, error=f"{type(error).__name__}: {error}")
                    with contextlib.suppress(Exception):
                        standing.close()
                    on = None
                file.write(msgspec.json.encode(line) + b"\n")
                file.flush()
                print(f"  {told(line)}", flush=True)


def _run(fault: Fault, seed: int, on: Ground, out: Path) -> Result:
    folder = out / f"{fault.name}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was stopped
    return runner.run(fault, seed, on, folder)


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """SIGTERM, by which what runs in the background is ended, takes everything away as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended; the run that was going on is missing"))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _alone(file: BinaryIO, out: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit(f"another process makes runs in {out}: wait for it, or give another --out") from None


def _whole_lines(file: BinaryIO) -> None:
    """Take away a last line that was not written whole."""
    file.seek(0)
    text = file.read()
    if text and not text.endswith(b"\n"):
        file.truncate(text.rfind(b"\n") + 1)


def read(path: Path) -> list[Line]:
    """All whole lines of a file of results; none where there is no file."""
    text = path.read_bytes() if path.exists() else b""
    return [msgspec.json.decode(line, type=Line) for line in text.split(b"\n")[:-1]]


def told(line: Line) -> str:
    """One run in one line."""
    who = f"{line.fault} --seed {line.seed}"
    if (result := line.result) is None:
        return f"{who}: FAILED, {line.error.splitlines()[0] if line.error else 'no reason given'}"
    after = "none" if result.after_ms is None else f"{result.after_ms:.1f}"
    steps = f"step {result.before_ms:.1f} → {after} ms"
    if not result.bit:
        return f"{who}: void, {steps}"
    named = ", ".join(map(str, result.culprits)) or "nobody"
    when = "" if result.seconds is None else f", right after {result.seconds:.0f} s"
    return f"{who}: {steps}; {result.status}, ranks {named} ({culprit(result)}), {result.cause or 'no cause'}{when}"


# --- the table ---------------------------------------------------------------------------------------------


def culprit(result: Result) -> Who:
    """Whether those were named who are at fault, all of them and nobody else. Where nobody is, the status must
    say what is the matter."""
    seen = bool(result.ranks) or result.status == FAULTS[result.fault].expected.status
    if seen and set(result.culprits) == set(result.ranks):
        return "right"
    return "wrong" if result.culprits else "none"


def false_alarm(result: Result) -> bool:
    """Whether a healthy run was called sick: somebody was named, or it was called slow and the job's own log shows
    no such thing."""
    slower = result.after_ms is not None and result.after_ms >= BITES * result.before_ms
    return bool(result.culprits) or result.status == "hang" or (result.status == "slow" and not slower)


def wilson(count: int, of: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson, "Probable inference", JASA 22 (1927) 209)."""
    if of == 0:
        return 0.0, 1.0
    share, z2 = count / of, Z * Z
    centre = share + z2 / (2 * of)
    half = Z * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of))
    scale = 1 + z2 / of
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def share(count: int, of: int) -> str:
    """``4/5 (38–96 %)``"""
    if not of:
        return "–"
    low, high = wilson(count, of)
    return f"{count}/{of} ({low * 100:.0f}–{high * 100:.0f} %)"


def table(lines: Iterable[Line]) -> str:
    """The newest result of each run: causes injected × named, who was named, and what is left to say."""
    newest = {(line.fault, line.seed): line for line in lines}
    results = [line.result for line in newest.values() if line.result is not None]
    faulty = [one for one in results if FAULTS[one.fault].bite != "nothing"]
    healthy = [one for one in results if FAULTS[one.fault].bite == "nothing"]
    good = [one for one in faulty if one.bit]
    parts = [_confusion(good), _who(faulty), _sums(good, faulty, healthy, list(newest.values()))]
    return "\n\n".join(part for part in parts if part)


def _confusion(results: list[Result]) -> str:
    """Rows: what was put in. Columns: what was named."""
    if not results:
        return "no run whose fault bit yet"
    counts = {name: Counter(one.cause or NONE for one in results if one.fault == name) for name in FAULTS}
    counts = {name: count for name, count in counts.items() if count}
    named = sorted(
        {cause for count in counts.values() for cause in count}, key=lambda one: (one == NONE, one)
    )
    rows = [["put in", "cause expected", *named, "cause right"]]
    for name, count in counts.items():
        cause = FAULTS[name].expected.cause
        named_right = sum(times for one, times in count.items() if FAULTS[name].expected.accepts(_none(one)))
        right = share(named_right, count.total()) if cause else "–"
        if cause and cause not in TITLES:
            right = "no rule yet"
        rows.append([name, cause or "–", *(str(count[one] or "·") for one in named), right])
    return _laid_out(rows)


def _none(cause: str) -> str | None:
    return None if cause == NONE else cause


def _who(results: list[Result]) -> str:
    if not results:
        return ""
    rows = [
        ["put in", "runs", "void", "step ms before → after", "culprit right", "wrong", "none", "s to verdict"]
    ]
    for name in FAULTS:
        mine = [one for one in results if one.fault == name]
        good = [one for one in mine if one.bit]
        if not mine:
            continue
        who = Counter(culprit(one) for one in good)
        before = statistics.median(one.before_ms for one in mine)
        afters = [one.after_ms for one in mine if one.after_ms is not None]
        after = f"{statistics.median(afters):.0f}" if afters else "none"
        seconds = [one.seconds for one in good if one.seconds is not None]
        rows.append(
            [
                name,
                str(len(mine)),
                str(len(mine) - len(good)),
                f"{before:.0f} → {after}",
                share(who["right"], len(good)),
                str(who["wrong"]),
                str(who["none"]),
                f"{statistics.median(seconds):.0f}" if seconds else "–",
            ]
        )
    return _laid_out(rows)


def _sums(good: list[Result], faulty: list[Result], healthy: list[Result], lines: list[Line]) -> str:
    right = sum(culprit(one) == "right" for one in good)
    known = [one for one in good if (cause := FAULTS[one.fault].expected.cause) and cause in TITLES]
    named = sum(FAULTS[one.fault].expected.accepts(one.cause) for one in known)
    alarms = sum(false_alarm(one) for one in healthy)
    failed = [line for line in lines if line.result is None]
    words = [
        f"culprit right: {share(right, len(good))}",
        f"cause right, where there is a rule: {share(named, len(known))}",
        f"false alarms in healthy runs: {share(alarms, len(healthy))}",
        f"void: {len(faulty) - len(good)} of {len(faulty)} runs",
        *(f"failed: {told(line)}" for line in failed),
    ]
    return "\n".join(words)


def _laid_out(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


if __name__ == "__main__":
    main(sys.argv[1:])
