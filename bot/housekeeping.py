"""How the store, and what was asked of agents, read at the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from bot.wording import age, count, shown
from diagnosis.store import Asked
from diagnosis.store.health import amount, duration
from diagnosis.store.stats import Stats
from probes.records import Command, CommandKind

NAME_LIMIT = 60
WORDS_LIMIT = 300


def asked_text(asked: Sequence[Asked], now_ns: int) -> str:
    """What was asked of agents, a line each and one for what became of it."""
    if not asked:
        return "Nothing has been asked of any agent yet: sysom capture JOB does.\n"
    lines = []
    for one in asked:
        node, by = shown(one.node, NAME_LIMIT), shown(one.by, NAME_LIMIT)
        lines += [
            f"{age(one.issued_ns, now_ns)}, {node}: {_what(one.command)}, asked by {by or 'nobody known'}",
            f"    {_became(one, now_ns)}",
        ]
    return "\n".join(lines) + "\n"


def _what(command: Command) -> str:
    job, probe = shown(command.job, NAME_LIMIT), shown(command.probe, NAME_LIMIT)
    match command.kind:
        case CommandKind.CAPTURE_START:
            return f"capture {job} for {command.seconds} s"
        case CommandKind.CAPTURE_END:
            return f"end the capture of {job}"
        case CommandKind.PROBE_ON:
            return f"switch {probe} on"
        case CommandKind.PROBE_OFF:
            return f"switch {probe} off"


def _became(asked: Asked, now_ns: int) -> str:
    if asked.outcome:
        words = shown(asked.words, WORDS_LIMIT)
        return f"{asked.outcome}: {words}" if words else asked.outcome
    if now_ns < asked.expires_ns:
        return f"the agent has not answered yet; it will be asked for {(asked.expires_ns - now_ns) // 10**9} s more"
    return (
        "the agent never answered, and is not asked any more: does it run (sysom doctor there), does it reach this "
        "server, and has it the key that sysom key prints (SYSOM_COMMAND_KEY)?"
    )


def stats_text(stats: Stats, now_ns: int) -> str:
    """One screen about a store."""
    rows = [
        ("file", f"{stats.path}, schema {stats.schema}"),
        ("size", _size(stats)),
        ("disk", _disk(stats)),
        ("batches", _batches(stats, now_ns)),
        (
            "of",
            f"{count(stats.jobs, 'job')}, {count(stats.nodes, 'node')}, {count(stats.ranks, 'rank')}, "
            f"{count(stats.events, 'event')}",
        ),
        ("per rank", _per_rank(stats)),
        ("tables", _tables(stats)),
        ("kept", f"{stats.keep_days:g} days (SYSOM_KEEP_DAYS), {stats.keep_gb:g} GB (SYSOM_KEEP_GB)"),
        ("goes next", _goes_next(stats, now_ns)),
        ("integrity", _integrity(stats)),
    ]
    return "".join(f"{name:<10} {words}\n" for name, words in rows)


def _size(stats: Stats) -> str:
    free = (
        f", {amount(stats.free_in_file_bytes)} of it free for what comes" if stats.free_in_file_bytes else ""
    )
    stays = "" if stats.shrinks else "; the file does not shrink (it was made by an older version)"
    return f"{amount(stats.size_bytes)}{free}, and {amount(stats.wal_bytes)} in the write-ahead log{stays}"


def _disk(stats: Stats) -> str:
    left = f"{amount(stats.disk_free_bytes)} left"
    if stats.bytes_per_s <= 0:
        return left
    to_grow = max(0.0, stats.keep_gb * 1e9 - stats.size_bytes)
    if stats.disk_free_bytes >= to_grow:
        return f"{left}, enough for all that is kept"
    lasts = duration(stats.disk_free_bytes / stats.bytes_per_s)
    return f"{left}, for {lasts} at the rate so far: not enough for all that is kept"


def _batches(stats: Stats, now_ns: int) -> str:
    if stats.oldest_ns is None or stats.newest_ns is None:
        return f"{stats.batches:,}"
    return (
        f"{stats.batches:,}, from {_utc(stats.oldest_ns)} to {_utc(stats.newest_ns)} "
        f"({age(stats.newest_ns, now_ns)})"
    )


def _per_rank(stats: Stats) -> str:
    if not stats.rank_seconds:
        return "no rank was watched"
    return (
        f"{stats.bytes_per_rank_second:,.0f} bytes per rank and second, of {stats.rank_seconds:,.0f} s in which "
        "ranks were watched"
    )


def _tables(stats: Stats) -> str:
    sizes = [f"{table} {amount(size)}" for table, size in stats.tables.items()]
    return ", ".join(sizes) + (" (estimated)" if stats.tables_estimated else "")


def _goes_next(stats: Stats, now_ns: int) -> str:
    if stats.goes_at_ns is None or stats.oldest_ns is None:
        return "nothing: there is no batch"
    reason = (
        "it is over age then"
        if stats.goes_next == "age"
        else "the file has its size then, at the rate so far"
    )
    ahead_s = (stats.goes_at_ns - now_ns) / 1e9
    when = f"in {duration(ahead_s)}" if ahead_s > 0 else "with the server's next tidying"
    return f"what arrived at {_utc(stats.oldest_ns)}, {when}: {reason}"


def _integrity(stats: Stats) -> str:
    if stats.integrity == "unchecked":
        return "not looked at, it would take long: sysom store check"
    return "all pages hang together (sysom store check reads everything)"


def _utc(ns: int) -> str:
    return f"{datetime.fromtimestamp(ns // 10**9, UTC):%Y-%m-%d %H:%M:%S} UTC"
