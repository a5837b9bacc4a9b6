"""Real processes for tests: children that say when they are where a test wants them, and wait to be told to end."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DEADLINE_S = 90.0
"""A busy machine may take seconds to start a Python process; a test that waits longer has failed."""


def until(condition: Callable[[], bool], what: str) -> None:
    """Ask again until ``condition`` holds; fails after a deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {DEADLINE_S:.0f} s: {what}"
        select.select([], [], [], 0.01)


@dataclass
class Child:
    """A process whose standard input keeps it alive and whose output says how far it is."""

    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    def line(self) -> str:
        """The next line that it writes."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        assert ready, "the child said nothing"
        return self.process.stdout.readline().decode().strip()

    def tell(self, word: str) -> None:
        """Write a line to it."""
        assert self.process.stdin is not None
        self.process.stdin.write(word.encode() + b"\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Kill it and reap it. Its own children end when their standard input does."""
        self.process.kill()
        self.process.communicate()


def start(command: Sequence[str], env: Mapping[str, str] | None = None) -> Child:
    """Start a process with ``env`` on top of a bare environment."""
    bare = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    pipe = subprocess.PIPE
    return Child(subprocess.Popen(command, env=bare | dict(env or {}), stdin=pipe, stdout=pipe, bufsize=0))


def python(code: str, *arguments: str, env: Mapping[str, str] | None = None) -> Child:
    """Start ``python -c code``."""
    return start([sys.executable, "-S", "-c", code, *arguments], env)


def a_shared_library() -> Path:
    """Some small library that this process has mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if " r-xp " in line and ".so" in line}
    return min((path for path in paths if path.exists() and "libm" in path.name), default=min(paths))


def stand_in(folder: Path, name: str = "libtorch_cpu.so") -> Path:
    """A copy of some library under the name of the one that holds gloo's collectives."""
    return Path(shutil.copy(a_shared_library(), folder / name))
