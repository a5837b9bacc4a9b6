"""Which processes are ranks: on real processes, and where a case cannot be made at will, a made-up /proc."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from probes.discovery import PF_KTHREAD, Discovery, read_process
from probes.launchers import ENV_ALLOWED
from probes.nccl.gloo import LIBRARY
from tests.probes import processes
from tests.probes.conftest import Start
from tests.probes.fake_proc import Clock, FakeProc
from tests.probes.processes import until
from tests.probes.ranks import FORKS, LOAD, RANK, WAIT, environment, found

# --- real processes


def test_a_rank_is_found_with_its_job_and_its_library(start: Start, library: Path) -> None:
    child = start(RANK, **environment(1, 4))
    child.line()
    rank = found(Discovery(LIBRARY), child.pid)[child.pid]
    assert (rank.job, rank.rank, rank.world_size, rank.local_rank) == ("job-1", 1, 4, 1)
    assert rank.process.pid == child.pid
    assert rank.library.samefile(library)


def test_a_process_with_the_variables_and_without_the_library_is_no_rank(start: Start) -> None:
    child = start("import os, sys; " + WAIT, **environment())
    child.line()
    discovery = Discovery(LIBRARY)
    assert not found(discovery, child.pid)


def test_a_process_with_the_library_and_without_the_variables_is_no_rank(start: Start) -> None:
    child = start(RANK)
    child.line()
    discovery = Discovery(LIBRARY)
    assert not found(discovery, child.pid)
    assert discovery.rank_of(child.pid) is None


def test_a_job_that_starts_after_the_first_scan_is_found(start: Start) -> None:
    discovery = Discovery(LIBRARY)
    discovery.scan()
    child = start(RANK, **environment())
    child.line()
    until(lambda: child.pid in discovery.scan(), "the new rank is found")


def test_a_rank_that_imports_its_library_late_is_found_then(start: Start) -> None:
    clock = Clock()
    discovery = Discovery(LIBRARY, clock=clock)
    child = start("import ctypes, os, sys; " + WAIT + "ctypes.CDLL(sys.argv[1]); " + WAIT, **environment())
    child.line()
    assert not found(discovery, child.pid)
    child.tell("load it")
    child.line()
    clock.now += 5
    assert child.pid in discovery.scan()


def test_a_rank_that_ends_is_gone_from_the_next_scan(start: Start) -> None:
    discovery = Discovery(LIBRARY)
    child = start(RANK, **environment())
    child.line()
    assert found(discovery, child.pid)
    child.end()
    assert not found(discovery, child.pid)
    assert discovery.rank_of(child.pid) is None


def test_a_killed_rank_that_nobody_has_reaped_is_no_rank(start: Start) -> None:
    clock = Clock()
    discovery = Discovery(LIBRARY, clock=clock)
    child = start(RANK, **environment())
    child.line()
    assert found(discovery, child.pid)
    child.process.kill()
    until(lambda: _state(child.pid) == "Z", "the killed rank waits to be reaped")
    clock.now += 1
    assert not found(discovery, child.pid)


def test_a_forked_worker_of_a_rank_is_its_helper_and_no_rank(start: Start) -> None:
    child = start(FORKS, **environment(rank=3))
    worker = int(child.line())
    discovery = Discovery(LIBRARY)
    assert set(found(discovery, child.pid, worker)) == {child.pid}
    assert discovery.rank_of(worker) == ("job-1", 3)


def test_a_worker_that_outlives_its_rank_does_not_become_one(start: Start) -> None:
    clock = Clock()
    discovery = Discovery(LIBRARY, clock=clock)
    child = start(FORKS, **environment(rank=3))
    worker = int(child.line())
    assert set(found(discovery, child.pid, worker)) == {child.pid}
    child.process.kill()
    child.process.wait()
    for _ in range(3):
        clock.now += 5
        assert not found(discovery, child.pid, worker)
    assert read_process(Path("/proc"), worker) is not None, "the worker should still have been there"


def test_the_child_of_a_shell_with_the_variables_is_the_rank(library: Path, start: Start) -> None:
    del start
    script = f"{sys.executable} -S -c '{RANK}' {library}; true"
    shell = processes.start(["/bin/sh", "-c", script], environment(rank=2))
    try:
        rank = int(shell.line())
        assert rank != shell.pid
        assert set(found(Discovery(LIBRARY), shell.pid, rank)) == {rank}
    finally:
        shell.tell("end")
        shell.end()


def test_a_process_that_replaces_itself_by_a_rank_is_found(start: Start) -> None:
    clock = Clock()
    discovery = Discovery(LIBRARY, clock=clock)
    become = (
        "os.execve(sys.executable, [sys.executable, '-S', '-c', sys.argv[2], sys.argv[1]], dict(os.environ, "
    )
    code = (
        "import os, sys; sys.argv.append("
        + repr(RANK)
        + "); "
        + WAIT
        + become
        + "RANK='0', WORLD_SIZE='2', SYSOM_JOB_ID='late'))"
    )
    child = start(code)
    child.line()
    assert not found(discovery, child.pid)
    child.tell("exec")
    child.line()
    clock.now += 60
    rank = found(discovery, child.pid)[child.pid]
    assert (rank.job, rank.rank, rank.world_size) == ("late", 0, 2)


def test_a_rank_that_replaces_itself_by_something_else_is_none_any_more(start: Start) -> None:
    clock = Clock()
    discovery = Discovery(LIBRARY, clock=clock)
    other = "import os, sys; " + WAIT
    child = start(
        RANK + f"os.execve(sys.executable, [sys.executable, '-S', '-c', {other!r}], {{}})", **environment()
    )
    child.line()
    assert found(discovery, child.pid)
    child.tell("exec")
    child.line()
    clock.now += 1
    assert not found(discovery, child.pid)
    assert discovery.rank_of(child.pid) is None


def test_a_library_deleted_under_a_running_rank_is_still_reachable(start: Start, library: Path) -> None:
    bytes_before = library.read_bytes()
    child = start(RANK, **environment())
    child.line()
    library.unlink()
    rank = found(Discovery(LIBRARY), child.pid)[child.pid]
    assert rank.library.parent.name == "map_files"
    assert rank.library.read_bytes() == bytes_before


def test_a_library_in_a_folder_with_spaces_and_a_version_suffix_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "site packages"
    folder.mkdir()
    library = processes.stand_in(folder, "libtorch_cpu-1a2b.so")
    child = processes.python(RANK, str(library), env=environment())
    try:
        child.line()
        assert found(Discovery(LIBRARY), child.pid)[child.pid].library.samefile(library)
    finally:
        child.end()


def test_a_rank_in_a_container_is_found_by_the_node_s_pid_with_the_library_that_only_it_sees(
    library: Path, tmp_path: Path
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    covers = f"os.system('mount -t tmpfs none {inside} && echo other > {inside}/{library.name}'); "
    code = LOAD + WAIT + covers + WAIT
    enters = f"mount -t tmpfs none {inside} && cp {library} {inside} && exec {sys.executable} -S -c "
    enters += f'"{code}" {inside}/{library.name}'
    unshare = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
    outer = processes.start([*unshare, "sh", "-c", enters], environment())
    try:
        said = outer.line()
        if not said:
            pytest.skip("no namespaces can be made here")
        assert said == "1", "its own view of its pid"
        (pid,) = map(int, Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split())
        assert not list(inside.iterdir()), "the library should not be there for the node"
        rank = found(Discovery(LIBRARY), pid)[pid]
        assert rank.process.pid == pid
        assert rank.library == Path(f"/proc/{pid}/root{inside}/{library.name}")
        assert rank.library.read_bytes() == library.read_bytes()

        outer.tell("mount another one over it")
        outer.line()
        rank = found(Discovery(LIBRARY), pid)[pid]
        assert rank.library.parent == Path(f"/proc/{pid}/map_files"), "its path leads to another file now"
        assert rank.library.read_bytes() == library.read_bytes()
    finally:
        outer.end()


def test_a_secret_in_the_environment_never_leaves(start: Start) -> None:
    child = start(RANK, **environment(AWS_SECRET="hunter2", NOTRANK="7", PRANK="1", RANK_SECRET="s"))
    child.line()
    rank = found(Discovery(LIBRARY), child.pid)[child.pid]
    assert rank.env == {"SYSOM_JOB_ID": "job-1", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert set(rank.env) <= set(ENV_ALLOWED)
    assert "hunter2" not in repr(rank)


def test_threads_are_found_by_name(start: Start) -> None:
    code = """
import ctypes, os, sys, threading
ready = threading.Event()
def run():
    ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop")
    ready.set()
    threading.Event().wait()
threading.Thread(target=run, daemon=True).start()
ready.wait()
print(os.getpid(), flush=True)
sys.stdin.readline()
"""
    child = start(code)
    child.line()
    discovery = Discovery(LIBRARY)
    (tid,) = discovery.threads(child.pid, "gloo_tcp_loop|pt_gloo_runloop")
    assert tid != child.pid
    assert Path(f"/proc/{child.pid}/task/{tid}/comm").read_text() == "pt_gloo_runloop\n"
    assert discovery.threads(child.pid, "pt_gloo") == [], "the whole name must match"
    child.end()
    assert discovery.threads(child.pid, ".*") == []


# --- a made-up /proc


def test_a_pid_used_again_by_another_job_is_seen_at_once(proc: FakeProc) -> None:
    clock = Clock()
    discovery = Discovery(LIBRARY, proc=proc.root, clock=clock)
    proc.put(7, environment(rank=1, SYSOM_JOB_ID="old"), start=100)
    assert discovery.scan()[7].job == "old"
    proc.put(7, environment(rank=2, SYSOM_JOB_ID="new"), start=900)
    rank = discovery.scan()[7]
    assert (rank.job, rank.rank, rank.process.start_ticks) == ("new", 2, 900)


def test_a_pid_used_again_by_no_rank_is_none(proc: FakeProc) -> None:
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    proc.put(7, environment())
    assert 7 in discovery.scan()
    proc.put(7, {}, start=900)
    assert discovery.scan() == {}
    assert discovery.rank_of(7) is None


def test_a_helper_s_pid_used_again_by_a_rank_is_a_rank(proc: FakeProc) -> None:
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    proc.put(7, environment(), start=100)
    proc.put(8, environment(), start=101, parent=7)
    assert set(discovery.scan()) == {7}
    proc.put(8, environment(rank=0), start=900)
    assert set(discovery.scan()) == {7, 8}


def test_a_helper_of_a_helper_is_no_rank_even_with_a_process_between(proc: FakeProc) -> None:
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    proc.put(7, environment())
    proc.put(8, {}, parent=7, library=None)
    proc.put(9, environment(), parent=8)
    assert set(discovery.scan()) == {7}


def test_a_rank_below_a_slurm_task_of_the_same_number_is_no_helper_of_it(proc: FakeProc) -> None:
    """torchrun in a task of srun: its worker has a number of its own, which happens to be the task's, and maps the
    library seconds after it was seen."""
    clock = Clock()
    discovery = Discovery(LIBRARY, proc=proc.root, clock=clock)
    task = {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
    }
    proc.put(7, task)
    worker = task | {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "1",
    }
    proc.put(8, worker, parent=7, library=None)
    discovery.scan()
    proc.map(8, "/lib/libtorch_cpu.so")
    proc.resize(8, 1 << 30)
    clock.now += 60
    assert {pid: rank.rank for pid, rank in discovery.scan().items()} == {8: 1}


def test_a_rank_started_by_another_rank_s_process_is_a_rank_of_its_own(proc: FakeProc) -> None:
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    proc.put(7, environment(rank=0))
    proc.put(8, environment(rank=1), parent=7)
    assert {pid: rank.rank for pid, rank in discovery.scan().items()} == {7: 0, 8: 1}


def test_processes_whose_parents_go_in_a_circle_end_the_search(proc: FakeProc) -> None:
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    proc.put(
        7, environment(rank=0), parent=8
    )  # /proc is no snapshot: pids may be used again while it is read
    proc.put(8, environment(rank=1), parent=7)
    assert set(discovery.scan()) == {7, 8}


@pytest.mark.parametrize(
    ("rank", "world"),
    [("-1", "4"), ("4", "4"), ("0", "0"), ("x", "4"), ("", "4"), ("0", "9" * 100), ("1.0", "4"), ("0", "-2")],
)
def test_a_rank_that_cannot_be_is_none(proc: FakeProc, rank: str, world: str) -> None:
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    proc.put(7, {"RANK": rank, "WORLD_SIZE": world, "SYSOM_JOB_ID": "j"})
    assert discovery.scan() == {}


@pytest.mark.parametrize(("local", "expected"), [("3", 3), ("", -1), ("x", -1), ("-5", -1), ("9" * 100, -1)])
def test_a_local_rank_that_cannot_be_is_unknown(proc: FakeProc, local: str, expected: int) -> None:
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    proc.put(7, environment(LOCAL_RANK=local))
    assert discovery.scan()[7].local_rank == expected


def test_a_job_name_with_control_characters_is_made_harmless(proc: FakeProc) -> None:
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    proc.put(7, environment(SYSOM_JOB_ID="a\nb\x1b[31m\u202e"))
    assert discovery.scan()[7].job == "a?b?[31m?"


def test_a_job_name_of_any_length_is_cut(proc: FakeProc) -> None:
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    proc.put(7, environment(SYSOM_JOB_ID="j" * 100_000))
    assert discovery.scan()[7].job == "j" * 128


def test_a_rank_without_anything_to_name_its_job_by_is_told_after_a_while(proc: FakeProc) -> None:
    clock = Clock()
    discovery = Discovery(LIBRARY, proc=proc.root, clock=clock, host="node-7")
    proc.put(7, {"RANK": "0", "WORLD_SIZE": "2"}, parent=41)
    assert discovery.scan() == {}, "a program sets one variable after another: more may come"
    clock.now += 5
    assert discovery.scan()[7].job == "node-7:launcher-41"


def test_processes_are_asked_for_their_mappings_again_only_when_these_have_changed(proc: FakeProc) -> None:
    clock = Clock()
    discovery = Discovery(LIBRARY, proc=proc.root, clock=clock)
    proc.put(7, environment(), library=None, size=1 << 20)
    assert discovery.scan() == {}
    proc.map(7, "/lib/libtorch_cpu.so")
    clock.now += 60
    assert discovery.scan() == {}, "nothing says that its mappings have changed: they were not read"
    proc.resize(7, 2 << 20)
    clock.now += 60
    assert set(discovery.scan()) == {7}


def test_a_kernel_thread_s_environment_is_not_read(proc: FakeProc) -> None:
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    proc.put(7, environment(), flags=PF_KTHREAD, name="kworker/0:1")
    assert discovery.scan() == {}


def test_a_name_with_parentheses_and_spaces_is_read_whole(proc: FakeProc) -> None:
    proc.put(7, {}, name="a) S 1 (b c", parent=5, start=77)
    process = read_process(proc.root, 7)
    assert process is not None
    assert (process.name, process.parent, process.start_ticks) == ("a) S 1 (b c", 5, 77)


def test_a_similar_file_name_is_not_the_library(proc: FakeProc) -> None:
    discovery = Discovery(LIBRARY, proc=proc.root, clock=Clock())
    proc.put(7, environment(), library="/lib/notlibtorch_cpu.so")
    proc.put(8, environment(rank=2), library="/lib/libtorch_cpu.so.debug")
    assert discovery.scan() == {}


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
