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


def beside(*deeds: Callable[[], object]) -> None:
    """Do it in another thread, after ``LASTS_S``. Nobody waits for its end, which would be a block of its own."""

    def later() -> None:
        time.sleep(LASTS_S)
        for deed in deeds:
            deed()

    threading.Thread(target=later).start()


def sleep() -> None:
    time.sleep(LASTS_S)


def pipe_read() -> None:
    read, write = os.pipe()
    beside(lambda: os.write(write, b"x"), lambda: os.close(write))
    os.read(read, 1)
    os.close(read)


def pipe_write() -> None:
    read, write = os.pipe()
    os.write(write, bytes(65_536))
    beside(lambda: os.read(read, 65_536), lambda: os.read(read, 1), lambda: os.close(read))
    os.write(write, b"x")
    os.close(write)


def unix_socket() -> None:
    one, other = socket.socketpair()
    beside(lambda: other.send(b"x"), other.close)
    one.recv(1)
    one.close()


def tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        return one, listening.accept()[0]


def network_receive() -> None:
    one, other = tcp()
    beside(lambda: other.send(b"x"), other.close)
    one.recv(1)
    one.close()


def network_send() -> None:
    one, other = tcp()
    size = 16 * MB  # more than both ends' buffers hold
    beside(lambda: other.recv(size, socket.MSG_WAITALL), other.close)
    one.sendall(bytes(size))
    one.close()


def futex() -> None:
    lock = threading.Lock()
    lock.acquire()
    beside(lock.release)
    lock.acquire()


def poll() -> None:
    select.select([], [], [], LASTS_S)


def child() -> None:
    pid = os.posix_spawn("/bin/sleep", ["sleep", str(LASTS_S)], {})
    os.waitpid(pid, 0)


def file_lock(path: str) -> None:
    """A lock on a file that another process holds."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        held = os.open(path, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX)
        os.write(write, b"x")
        time.sleep(LASTS_S)
        os._exit(0)
    os.read(read, 1)
    file = os.open(path, os.O_RDONLY)
    fcntl.flock(file, fcntl.LOCK_EX)
    os.waitpid(pid, 0)
    for descriptor in (read, write, file):
        os.close(descriptor)


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
