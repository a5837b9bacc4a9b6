"""Why a thread is blocked, on the running kernel: each reason is brought about on purpose, for a time known from
elsewhere."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from probes.bpf import Kernel
from probes.host.reasons import REASONS
from probes.host.thread_time import Cut, ThreadTimeProbe
from probes.records import Role
from tests.probes import blocking, processes
from tests.probes.processes import Child, until

pytestmark = pytest.mark.live

LASTS_NS = int(blocking.LASTS_S * 1e9)
WAITS = "pipe-read"
"""What the process does between requests."""
FILE_BYTES = 4 << 20
READS_PER_S = 8 << 20
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


def assert_mostly(reason: str, parts: dict[str, int]) -> None:
    """Of what it was blocked, but for the next request, nine tenths have this reason."""
    waits = {WAITS} if reason != WAITS else set()
    others = {name: ns for name, ns in parts.items() if name and name not in {reason, *waits}}
    assert parts.get(reason, 0) >= 9 * sum(others.values()), parts


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
        ("storage_write", "storage-write"),
    ],
)
def test_a_block_has_the_reason_that_was_brought_about(
    probe: ThreadTimeProbe, child: Child, request_: str, reason: str
) -> None:
    parts = ask(probe, child, request_)
    assert_mostly(reason, parts)
    if request_ != "storage_write":  # as fast as the disk is
        assert parts[reason] >= 0.5 * LASTS_NS, "the threads of the process may start late, never by so much"


@pytest.mark.parametrize(
    ("request_", "reason"), [("storage_read", "storage-read"), ("page_fault", "page-fault")]
)
def test_a_slow_disk_shows_as_reads_or_as_faults(
    probe: ThreadTimeProbe, child: Child, file: Path, request_: str, reason: str
) -> None:
    with slow_disk(child.pid, file):
        parts = ask(probe, child, request_)
    assert_mostly(reason, parts)
    assert parts[reason] >= 0.4 * FILE_BYTES / READS_PER_S * 1e9, "the limit lets a first part pass at once"


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
    assert set(parts) <= {"stopped", WAITS}


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
