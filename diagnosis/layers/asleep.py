"""What a rank sleeps for outside collectives: disks, locks, pipes, pages, its workers. One rule per cause."""

from __future__ import annotations

from collections.abc import Sequence

from diagnosis.findings import Extra, Judgement, Woken
from diagnosis.verdict import Owner
from diagnosis.wording import ms

_NAMED = 3
_PROBED = "stacks, or py-spy dump --native"
SLEEPS = ("storage-read", "storage-write", "page-fault", "reclaim", "kernel-lock")
"""What a helper may sleep for, too, while its rank waits for it."""


def _waits(extra: Extra, reasons: Sequence[str], what: str) -> str:
    """How long the rank slept for this, itself and through its helpers, beside its peers."""
    mine = sum(extra.host.asleep.get(one, 0.0) + extra.host.through_helpers.get(one, 0.0) for one in reasons)
    theirs = sum(
        extra.peers_host.asleep.get(one, 0.0) + extra.peers_host.through_helpers.get(one, 0.0)
        for one in reasons
    )
    return f"rank {extra.rank} {what} {ms(mine)} per step, its peers {ms(theirs)}"


def _explained(extra: Extra, *reasons: str) -> float:
    return extra.asleep_over(*reasons) + extra.helpers_over(*reasons)


def _helpers(extra: Extra, *doing: str) -> str:
    """Which helpers were waited for while they did this, in words; empty where none."""
    if extra.helpers_over(*doing) < extra.asleep_over(*doing):
        return ""
    rows = [row for row in extra.host.helpers if row.reason in doing][:_NAMED]
    if not rows:
        return ""
    pids = ", ".join(str(row.pid) for row in rows)
    return f" in its helper{'s' * (len(rows) > 1)} {rows[0].name} (pid {pids})"


def storage_read(extra: Extra) -> Judgement:
    """Reads that had to wait for a device, in the driving thread or in a helper that it waits for."""
    explained = _explained(extra, "storage-read")
    words = _waits(extra, ("storage-read",), "waits for reads from storage")
    limit = _io_limit(extra, "read")
    who = _helpers(extra, "storage-read")
    slowest = "" if limit else _slowest_device(extra, "read")
    actions = [
        f"Raise or remove that limit on {extra.node}."
        if limit
        else f"See what is read and how fast: iostat -x 1 on {extra.node}, "
        f"and strace -f -e trace=read,pread64,openat -p {extra.pid} for a moment; copy the data to a local "
        "disk, or read ahead.",
        f"Then diagnose again: rank {extra.rank} should wait for reads as long as its peers do.",
    ]
    owner: Owner = "node" if limit else "storage"
    return Judgement(explained, owner, f"{words}{who}{limit}{slowest}", tuple(actions), words)


def storage_write(extra: Extra) -> Judgement:
    """Writes, fsync and journals that had to wait for a device."""
    explained = _explained(extra, "storage-write")
    words = _waits(extra, ("storage-write",), "waits for writes to storage (fsync, journal)")
    limit = _io_limit(extra, "write")
    who = _helpers(extra, "storage-write")
    actions = [
        f"Raise or remove that limit on {extra.node}."
        if limit
        else f"See who writes: iotop -o on {extra.node}; write checkpoints and logs from another thread, "
        "less often, or to "
        "a faster disk.",
        f"Then diagnose again: rank {extra.rank} should wait for writes as long as its peers do.",
    ]
    owner: Owner = "node" if limit else "storage"
    slowest = "" if limit else _slowest_device(extra, "write")
    return Judgement(explained, owner, f"{words}{who}{limit}{slowest}", tuple(actions), words)


def _io_limit(extra: Extra, what: str) -> str:
    """A limit of a control group on a device, in words; empty where none is set."""
    for unit, name in (("B/s", f"io_limit_{what}_bytes"), ("per second", f"io_limit_{what}_operations")):
        for labels, value in extra.host.rows(name):
            size = f"{value / 1e6:.3g} MB/s" if unit == "B/s" else f"{value:.0f} {unit}"
            return f"; cgroup {labels.get('cgroup', '?')} limits {what}s of {labels.get('device', '?')} to "
            f"{size}"
    return ""


def _slowest_device(extra: Extra, what: str) -> str:
    """The device that took longest over this rank's requests, or else over all of its node, in words; empty where
    no probe tells (``storage`` runs in captures)."""
    for whose, time in (("its", extra.host), ("all", extra.node_metrics)):
        for labels, took in time.rows(f"block_{what}_ns"):
            device = labels.get("device", "?")
            count = dict(time.metrics).get((f"block_{what}_requests", (("device", device),)), 0.0)
            each = f", {ms(took / count)} each" if count else ""
            return f"; {device} took {ms(took)} per step over {whose} {what}s{each}"
    return ""


def page_faults(extra: Extra) -> Judgement:
    """Pages that the program touched and that had to come from a disk: swapped out, or thrown out of the "
    "cache."""
    explained = _explained(extra, "page-fault")
    words = _waits(extra, ("page-fault",), "waits for pages that come from a disk")
    faults = extra.host.total("major_faults")
    detail = words + (f"; {faults:.3g} major faults per step" if faults else "") + _memory_limit(extra)
    actions = (
        f"Give it memory: compare the limit of its cgroup and free -m on {extra.node} with what process "
        f"{extra.pid} holds "
        "(VmRSS, VmSwap); look for who else took it.",
        f"Then diagnose again: major faults of rank {extra.rank} should be as few as its peers'.",
    )
    return Judgement(explained, "node", detail, actions, words)


def memory_reclaim(extra: Extra) -> Judgement:
    """The rank's own threads had to free memory before they could go on: running, or asleep meanwhile."""
    asleep = _explained(extra, "reclaim")
    told = extra.metric_over("reclaim_ns") + extra.metric_over("compaction_ns")
    # The metric contains the sleeps and is summed over threads: it counts as far as the rank ran or slept longer.
    runs = max(0.0, extra.over("running"))
    explained = max(asleep, min(told, asleep + runs))
    words = (
        f"rank {extra.rank} spends "
        f"{ms(max(extra.host.total('reclaim_ns'), extra.host.asleep.get('reclaim', 0.0)))} per "
        "step freeing memory, its peers "
        f"{ms(max(extra.peers_host.total('reclaim_ns'), extra.peers_host.asleep.get('reclaim', 0.0)))}"
    )
    actions = (
        f"Raise the memory limit of its cgroup on {extra.node}, or find who takes the memory "
        "(systemd-cgtop -m, free -m).",
        f"Then diagnose again: rank {extra.rank} should free no memory itself.",
    )
    return Judgement(explained, "node", words + _memory_limit(extra), actions, words)


def _memory_limit(extra: Extra) -> str:
    for labels, hits in extra.host.rows("memory_limit_hits"):
        cgroup = labels.get("cgroup", "?")
        limit = next(
            (value for row, value in extra.host.rows("memory_limit_bytes") if row.get("cgroup") == cgroup),
            0.0,
        )
        size = f" of {limit / 1e6:.4g} MB" if limit else ""
        return f"; the memory limit{size} of cgroup {cgroup} was reached {hits:.3g} times per step"
    return ""


def lock_contention(extra: Extra) -> Judgement:
    """Sleeps on a futex that another thread of its own process ended, and none that moves collectives: a lock held,
    or the interpreter's (GIL)."""
    own = [one for one in extra.host.woken if one.reason == "futex" and one.kind == "own"]
    explained = min(extra.asleep_over("futex"), sum(one.ms for one in own))
    words = (
        f"rank {extra.rank} waits {ms(extra.host.asleep.get('futex', 0.0))} per step for locks outside "
        "collectives, its "
        f"peers {ms(extra.peers_host.asleep.get('futex', 0.0))}"
    )
    detail = f"{words}; given back most often by thread{_threads(own)} of its own process" if own else words
    actions = (
        f"See what those threads do: py-spy dump --pid {extra.pid} on {extra.node}, a few times. In Python "
        "one busy thread "
        "keeps the interpreter's lock (GIL) from all others: move it to a process.",
        f"Then diagnose again: rank {extra.rank} should wait for locks as long as its peers do.",
    )
    return Judgement(explained, "job", detail, actions, words)


def _threads(rows: Sequence[Woken]) -> str:
    seen: dict[tuple[str, int], float] = {}
    for row in rows:
        seen[row.name, row.tid] = seen.get((row.name, row.tid), 0.0) + row.ms
    largest = sorted(seen, key=lambda one: (-seen[one], one))[:_NAMED]
    return f"{'s' * (len(largest) > 1)} " + ", ".join(f"{name} ({tid})" for name, tid in largest)


def kernel_contention(extra: Extra) -> Judgement:
    """Sleeps on the kernel's own locks: others are in the same part of the kernel (a folder, a memory "
    "map)."""
    explained = _explained(extra, "kernel-lock")
    words = _waits(extra, ("kernel-lock",), "waits for the kernel's own locks")
    others = [
        one for one in extra.host.woken if one.reason == "kernel-lock" and one.kind in ("process", "rank")
    ]
    who = f"; released most often by {others[0].name} (pid {others[0].pid})" if others else ""
    actions = (
        f"See which lock: cat /proc/{extra.pid}/stack on {extra.node}, a few times; look for processes "
        "that do the same "
        "there (one folder's files, one file system).",
    )
    return Judgement(explained, "node", words + who, actions, words)


def slow_pipe(extra: Extra) -> Judgement:
    """A pipe, terminal or socket to another process is full: what it writes is read too slowly (its log, "
    "mostly)."""
    explained = _explained(extra, "pipe-write")
    words = _waits(extra, ("pipe-write",), "waits until what it wrote into a pipe is read")
    readers = [one for one in extra.host.woken if one.reason == "pipe-write" and one.kind != "own"]
    who = f"; the reader is {readers[0].name} (pid {readers[0].pid})" if readers else ""
    actions = (
        f"Write less (logging of rank {extra.rank}), or to a file; find out why the reader is slow: "
        f"ls -l /proc/{extra.pid}/fd on {extra.node}.",
        f"Then diagnose again: rank {extra.rank} should not wait for a pipe.",
    )
    return Judgement(explained, "job", words + who, actions, words)


def slow_workers(extra: Extra) -> Judgement:
    """Helpers (DataLoader workers) that take long because they compute, or want a CPU, while the rank "
    "waits."""
    explained = extra.helpers_over("running", "runnable")
    mine = sum(extra.host.through_helpers.get(one, 0.0) for one in ("running", "runnable"))
    theirs = sum(extra.peers_host.through_helpers.get(one, 0.0) for one in ("running", "runnable"))
    words = f"rank {extra.rank} waits {ms(mine)} per step for helpers that compute, its peers {ms(theirs)}"
    actions = (
        f"Give rank {extra.rank} more DataLoader workers, or each less to do; see what they do: py-spy "
        "dump --pid PID on "
        f"{extra.node}.",
    )
    return Judgement(explained, "job", words + _helpers(extra, "running", "runnable"), actions, words)


def sleeps(extra: Extra) -> Judgement:
    """Its own code asked to sleep, and a timer woke it."""
    explained = _explained(extra, "sleep")
    words = _waits(extra, ("sleep",), "sleeps until a timer wakes it,")
    actions = (
        f"Look for sleep or a retry loop in what rank {extra.rank} runs: py-spy dump --pid {extra.pid} on "
        f"{extra.node}.",
    )
    return Judgement(explained, "job", words, actions, words)


def network_wait(extra: Extra) -> Judgement:
    """Sockets outside of collectives: data from another machine, a service."""
    explained = _explained(extra, "network-receive", "network-send")
    words = _waits(extra, ("network-receive", "network-send"), "waits for the network outside collectives")
    retransmits = extra.metric_over("tcp_retransmits")
    detail = words + (f"; TCP sent {retransmits:.3g} segments per step again" if retransmits >= 0.1 else "")
    actions = (
        f"See whom it waits for: ss -tnp on {extra.node} for process {extra.pid}; a data server, a file "
        "system over the "
        "network?",
    )
    return Judgement(explained, "network", detail, actions, words)


def waits_for_process(extra: Extra) -> Judgement:
    """Another process has to hand something over, or to end, and takes long."""
    reasons = ("pipe-read", "poll", "child")
    words = _waits(extra, reasons, "waits for other processes to hand something over")
    others = [
        one for one in extra.host.woken if one.reason in reasons and one.kind in ("process", "rank", "helper")
    ]
    explained = min(_explained(extra, *reasons), sum(one.ms for one in others))
    who = f"; most often for {others[0].name} (pid {others[0].pid})" if others else ""
    actions = (
        f"See what that process does on {extra.node}, and why rank {extra.rank} needs it in each step.",
    )
    return Judgement(explained, "unknown", words + who, actions, words)
