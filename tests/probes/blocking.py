"""A process that blocks on request, once in each way that the thread-time probe tells apart. Its main thread waits
for the next request in a pipe; each answer is how long the request took."""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable

LASTS_S = 0.3
"""How long each kind of block lasts at least, in all."""
MB = 1 << 20


def beside(deed: Callable[[], object]) -> None:
    """Do it in another process, after ``LASTS_S``: a thread, and waiting for it, would take Python's lock."""
    if not os.fork():
        time.sleep(LASTS_S)
        deed()
        os._exit(0)


def sleep() -> None:
    time.sleep(LASTS_S)


def pipe_read() -> None:
    read, write = os.pipe()
    beside(lambda: os.write(write, b"x"))
    os.read(read, 1)
    os.close(read)
    os.close(write)


def pipe_write() -> None:
    read, write = os.pipe()
    os.write(write, bytes(65_536))
    beside(lambda: os.read(read, 65_536))
    os.write(write, b"x")
    os.close(read)
    os.close(write)


def unix_socket() -> None:
    one, other = socket.socketpair()
    beside(lambda: other.send(b"x"))
    one.recv(1)
    one.close()
    other.close()


def tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        return one, listening.accept()[0]


def network_receive() -> None:
    one, other = tcp()
    beside(lambda: other.send(b"x"))
    one.recv(1)
    one.close()
    other.close()


def network_send() -> None:
    one, other = tcp()
    size = 16 * MB  # more than both ends' buffers hold
    beside(lambda: other.recv(size, socket.MSG_WAITALL))
    one.sendall(bytes(size))
    one.close()
    other.close()


def futex() -> None:
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(LASTS_S, lock.release).start()
    lock.acquire()


def poll() -> None:
    select.select([], [], [], LASTS_S)


def child() -> None:
    pid = os.posix_spawn("/bin/sleep", ["sleep", str(LASTS_S)], {})
    os.waitpid(pid, 0)


def file_lock(path: str) -> None:
    """A lock on a file that another process holds."""
    held = os.open(path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    beside(lambda: os.close(held))  # the last to have it open: its end is the lock's
    os.close(held)
    file = os.open(path, os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.close(file)


def dropped(path: str) -> int:
    """The file open, with none of it in memory."""
    file = os.open(path, os.O_RDWR)
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return file


def storage_read(path: str) -> None:
    ends = time.monotonic() + LASTS_S
    while time.monotonic() < ends:
        file = dropped(path)
        os.pread(file, 4 * MB, 0)
        os.close(file)


def storage_write(path: str) -> None:
    file = os.open(path, os.O_RDWR)
    ends = time.monotonic() + LASTS_S
    while time.monotonic() < ends:
        os.pwrite(file, bytes(4 * MB), 0)
        os.fsync(file)
    os.close(file)


def page_fault(path: str) -> None:
    ends = time.monotonic() + LASTS_S
    while time.monotonic() < ends:
        file = dropped(path)
        with mmap.mmap(file, 0, prot=mmap.PROT_READ) as memory:
            memory.madvise(mmap.MADV_RANDOM)
            sum(memory[at] for at in range(0, len(memory), mmap.PAGESIZE))
        os.close(file)


def main() -> None:
    file = sys.argv[1]
    print("ready", flush=True)
    for line in iter(lambda: os.read(0, 64).decode(), ""):
        deed = globals()[line.strip()]
        begun = time.monotonic_ns()
        deed(file) if deed.__code__.co_argcount else deed()
        print(time.monotonic_ns() - begun, flush=True)


if __name__ == "__main__":
    main()
