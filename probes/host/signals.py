"""The signals probe: who stopped, killed or told a rank or its helpers to end, and how they ended.

User space's side of bpf/signals.bpf.c. How a process ended is in no tracepoint: ``endings.py`` finds it.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import os
import resource
import select
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from probes import procfs
from probes.bpf import BpfUnavailable, Kernel, has_tracepoint
from probes.discovery import RankProcess, read_process
from probes.host import endings
from probes.host.occupants import cgroup_of
from probes.host.reading import Reading
from probes.host.signal_events import PENDING, told
from probes.host.signal_rows import (
    CHILD,
    CLD_CONTINUED,
    CLD_DUMPED,
    CLD_EXITED,
    CLD_KILLED,
    CLD_STOPPED,
    DELIVERED,
    EXIT,
    IGNORED,
    SI_KERNEL,
    SIGNALS,
    VICTIM,
    Row,
)
from probes.host.tracepoints import TracepointProbe, lacking
from probes.records import Event, Metric

MAX_WATCHED = 4096
LONGEST = 64


class _Sent(NamedTuple):
    """One signal, with its sender in words as they were when it was read."""

    at_ns: int
    signal: int
    result: int
    by: str
    name: str
    pid: int


@dataclass
class _Watched:
    """A process that is watched, from when it is first named until it has ended."""

    pid: int
    rank: RankProcess
    helper: bool
    handle: int
    """Its pidfd."""
    stopped_ns: int = 0
    """Since when it is stopped; 0: it is not."""
    stopped_by: _Sent | None = None
    told_until_ns: int = 0
    """Up to when being stopped has been told as a metric: it was seen stopped then."""
    going_ns: int = 0
    """Since when /proc shows that it goes on, though no signal told of it; 0: it does not."""
    ended_ns: int = 0
    last: dict[int, _Sent] = field(default_factory=dict)
    """Signal → the last one that was delivered."""
    victim: bool = False
    """The out-of-memory killer has chosen it."""

    @property
    def what(self) -> str:
        """Words for a helper; a rank needs none, its event names it."""
        return f"helper {self.pid} " if self.helper else ""


class SignalsProbe(TracepointProbe):
    """Loads the probe; it is attached from then on. Not safe for several threads."""

    def __init__(self, kernel: Kernel, proc: Path = Path("/proc")) -> None:
        """Raises :class:`BpfUnavailable`."""
        needed = (("signal", "signal_generate"), ("sched", "sched_process_exit"))
        if absent := lacking(needed):
            raise BpfUnavailable(
                f"this kernel lacks the tracepoints {', '.join(absent)} (CONFIG_FTRACE, CONFIG_TRACING)"
            )
        self._proc = proc
        self._lacks: list[str] = []
        self._unwatched: list[str] = []
        mask = sum(1 << number - 1 for number in SIGNALS)
        defines: dict[str, int | None] = {"SIGNALS": mask}
        if has_tracepoint("oom", "mark_victim"):
            defines["HAVE_OOM"] = None
        else:
            self._lacks.append("oom:mark_victim: a kill for lack of memory is told as one by the kernel")
        self._lacks += endings.missing()
        self._watched: dict[int, _Watched] = {}
        self._handles = select.poll()
        self._helpers: dict[int, int] = {}
        self._rows: list[Row] = []
        self._senders: dict[int, str] = {}
        super().__init__(kernel, "signals.bpf.c", defines)
        self._table = self._bpf[b"watched_processes"]
        self._bpf[b"signal_events"].open_ring_buffer(self._on_event)

    @property
    def missing(self) -> list[str]:
        """What this kernel does not have, and how many processes are not watched and why, in words."""
        return [*self._lacks, *self._unwatched]

    @property
    def lost(self) -> int:
        """Events that found no room since the probe was loaded."""
        return sum(int(count.value) for count in self._bpf[b"signals_lost"].values())

    def close(self) -> None:
        """Detach, and hold no process any more."""
        for watched in list(self._watched.values()):
            self._leave(watched)
        super().close()

    def watch_helpers(self, helpers: Mapping[int, int]) -> None:
        """Which processes help which rank, by their pid and the rank's: watched from the next reading on, too."""
        self._helpers = dict(helpers)

    def read(self, ranks: Mapping[int, RankProcess]) -> Reading:
        """What was sent to ranks and helpers since the last call, and who of them stopped or ended. A process is
        watched from the call on that first names it."""
        self._bpf.ring_buffer_consume()
        rows, self._rows = self._rows, []
        self._senders.clear()
        self.rows_read += len(rows)
        now = time.monotonic_ns()
        of_ranks: list[Event] = []
        of_helpers: list[Event] = []
        stopped: dict[int, list[Metric]] = {}
        for row in rows:
            if watched := self._watched.get(row.process):
                events = of_helpers if watched.helper else of_ranks
                events += self._take(row, watched, stopped)
        ended = {handle for handle, _ in self._handles.poll(0)}
        for watched in list(self._watched.values()):
            events = of_helpers if watched.helper else of_ranks
            events += self._settle(watched, watched.handle in ended, now, stopped)
        self._watch(ranks)
        return Reading(ranks=stopped, events=told(of_ranks, of_helpers))

    # --- whom it watches

    def _watch(self, ranks: Mapping[int, RankProcess]) -> None:
        wanted = {pid: (rank, False) for pid, rank in ranks.items()}
        for pid, of in self._helpers.items():
            if of in ranks and pid not in wanted:
                wanted[pid] = (ranks[of], True)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        half = limit // 2 if limit != resource.RLIM_INFINITY else MAX_WATCHED
        left_out, failed = 0, collections.Counter[str]()
        for pid, (rank, helper) in wanted.items():  # ranks come first
            known = self._watched.get(pid)
            if known is not None and known.rank.process.start_ticks == rank.process.start_ticks:
                known.rank = rank
                continue
            if known is not None:
                self._leave(known)
            if len(self._watched) >= (min(half, MAX_WATCHED) if helper else MAX_WATCHED):
                left_out += 1
                continue
            try:
                handle = os.pidfd_open(pid)
            except OSError as error:
                if error.errno not in (errno.ESRCH, errno.EINVAL):  # else it has ended
                    failed[os.strerror(error.errno or 0)] += 1
                continue
            process, ended = read_process(self._proc, pid), _has_ended(handle)
            another = not helper and process and process.start_ticks != rank.process.start_ticks
            if process is None or another or ended:
                os.close(handle)
                if process is None and not ended:
                    failed["/proc/PID/stat cannot be read"] += 1
                continue
            self._watched[pid] = _Watched(pid, rank, helper, handle)
            self._handles.register(handle, select.POLLIN)
            self._table[self._table.Key(pid)] = self._table.Leaf(1)

        self._unwatched = [f"processes not watched: {count} ({why})" for why, count in failed.items()]
        if left_out:
            words = (
                f"each takes a file descriptor of the agent, helpers at most half of its {limit} (ulimit -n)"
            )
            self._unwatched.append(f"processes not watched: {left_out} ({words})")

    def _leave(self, watched: _Watched) -> None:
        self._handles.unregister(watched.handle)
        os.close(watched.handle)
        del self._watched[watched.pid]
        self._table.pop(self._table.Key(watched.pid), None)

    # --- what happened

    def _on_event(self, _context: Any, data: Any, size: int) -> None:
        self._rows.append(Row.from_buffer_copy(ctypes.string_at(data, ctypes.sizeof(Row))))

    def _take(self, row: Row, watched: _Watched, stopped: dict[int, list[Metric]]) -> Iterator[Event]:
        if row.kind == EXIT:
            watched.ended_ns = row.at
        elif row.kind == VICTIM:
            watched.victim = True
        elif row.kind == CHILD:
            if row.code == CLD_STOPPED and not watched.stopped_ns:
                by = next((sent for number, sent in watched.last.items() if number in _STOPS), None)
                yield self._stop(watched, row.at, by)
            elif row.code == CLD_CONTINUED and watched.stopped_ns:
                yield self._go_on(watched, row.at, "", stopped)
            elif row.code in (CLD_EXITED, CLD_KILLED, CLD_DUMPED):
                watched.ended_ns = row.at
        else:
            sent = self._sent(row)
            if row.result == DELIVERED:
                watched.last[row.signal] = sent
            if row.signal == signal.SIGSTOP:
                if row.result != IGNORED and not watched.stopped_ns:
                    yield self._stop(watched, row.at, sent)
            elif row.signal == signal.SIGCONT:
                if watched.stopped_ns:
                    yield self._go_on(watched, row.at, f" by SIGCONT from {sent.by}", stopped)
            else:
                yield self._event(
                    "signal", watched, row.at, f"{_name(row.signal)} from {sent.by}{_result(row)}"
                )

    def _stop(self, watched: _Watched, at_ns: int, by: _Sent | None) -> Event:
        watched.stopped_ns = watched.told_until_ns = at_ns
        watched.stopped_by, watched.going_ns = by, 0
        why = f" by {_name(by.signal)} from {by.by}" if by else ""
        return self._event("process-stopped", watched, at_ns, f"stopped{why}")

    def _go_on(self, watched: _Watched, at_ns: int, why: str, stopped: dict[int, list[Metric]]) -> Event:
        self._tell_stopped(watched, at_ns, stopped)
        took = f"{(at_ns - watched.stopped_ns) / 1e6:,.0f} ms"
        return self._went_on(watched, at_ns, f"stopped for {took}, continued{why}")

    def _seen_going(self, watched: _Watched) -> Event:
        least, most = ((at - watched.stopped_ns) / 1e6 for at in (watched.told_until_ns, watched.going_ns))
        took = f"stopped for {least:,.0f} to {most:,.0f} ms"
        return self._went_on(watched, watched.going_ns, f"{took}, then seen going on; by whom is not known")

    def _went_on(self, watched: _Watched, at_ns: int, words: str) -> Event:
        by = watched.stopped_by
        had = f"; it had been stopped by {_name(by.signal)} from {by.by}" if by else ""
        watched.stopped_ns, watched.stopped_by = 0, None
        for number in _STOPS:
            watched.last.pop(number, None)
        return self._event("process-continued", watched, at_ns, words + had)

    def _tell_stopped(self, watched: _Watched, until_ns: int, stopped: dict[int, list[Metric]]) -> None:
        took, watched.told_until_ns = until_ns - watched.told_until_ns, until_ns
        if took <= 0:
            return
        by = watched.stopped_by
        labels = {"process": "helper" if watched.helper else "rank"}
        if by is not None:
            labels |= {"by": by.name, "by_pid": str(by.pid)}
        metric = Metric(name="stopped_ns", value=took, unit="ns", labels=labels)
        stopped.setdefault(watched.rank.process.pid, []).append(metric)

    def _settle(
        self, watched: _Watched, ended: bool, now: int, stopped: dict[int, list[Metric]]
    ) -> Iterator[Event]:
        """What lasts, and whether the process is there still."""
        if ended:
            at = watched.ended_ns or now
            if watched.stopped_ns:
                self._tell_stopped(watched, at, stopped)
            yield self._event("process-exited", watched, at, self._ending(watched))
            self._leave(watched)
        elif watched.stopped_ns:
            state = self._state(watched)
            if state not in _GOING:
                watched.going_ns = watched.going_ns if state not in _STOPPED else 0
                self._tell_stopped(watched, now, stopped)
            elif not watched.going_ns:  # a signal that tells of it may come yet, or it has not stopped yet
                watched.going_ns = now
            else:
                yield self._seen_going(watched)

    def _state(self, watched: _Watched) -> bytes:
        """Of its main thread, as in /proc/PID/stat; empty when that cannot be read."""
        stat = (procfs.read(f"{self._proc}/{watched.pid}/stat") or b"").rpartition(b")")[2].split()
        return stat[0] if stat else b""

    def _ending(self, watched: _Watched) -> str:
        status = endings.wait_status(self._proc, watched.pid, watched.handle)
        if status is None:
            killer = watched.last.get(signal.SIGKILL)
            return (
                f"killed by SIGKILL from {killer.by}" if killer else "ended; its exit code was not to be had"
            )
        if os.WIFEXITED(status):
            return f"exited with code {os.WEXITSTATUS(status)}"
        number = os.WTERMSIG(status)
        sent = watched.last.get(number)
        by = f" from {sent.by}" if sent else ""
        if number == signal.SIGKILL and watched.victim:
            by = " from the kernel's out-of-memory killer"
        return f"killed by {_name(number)}{by}" + (" (core dumped)" if os.WCOREDUMP(status) else "")

    def _event(self, kind: str, watched: _Watched, at_ns: int, words: str) -> Event:
        detail = watched.what + words
        return Event(kind=kind, at_ns=at_ns, detail=detail, job=watched.rank.job, rank=watched.rank.rank)

    def _sent(self, row: Row) -> _Sent:
        by, name = self._by(row)
        return _Sent(row.at, row.signal, row.result, by, name, row.sender)

    def _by(self, row: Row) -> tuple[str, str]:
        name = row.comm.decode("utf-8", "replace")
        if row.code == SI_KERNEL:
            return f"the kernel, while {name} (pid {row.sender}) ran", name
        if row.code > 0:
            return f"the kernel, for what the thread itself did (code {row.code})", name
        if row.sender == row.process:
            return "itself", name
        if row.sender not in self._senders:
            path = cgroup_of(self._proc, row.sender)
            self._senders[row.sender] = f", cgroup {path[:LONGEST]}" if path else ""
        return f"{name} (pid {row.sender}, uid {row.uid}{self._senders[row.sender]})", name


_STOPS = (signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_STOPPED, _GOING = (b"T", b"t"), (b"R", b"S", b"I")
"""States of a main thread. One that sleeps uninterruptibly, or has ended, says nothing of a stop to come or of the
others."""


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _result(row: Row) -> str:
    if row.result == DELIVERED:
        return ""
    return " (ignored)" if row.result == IGNORED else PENDING


def _has_ended(handle: int) -> bool:
    """Whether the process of a descriptor is a zombie, or gone."""
    asked = select.poll()
    asked.register(handle, select.POLLIN)
    return bool(asked.poll(0))
