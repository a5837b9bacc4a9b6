"""Environments of real processes: what Python sets late, and what a hostile program leaves in their place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from probes import procfs
from probes.environ import MAX_VARIABLES, VALUE_LIMIT, Environments
from tests.probes import processes
from tests.probes.processes import Child

KEYS = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
PROC = Path("/proc")
SYSTEM_PYTHON = Path("/usr/bin/python3")

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or sys.platform != "linux", reason="another process's memory is read as root only"
)


@pytest.fixture
def environments() -> Environments:
    return Environments(KEYS)


def located(environments: Environments, pid: int) -> int | None:
    return environments.locate(pid, procfs.read(f"/proc/{pid}/maps", procfs.MAPS_LIMIT) or b"")


def now(environments: Environments, pid: int) -> dict[str, str] | None:
    at = located(environments, pid)
    assert at is not None, "the process's C library was not found"
    return environments.live(pid, at)


Run = Callable[..., Child]


@pytest.fixture
def run() -> Iterator[Run]:
    children: list[Child] = []

    def begin(command: list[str], **env: str) -> Child:
        children.append(processes.start(command, env))
        return children[-1]

    yield begin
    for child in children:
        child.end()


LATE = """
import os, sys
os.environ.update(RANK="3", WORLD_SIZE="8", SECRET="hunter2")
os.environ["MASTER_ADDR"] = "10.0.0.1"
print("set", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


@pytest.mark.parametrize("python", [Path(sys.executable), SYSTEM_PYTHON], ids=["own", "system"])
def test_what_python_sets_late_is_read_and_nothing_else(
    run: Run, environments: Environments, python: Path
) -> None:
    """Debian's python3 holds `environ` itself (a copy relocation), others leave it to the C library."""
    if not python.exists():
        pytest.skip(f"there is no {python}")
    child = run([str(python), "-S", "-c", LATE], RANK="0")
    child.line()
    assert environments.at_start(child.pid) == {"RANK": "0"}
    assert now(environments, child.pid) == {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1"}
    child.tell("del os.environ['RANK']; os.environ['WORLD_SIZE'] = '16'")
    child.line()
    assert now(environments, child.pid) == {"WORLD_SIZE": "16", "MASTER_ADDR": "10.0.0.1"}
    child.tell("os.environ.clear()")
    child.line()
    assert now(environments, child.pid) == {}


def test_an_environment_of_hundreds_of_variables_is_read(run: Run, environments: Environments) -> None:
    services = {f"SERVICE_{n}_PORT": f"tcp://10.0.{n % 256}.1:80" for n in range(3000)}
    child = run([sys.executable, "-S", "-c", LATE], **services)
    child.line()
    assert now(environments, child.pid) == {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "10.0.0.1"}


def test_a_long_value_is_cut(run: Run, environments: Environments) -> None:
    child = run([sys.executable, "-S", "-c", LATE])
    child.line()
    child.tell("os.environ['RANK'] = 'r' * 2_000_000")
    child.line()
    found = now(environments, child.pid)
    assert found is not None
    assert found["RANK"] == "r" * VALUE_LIMIT


def test_a_process_is_neither_stopped_nor_written_to(run: Run, environments: Environments) -> None:
    opened: list[tuple[str, int]] = []
    child = run([sys.executable, "-S", "-c", LATE])
    child.line()
    at = located(environments, child.pid)
    assert at is not None
    real = os.open

    def watched(path: str, flags: int, *rest: int) -> int:
        opened.append((str(path), flags))
        return real(path, flags, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", watched)
        environments.live(child.pid, at)
    assert opened == [(f"/proc/{child.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)]
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{child.pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    assert status["TracerPid"].strip() == "0"
    assert status["State"].startswith(("S", "R"))


def test_an_ended_process_has_no_environment(run: Run, environments: Environments) -> None:
    child = run([sys.executable, "-S", "-c", LATE])
    child.line()
    at = located(environments, child.pid)
    assert at is not None
    child.end()
    assert environments.live(child.pid, at) is None
    assert environments.at_start(child.pid) == {}
    assert located(environments, child.pid) is None


# --- programs of C


@pytest.fixture
def built(tmp_path: Path) -> Callable[..., str]:
    """Builds a C program that does something to `environ`, says so, and waits."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")

    def build(does: str, *flags: str) -> str:
        source = tmp_path / "program.c"
        source.write_text(
            "#define _GNU_SOURCE\n#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n"
            "#include <sys/mman.h>\n#include <unistd.h>\nextern char **environ;\n"
            "int main(void) {\n" + textwrap.dedent(does) + "\n"
            'puts("ready"); fflush(stdout); char c; return read(0, &c, 1) < 0; }\n'
        )
        program = tmp_path / "program"
        subprocess.run([compiler, "-O1", "-w", *flags, "-o", str(program), str(source)], check=True)
        return str(program)

    return build


@pytest.mark.parametrize(
    "flags", [("-fPIE", "-pie"), ("-fno-pie", "-no-pie"), ("-fPIC", "-pie", "-Wl,-z,nocopyreloc")]
)
def test_a_program_of_any_kind_of_linking_is_read(
    run: Run, built: Callable[..., str], environments: Environments, flags: tuple[str, ...]
) -> None:
    child = run([built('setenv("RANK", "7", 1); if (!environ) return 1;', *flags)], WORLD_SIZE="9")
    child.line()
    assert now(environments, child.pid) == {"RANK": "7", "WORLD_SIZE": "9"}


def test_a_program_without_dynamic_symbols_keeps_the_environment_it_started_with(
    run: Run, built: Callable[..., str], environments: Environments
) -> None:
    child = run([built('setenv("RANK", "7", 1);', "-static")], RANK="1")
    child.line()
    assert located(environments, child.pid) is None
    assert environments.at_start(child.pid) == {"RANK": "1"}


def test_of_a_variable_that_is_there_twice_the_first_counts_as_for_getenv(
    run: Run, built: Callable[..., str], environments: Environments
) -> None:
    child = run([built('static char *own[] = {"RANKS=9", "RANK=1", "RANK=2", 0}; environ = own;')])
    child.line()
    assert now(environments, child.pid) == {"RANK": "1"}


HOSTILE = {
    "an array nowhere": "environ = (char **)0xdead0000;",
    "an array in the kernel": "environ = (char **)0xffffffff81000000;",
    "an array at the last address": "environ = (char **)~0ull;",
    "an array of one byte": "char *page = mmap(0, 4096, 3, MAP_PRIVATE|MAP_ANONYMOUS, -1, 0); page[4095] = 1;"
    " environ = (char **)(page + 4095);",
}
"""What leaves nothing to read."""


@pytest.mark.parametrize("does", HOSTILE.values(), ids=HOSTILE.keys())
def test_an_array_that_is_none_is_no_environment(
    run: Run, built: Callable[..., str], environments: Environments, does: str
) -> None:
    child = run([built(does)], RANK="1")
    child.line()
    assert not now(environments, child.pid)


def test_a_cleared_environment_is_empty(
    run: Run, built: Callable[..., str], environments: Environments
) -> None:
    child = run([built("clearenv();")], RANK="1")
    child.line()
    assert now(environments, child.pid) == {}


ODD = {
    "strings nowhere": 'static char *own[] = {(char *)0xdead0000, (char *)~0ull, (char *)8, "RANK=1", 0};',
    "pointers to the array itself": 'static char *own[4]; own[0] = own[1] = (char *)own; own[2] = "RANK=1";',
    "a string that ends with its page": "char *page = mmap(0, 8192, 3, MAP_PRIVATE|MAP_ANONYMOUS, -1, 0);"
    ' munmap(page + 4096, 4096); memcpy(page + 4090, "RANK=1", 6); static char *own[2]; own[0] = page + 4090;',
}
"""What a variable stands among."""


@pytest.mark.parametrize("does", ODD.values(), ids=ODD.keys())
def test_a_variable_among_garbage_is_read(
    run: Run, built: Callable[..., str], environments: Environments, does: str
) -> None:
    child = run([built(does + " environ = own;")])
    child.line()
    assert now(environments, child.pid) == {"RANK": "1"}


def test_an_array_of_a_gigabyte_that_never_ends_is_read_in_part_and_soon(
    run: Run, built: Callable[..., str], environments: Environments
) -> None:
    far = "char **own = mmap(0, 1ull << 30, 3, MAP_PRIVATE|MAP_ANONYMOUS|MAP_NORESERVE, -1, 0);"
    fill = f"for (long i = 0; i < {2 * MAX_VARIABLES}; i++) own[i] = (char *)own + (i * 8191) % (1l << 20);"
    child = run([built(far + fill + 'own[0] = "RANK=1"; environ = own;')])
    child.line()
    begun = time.thread_time()
    found = now(environments, child.pid)
    assert time.thread_time() - begun < 1, "it read far more than its limits allow"
    assert found == {"RANK": "1"}


def test_a_variable_that_is_set_again_and_again_is_never_read_as_another(
    run: Run, built: Callable[..., str], environments: Environments
) -> None:
    """Each setenv may replace the array and free the old one under the reader."""
    busy = """
    char value[64];
    puts("ready"); fflush(stdout);
    for (unsigned n = 0; ; n++) {
      snprintf(value, sizeof value, "%u-%u", n, n);
      setenv("RANK", value, 1);
      snprintf(value, sizeof value, "FILLER_%u", n % 512);
      n % 1024 < 512 ? setenv(value, "x", 1) : unsetenv(value);
    }"""
    child = run([built(busy)], WORLD_SIZE="8")
    child.line()
    at = located(environments, child.pid)
    assert at is not None
    for _ in range(300):
        found = environments.live(child.pid, at)
        assert found is None or found.get("WORLD_SIZE", "8") == "8"
