"""What a rank sleeps for outside collectives: disks, locks, pipes, pages, its workers. One rule per cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from diagnosis.findings import REASONS, Extra, HostTime, Judgement, WakerKind, Woken
from diagnosis.layers.running import gil_over, reclaim_running_over
from diagnosis.verdict import Owner
from diagnosis.wording import ms

_NAMED = 3
_LIMIT_REACHED = 0.5
"""What went through while the rank waited, as a share of a limit, from which the limit is what it waits for."""
_HANDED_OVER = 0.05
"""A lock is given back by another thread of the process, at least for this share of what was waited with a timeout.
Below, it may be Python's lock (GIL: who waits for it looks every 5 ms, and then gets it within microseconds), or a
timer beside which a thread woke the rank now and then: these look alike."""
_SOMEBODY: tuple[WakerKind, ...] = ("process", "rank", "helper")


def _waits(extra: Extra, what: str, *reasons: str) -> str:
    """How long the rank slept for this, itself and through its helpers, beside its peers."""

    def slept(of: HostTime) -> float:
        return sum(of.asleep.get(one, 0.0) + of.through_helpers.get(one, 0.0) for one in reasons)

    beside = ms(slept(extra.peers_host)) if extra.comparable(REASONS) else "an unknown time"
    return f"rank {extra.rank} {what} {ms(slept(extra.host))} per step, its peers {beside}"


def _explained(extra: Extra, *reasons: str) -> float:
    return extra.asleep_over(*reasons) + extra.helpers_over(*reasons)


def _helpers(extra: Extra, *doing: str) -> str:
    """Which helpers were waited for while they did this, in words; empty where the rank slept longer itself."""
    if extra.helpers_over(*doing) < extra.asleep_over(*doing):
        return ""
    rows = [row for row in extra.host.helpers if row.reason in doing][:_NAMED]
    if not rows:
        return ""
    pids = ", ".join(str(row.pid) for row in rows)
    return f" through its helper{'s' * (len(rows) > 1)} {rows[0].name} (pid {pids})"


def _whose(extra: Extra, *doing: str) -> str:
    """Which process to look at: the helper that does this most, else the rank's own."""
    helpers = (
        [row.pid for row in extra.host.helpers if row.reason in doing] if _helpers(extra, *doing) else []
    )
    return str(helpers[0] if helpers else extra.pid)


def storage_read(extra: Extra) -> Judgement:
    """Reads that had to wait for a device, in the driving thread or in a helper that it waits for."""
    words = _waits(extra, "waits for reads from storage", "storage-read")
    limit = _io_limit(extra, "read")
    pid = _whose(extra, "storage-read")
    look = (
        f"See what is read, and how fast: iostat -x 1 on {extra.node}, and strace -f -e trace=read,pread64,openat "
        f"-p {pid} for a moment; copy the data to a local disk, or read ahead."
    )
    actions = (
        f"Raise or remove that limit on {extra.node}." if limit else look,
        f"Then diagnose again: rank {extra.rank} should wait for reads as long as its peers do.",
    )
    owner: Owner = "node" if limit else "storage"
    detail = (
        words + _helpers(extra, "storage-read") + (limit or _devices(extra, "read")) + _memory_limit(extra)
    )
    return Judgement(_explained(extra, "storage-read"), owner, detail, actions, words)


def storage_write(extra: Extra) -> Judgement:
    """Writes, fsync and journals that had to wait for a device."""
    words = _waits(extra, "waits for writes to storage (fsync, journal)", "storage-write")
    limit = _io_limit(extra, "write")
    look = (
        f"See who writes: iotop -o on {extra.node}; write checkpoints and logs from another thread, less often, or "
        f"to a faster disk."
    )
    actions = (
        f"Raise or remove that limit on {extra.node}." if limit else look,
        f"Then diagnose again: rank {extra.rank} should wait for writes as long as its peers do.",
    )
    owner: Owner = "node" if limit else "storage"
    detail = words + _helpers(extra, "storage-write") + (limit or _devices(extra, "write"))
    return Judgement(_explained(extra, "storage-write"), owner, detail, actions, words)


def _io_limit(extra: Extra, what: Literal["read", "write"]) -> str:
    """A limit of a control group on a device that was reached, in words; empty where there is none."""
    waited = extra.host.asleep.get(f"storage-{what}", 0.0) + extra.host.through_helpers.get(
        f"storage-{what}", 0.0
    )
    for unit in ("bytes", "operations"):
        through = {
            (labels.get("cgroup"), labels.get("device")): value
            for labels, value in extra.host.rows(f"io_limited_{what}_{unit}")
        }
        for labels, limit in reversed(extra.host.rows(f"io_limit_{what}_{unit}")):  # the tightest first
            cgroup, device = labels.get("cgroup", "?"), labels.get("device", "?")
            # Per step; a limit far above what came through is not what it waits for.
            if 1000 * through.get((cgroup, device), 0.0) < _LIMIT_REACHED * limit * waited:
                continue
            size = f"{limit / 1e6:.3g} MB/s" if unit == "bytes" else f"{limit:.0f} per second"
            return f"; cgroup {cgroup} limits {what}s of {device} to {size}"
    return ""


def _devices(extra: Extra, what: Literal["read", "write"]) -> str:
    """The device that the rank's own requests took longest on, and who else kept it busy, in words; empty where no
    probe tells."""
    rows = extra.host.rows(f"block_{what}_ns")
    if not rows:
        return ""
    labels, took = rows[0]
    device = labels.get("device", "?")
    requests = extra.host.metrics.get((f"block_{what}_requests", (("device", device),)), 0.0)
    words = f"; {device} took {ms(took / requests)} per {what}" if requests > 0 else f"; on {device}"
    others = [
        row.get("process", "?")
        for row, value in extra.node_metrics.rows(f"block_process_{what}_ns")
        if row.get("device") == device and value > took
    ]
    return words + (f", and was busier with {what}s of {others[0]}" if others else "")


def page_faults(extra: Extra) -> Judgement:
    """Pages that the program touched and that had to come from a disk: swapped out, or thrown out of the cache."""
    words = _waits(extra, "waits for pages that come from a disk", "page-fault")
    faults = extra.host.total("major_faults")
    detail = words + (f"; {faults:.3g} major faults per step" if faults else "") + _memory_limit(extra)
    actions = (
        f"Give it memory: compare its cgroup's limit, and free -m on {extra.node}, with what process {extra.pid} "
        f"holds (VmRSS, VmSwap in /proc/{extra.pid}/status); look for who else took it.",
        f"Then diagnose again: major faults of rank {extra.rank} should be as few as its peers'.",
    )
    return Judgement(_explained(extra, "page-fault"), "node", detail, actions, words)


def memory_reclaim(extra: Extra) -> Judgement:
    """The rank's own threads had to free memory before they could go on: running, or asleep meanwhile."""
    mine = max(extra.host.reclaiming, extra.host.asleep.get("reclaim", 0.0))
    theirs = max(extra.peers_host.reclaiming, extra.peers_host.asleep.get("reclaim", 0.0))
    words = f"rank {extra.rank} spends {ms(mine)} per step freeing memory, its peers {ms(theirs)}"
    actions = (
        f"Raise the memory limit of its cgroup on {extra.node}, or find who takes the memory (systemd-cgtop -m, "
        f"free -m).",
        f"Then diagnose again: rank {extra.rank} should not have to free memory itself.",
    )
    explained = _explained(extra, "reclaim") + reclaim_running_over(extra)
    return Judgement(explained, "node", words + _memory_limit(extra), actions, words)


def _memory_limit(extra: Extra) -> str:
    for labels, hits in extra.host.rows("memory_limit_hits"):
        cgroup = labels.get("cgroup", "?")
        limits = [
            value for row, value in extra.host.rows("memory_limit_bytes") if row.get("cgroup", "?") == cgroup
        ]
        size = f" of {min(limits) / 1e6:.4g} MB" if limits else ""
        return f"; the memory limit{size} of cgroup {cgroup} was reached {hits:.3g} times per step"
    return ""


def _timeouts_over(extra: Extra) -> float:
    """Waits on a futex that no one ended but their own timeout."""
    return extra.ended_over(["futex"], "interrupt")


def _lock_share(extra: Extra) -> float:
    """Share of what the rank waits for on futexes that is a lock's, the rest being a timer's: what other threads of
    its own process give back is a lock, what none does is a timer, and what is in between counts half for each, so
    that neither is named alone."""
    own = extra.ended_over(["futex"], "own")
    if own <= 0:
        return 0.0
    return 1.0 if own >= _HANDED_OVER * _timeouts_over(extra) else 0.5


def lock_contention(extra: Extra) -> Judgement:
    """Sleeps on a futex that another thread of its own process ended, and none that moves collectives: a lock, the
    interpreter's (GIL), or work that it hands over. Who waits for the GIL wakes by timeout in between."""
    own = [one for one in extra.host.woken if one.reason == "futex" and one.kind == "own"]
    theirs = ms(extra.peers_host.asleep.get("futex", 0.0)) if extra.comparable(REASONS) else "an unknown time"
    words = (
        f"rank {extra.rank} waits {ms(extra.host.asleep.get('futex', 0.0))} per step for locks or other threads of "
        f"its own process, its peers {theirs}"
    )
    waited = min(extra.asleep_over("futex"), extra.ended_over(["futex"], "own", "interrupt"))
    explained = _lock_share(extra) * max(0.0, waited - gil_over(extra))
    actions = (
        f"See what those threads do: py-spy dump --pid {extra.pid} on {extra.node}, a few times. In Python one "
        f"busy thread keeps the interpreter's lock (GIL) from all others: move its work to a process.",
        f"Then diagnose again: rank {extra.rank} should wait for its own threads as long as its peers do.",
    )
    detail = f"{words}; woken by its thread{_threads(own)}" if own else words
    return Judgement(explained, "job", detail, actions, words)


def _threads(rows: Sequence[Woken]) -> str:
    seen: dict[tuple[str, int], float] = {}
    for row in rows:
        seen[row.name, row.tid] = seen.get((row.name, row.tid), 0.0) + row.ms
    largest = sorted(seen, key=lambda one: (-seen[one], one))[:_NAMED]
    return f"{'s' * (len(largest) > 1)} " + ", ".join(f"{name} ({tid})" for name, tid in largest)


def kernel_contention(extra: Extra) -> Judgement:
    """Sleeps on the kernel's own locks: others are in the same part of the kernel (a folder, a memory map), or
    hold a lock on the same file."""
    words = _waits(extra, "waits for locks of the kernel or on files", "kernel-lock")
    others = [
        one for one in extra.host.woken if one.reason == "kernel-lock" and one.kind in (*_SOMEBODY, "own")
    ]
    who = f"; woken most often by {others[0].name} (pid {others[0].pid})" if others else ""
    actions = (
        f"See which lock: cat /proc/{extra.pid}/stack on {extra.node}, a few times; look for processes that work "
        f"in the same place (files of one folder, one file system).",
        f"Then diagnose again: rank {extra.rank} should wait for such locks as long as its peers do.",
    )
    return Judgement(_explained(extra, "kernel-lock"), "node", words + who, actions, words)


def slow_pipe(extra: Extra) -> Judgement:
    """A pipe, terminal or socket to another process is full: what the rank writes is read too slowly (its log,
    mostly)."""
    words = _waits(extra, "waits until what it wrote to a pipe or terminal is read", "pipe-write")
    readers = [one for one in extra.host.woken if one.reason == "pipe-write" and one.kind in _SOMEBODY]
    who = f"; the reader is {readers[0].name} (pid {readers[0].pid})" if readers else ""
    actions = (
        f"Let rank {extra.rank} write less (logging), or to a file; find out why the reader is slow: "
        f"ls -l /proc/{extra.pid}/fd on {extra.node}.",
        f"Then diagnose again: rank {extra.rank} should not wait for a pipe.",
    )
    return Judgement(_explained(extra, "pipe-write"), "job", words + who, actions, words)


def slow_workers(extra: Extra) -> Judgement:
    """Helpers (DataLoader workers) that take long because they compute, or want a CPU, while the rank waits."""
    doing = ("running", "runnable")
    mine = sum(extra.host.through_helpers.get(one, 0.0) for one in doing)
    theirs = sum(extra.peers_host.through_helpers.get(one, 0.0) for one in doing)
    words = f"rank {extra.rank} waits {ms(mine)} per step for helpers that compute, its peers {ms(theirs)}"
    actions = (
        f"Give rank {extra.rank} more DataLoader workers, or each less to do; see what they do: "
        f"py-spy dump --pid {_whose(extra, *doing)} on {extra.node}.",
        f"Then diagnose again: rank {extra.rank} should wait for its helpers as long as its peers do.",
    )
    return Judgement(extra.helpers_over(*doing), "job", words + _helpers(extra, *doing), actions, words)


def sleeps(extra: Extra) -> Judgement:
    """Its own code asked to sleep, or to wait for so long at most, and only a timer woke it."""
    words = _waits(extra, "asks to sleep for", "sleep")
    explained = _explained(extra, "sleep")
    detail = words
    timer = 1.0 - _lock_share(extra)
    waited = min(extra.asleep_over("futex"), _timeouts_over(extra)) - gil_over(extra)
    if timer > 0 and waited > 0:
        explained += timer * waited
        detail = f"{words}; and {ms(waited)} more in waits that ended by their timeout"
        if timer < 1.0:
            detail += ", which may as well be a lock that is looked at again and again"
    actions = (
        f"Look for a sleep, a timeout or a retry in what rank {extra.rank} runs: py-spy dump --pid "
        f"{_whose(extra, 'sleep')} on {extra.node}, a few times.",
        f"Then diagnose again: rank {extra.rank} should sleep as long as its peers do.",
    )
    return Judgement(explained, "job", detail, actions, words)


def network_wait(extra: Extra) -> Judgement:
    """Sockets outside of collectives: data from another machine, a service."""
    reasons = ("network-receive", "network-send")
    words = _waits(extra, "waits for the network outside collectives", *reasons)
    again = extra.metric_over("tcp_retransmits", "tcp")
    detail = words + (f"; TCP sent {again:.3g} segments per step more again" if again >= 0.1 else "")
    actions = (
        f"See whom it waits for: ss -tnp on {extra.node} for process {extra.pid}: a data server, a file system "
        f"over the network?",
        f"Then diagnose again: rank {extra.rank} should wait for the network as long as its peers do.",
    )
    return Judgement(_explained(extra, *reasons), "network", detail, actions, words)


def waits_for_process(extra: Extra) -> Judgement:
    """Another process has to hand something over, or to end, and takes long."""
    reasons = ("pipe-read", "poll", "child")
    words = _waits(extra, "waits for other processes to hand something over", *reasons)
    others = [one for one in extra.host.woken if one.reason in reasons and one.kind in _SOMEBODY]
    explained = min(_explained(extra, *reasons), extra.ended_over(reasons, *_SOMEBODY))
    who = f"; most of it for {others[0].name} (pid {others[0].pid})" if others else ""
    whom = f"process {others[0].pid}" if others else "that process"
    actions = (
        f"See what {whom} does on {extra.node}, and why rank {extra.rank} needs it in each step.",
        f"Then diagnose again: rank {extra.rank} should wait for it as long as its peers do.",
    )
    return Judgement(explained, "unknown", words + who, actions, words)
