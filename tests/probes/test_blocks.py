"""Why a thread is blocked, on the running kernel: each reason is brought about on purpose, for a time known from
elsewhere."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from probes.bpf import Kernel
from probes.host.blocks import LONG_NS, BlockReasons, Wake
from probes.host.kernel_symbols import KernelSymbols
from probes.host.reasons import REASONS
from probes.host.thread_time import Cut, ThreadTimeProbe
from probes.records import Role
from tests.probes import blocking, processes
from tests.probes.processes import Child, until

LASTS_NS = int(blocking.LASTS_S * 1e9)
WAITS = "pipe-read"
"""What the process does between requests."""
FILE_BYTES = 4 << 20
READS_PER_S = 8 << 20
BIT_NS = 20_000_000
BLKIO = Path("/sys/fs/cgroup/blkio")


@pytest.fixture(scope="module", params=[None, False], ids=["states-told", "states-not-told"])
def probe(root_and_bpf: Kernel, request: pytest.FixtureRequest) -> Iterator[ThreadTimeProbe]:
    """As this kernel has it, and as kernels before 5.18: those tell every reason from the stack."""
    loaded = ThreadTimeProbe(root_and_bpf, prev_state=request.param)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("blocking") / "file"
    path.write_bytes(os.urandom(FILE_BYTES))
    return path


@pytest.fixture(scope="module")
def child(probe: ThreadTimeProbe, file: Path) -> Iterator[Child]:
    """The process that blocks on request, watched."""
    blocker = processes.start([sys.executable, "-S", blocking.__file__, str(file)])
    assert blocker.line() == "ready"
    probe.watch({blocker.pid: Role.DRIVING})
    blocker.tell("sleep")  # it is watched from its next switch on
    blocker.line()
    cut_of(probe, blocker)
    yield blocker
    blocker.end()


@contextmanager
def slow_disk(pid: int, file: Path) -> Iterator[None]:
    """Reads of a process take a time that is known; skips where the block controller of cgroups 1 is not there."""
    group = BLKIO / f"sysom-test-{pid}"
    device = file.stat().st_dev
    try:
        group.mkdir()
        limit = f"{os.major(device)}:{os.minor(device)} {READS_PER_S}"
        (group / "blkio.throttle.read_bps_device").write_text(limit)
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        pytest.skip(f"reads cannot be made slow here: {error}")
    try:
        yield
    finally:
        (BLKIO / "cgroup.procs").write_text(str(pid))
        group.rmdir()


def cut_of(probe: ThreadTimeProbe, child: Child) -> Cut:
    """A cut while the process waits for a request, with all that was blocked until then assigned."""
    cuts: list[Cut] = []

    def cut() -> bool:
        cuts[:] = probe.heartbeat().get(child.pid, [])
        return bool(cuts)

    until(cut, "a cut of the process")
    assert sum(cuts[0].blocked_by) == cuts[0].blocked_ns
    return cuts[0]


def blocked(before: Cut, after: Cut) -> dict[str, int]:
    """Reason → ns between two cuts."""
    assert sum(after.blocked_by) == after.blocked_ns
    columns = zip(REASONS, before.blocked_by, after.blocked_by, strict=True)
    return {reason: last - first for reason, first, last in columns if last != first}


def ask(probe: ThreadTimeProbe, child: Child, request: str) -> dict[str, int]:
    """What it was blocked by from one request to the next."""
    before = cut_of(probe, child)
    child.tell(request)
    child.line()
    cut_of(probe, child)  # stacks that were new are known from here on
    return blocked(before, cut_of(probe, child))


def assert_mostly(reason: str, parts: dict[str, int], *beside: str) -> None:
    """Of what it was blocked, but for the next request and these reasons, nine tenths have this reason."""
    left_out = {reason, WAITS, "", *beside}
    others = {name: ns for name, ns in parts.items() if name not in left_out}
    assert parts.get(reason, 0) >= 9 * sum(others.values()), parts


@pytest.mark.live
@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ("sleep", "sleep"),
        ("pipe_read", "pipe-read"),
        ("unix_socket", "pipe-read"),
        ("pipe_write", "pipe-write"),
        ("network_receive", "network-receive"),
        ("network_send", "network-send"),
        ("futex", "futex"),
        ("poll", "poll"),
        ("child", "child"),
        ("file_lock", "kernel-lock"),
    ],
)
def test_a_block_has_the_reason_that_was_brought_about(
    probe: ThreadTimeProbe, child: Child, request_: str, reason: str
) -> None:
    parts = ask(probe, child, request_)
    assert_mostly(reason, parts)
    assert parts[reason] >= 0.5 * LASTS_NS, "the threads of the process may start late, never by so much"


@pytest.mark.live
def test_writing_and_fsync_show_as_writes(probe: ThreadTimeProbe, child: Child) -> None:
    parts = ask(probe, child, "storage_write")
    # Others who write to this file system hold its locks meanwhile, and drop what it has in memory.
    assert_mostly("storage-write", parts, "kernel-lock", "page-fault")


@pytest.mark.live
@pytest.mark.parametrize(
    ("request_", "reason"), [("storage_read", "storage-read"), ("page_fault", "page-fault")]
)
def test_a_slow_disk_shows_as_reads_or_as_faults(
    probe: ThreadTimeProbe, child: Child, file: Path, request_: str, reason: str
) -> None:
    with slow_disk(child.pid, file):
        parts = ask(probe, child, request_)
    assert_mostly(reason, parts)
    assert parts[reason] >= BIT_NS, (
        "the limit lets bursts pass, more of them while the process waits for a CPU"
    )


@pytest.mark.live
def test_a_stopped_process_is_stopped(probe: ThreadTimeProbe, child: Child) -> None:
    before = cut_of(probe, child)
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: stopped(child.pid), "it is stopped")
    begun = time.monotonic_ns()
    select.select([], [], [], blocking.LASTS_S)
    lasted = time.monotonic_ns() - begun
    os.kill(child.pid, signal.SIGCONT)
    until(lambda: not stopped(child.pid), "it goes on")
    cut_of(probe, child)
    parts = blocked(before, cut_of(probe, child))
    assert parts["stopped"] >= 0.9 * lasted
    assert set(parts) <= {"stopped", WAITS, ""}
    assert parts.get("", 0) <= 0.05 * lasted, "of a wait that was cut short the reason may not be known"


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


# --- what became known late, without a kernel

STACK = 77
SLEEPING, READING = REASONS.index("sleep"), REASONS.index("storage-read")
FUNCTIONS = {0x10: "schedule", 0x20: "io_schedule", 0x30: "filemap_read", 0x40: "bpf_prog_6deef7357e7b4530_x"}


class LateKey(NamedTuple):
    tid: int
    stack: int


class WakeKey(NamedTuple):
    tid: int
    stack: int
    tgid: int
    waker: int


class Table(dict[Any, Any]):
    """Stands where one of BCC's maps does."""

    Key = Leaf = staticmethod(lambda value: value)

    def items_lookup_batch(self) -> list[tuple[Any, Any]]:
        return list(self.items())

    def items_lookup_and_delete_batch(self) -> list[tuple[Any, Any]]:
        items = list(self.items())
        self.clear()
        return items


class Symbols(KernelSymbols):
    """Knows a few functions."""

    def __init__(self, hidden: str = "") -> None:
        self.hidden = hidden

    def why_none(self) -> str:
        return self.hidden

    def names(self, addresses: Iterable[int]) -> list[str]:
        return [FUNCTIONS[address] for address in addresses]


@pytest.fixture
def maps() -> dict[bytes, Table]:
    names = (b"stacks", b"reasons", b"unclassified", b"late", b"wakes", b"calls")
    tables = {name: Table() for name in names}
    tables[b"stacks"][STACK] = SimpleNamespace(ip=[0x40, 0x10, 0x20, 0x30, 0, 0])
    return tables


def slept_late(maps: dict[bytes, Table], tid: int, ns: int) -> None:
    """A thread slept in a stack that had no reason when it woke."""
    maps[b"unclassified"][STACK] = 1
    maps[b"late"][LateKey(tid, STACK)] = ns


def parts(**ns: int) -> tuple[int, ...]:
    return tuple(ns.get(reason.replace("-", "_") or "unknown", 0) for reason in REASONS)


def test_what_was_blocked_in_a_new_stack_is_assigned_when_that_has_a_reason(maps: dict[bytes, Table]) -> None:
    blocks = BlockReasons(maps, Symbols())
    slept_late(maps, 7, 300)
    assert blocks.learn() == 2
    assert maps[b"reasons"] == {STACK: READING}, "the kernel knows it from now on"
    assert maps[b"unclassified"] == {} == maps[b"late"]
    now = time.monotonic_ns()
    assert blocks.settled([7], now, parts(unknown=300, sleep=5)) == parts(storage_read=300, sleep=5)
    assert blocks.settled([8], now, parts(unknown=300)) == parts(unknown=300), "another thread"


def test_cuts_from_before_stay_as_they_were(maps: dict[bytes, Table]) -> None:
    blocks, before = BlockReasons(maps, Symbols()), time.monotonic_ns()
    slept_late(maps, 7, 300)
    blocks.learn()
    between = time.monotonic_ns()
    slept_late(maps, 7, 40)
    blocks.learn()
    after = time.monotonic_ns()
    assert blocks.settled([7], before, parts(unknown=300)) == parts(unknown=300)
    assert blocks.settled([7], between, parts(unknown=340)) == parts(unknown=40, storage_read=300)
    assert blocks.settled([7], after, parts(unknown=340)) == parts(storage_read=340)


def test_a_sum_over_threads_gets_what_is_assigned_to_each(maps: dict[bytes, Table]) -> None:
    blocks = BlockReasons(maps, Symbols())
    slept_late(maps, 7, 300)
    blocks.learn()
    slept_late(maps, 8, 40)
    blocks.learn()
    settled = blocks.settled([7, 8, 9], time.monotonic_ns(), parts(unknown=400))
    assert settled == parts(unknown=60, storage_read=340)


def test_a_thread_is_forgotten_two_heartbeats_after_its_last(maps: dict[bytes, Table]) -> None:
    blocks = BlockReasons(maps, Symbols())
    slept_late(maps, 7, 300)
    blocks.learn()
    blocks.keep({7: (5, Role.DRIVING)})
    blocks.keep({})
    assert blocks.settled([7], time.monotonic_ns(), parts(unknown=300)) == parts(storage_read=300)
    blocks.keep({})
    assert blocks.settled([7], time.monotonic_ns(), parts(unknown=300)) == parts(unknown=300)


def test_a_block_that_lasts_is_told_before_it_ends(maps: dict[bytes, Table]) -> None:
    blocks = BlockReasons(maps, Symbols())
    maps[b"unclassified"][STACK] = 1
    blocks.learn()
    assert blocks.in_progress(0, STACK, LONG_NS) == READING
    assert blocks.in_progress(0, STACK, LONG_NS - 1) == 0, "the kernel's own cuts do not have it"
    assert blocks.in_progress(SLEEPING, STACK, 1) == SLEEPING
    assert blocks.in_progress(0, STACK + 1, LONG_NS) == 0


def test_wakers_are_summed_by_reason_also_where_no_stack_was_needed(maps: dict[bytes, Table]) -> None:
    blocks = BlockReasons(maps, Symbols())
    maps[b"unclassified"][STACK] = 1
    blocks.learn()
    for stack, ns in ((STACK, 30), (-1 - READING, 4), (-1, 500)):
        key = WakeKey(7, stack, 9, 11)
        maps[b"wakes"][key] = SimpleNamespace(slept=ns, comm=b"writer\xff")
    assert sorted(blocks.wakes()) == [
        Wake(7, "", 9, 11, "writer\ufffd", 500),
        Wake(7, "storage-read", 9, 11, "writer\ufffd", 34),
    ]
    assert blocks.wakes() == []


def test_nothing_is_assigned_where_the_kernel_hides_its_functions(maps: dict[bytes, Table]) -> None:
    blocks = BlockReasons(maps, Symbols("hidden: do this"))
    slept_late(maps, 7, 300)
    blocks.learn()
    assert blocks.why_none == "hidden: do this"
    assert blocks.settled([7], time.monotonic_ns(), parts(unknown=300)) == parts(unknown=300)
