"""Processes of their own for heavy work, so that the event loop stays free: each takes one call after the other,
ends when nobody waits for the answer any more, and is made anew when it died.

Why not a process pool: that cannot end a call that hangs, is broken for ever once its worker was killed, and
leaves the worker behind when the program is.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import pickle
import signal
import struct
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable
from typing import Any, BinaryIO, TypeVar

from probes.lifetime import end_with_parent

T = TypeVar("T")

TRIES = 2
"""A worker that was killed (memory ran out, say) is made anew once per call; a call that kills two is at fault."""
CLOSE_S = 5.0
"""How long a killed worker may take to be gone; one that hangs in the kernel is left to it."""
NICE = 10
"""Of heavy work: whatever else the machine does comes first, the event loop above all."""
_LENGTH = struct.Struct("!Q")


class WorkerDied(RuntimeError):
    """The worker ended before it answered, more than once; the message says how."""


class Worker:
    """Runs functions of importable modules in a child process. One event loop's; ``close`` it.

    ``module`` is imported before the first call; ``what`` names the process in messages.
    """

    def __init__(
        self, module: str = "diagnosis.engine", *, what: str = "diagnoses", nice: int = NICE
    ) -> None:
        self._module = module
        self._what = what
        self._nice = nice
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._killed = False
        self._closed = False
        self.busy_since: float | None = None
        """``time.monotonic()`` when the call that runs began; None while none does."""

    @property
    def pid(self) -> int | None:
        """The process that waits or works; None when there is none."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Have a process ready, so that the first call does not wait for its imports."""
        if self._process is None or self._killed or self._process.returncode is not None:
            self._killed = False
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "bot.worker",
                str(os.getpid()),
                self._module,
                str(self._nice),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=without_settings(os.environ),
                start_new_session=True,  # Ctrl-C is for the program, which ends its worker
            )

    async def call(self, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """What ``function`` returns or raises, in the worker; calls wait for their turn.

        Cancelled, it ends the worker and what that is doing. Raises :class:`WorkerDied`.
        """
        question = pickle.dumps((function, arguments, named))
        async with self._turn:
            for _ in range(TRIES):
                self.busy_since = time.monotonic()
                try:
                    answer = await self._ask(question)
                finally:
                    self.busy_since = None
                if answer is not None:
                    good, value = pickle.loads(answer)  # noqa: S301 - from our own child, over our own pipe
                    if good:
                        result: T = value
                        return result
                    raise value
        raise WorkerDied(
            f"the process for {self._what} ended {TRIES} times before it answered (last with status "
            f"{self._process.returncode if self._process else 'unknown'}): was it killed because memory ran out? "
            "The kernel's log (dmesg) says so"
        )

    async def close(self, patience_s: float = 0.0) -> None:
        """End the worker: whatever it is doing, or when it is done, if that is within ``patience_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s), self._turn:
                await self._end_in_order()
        self._closed = True
        process = self._kill()
        if process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), CLOSE_S)

    async def _end_in_order(self) -> None:
        """The worker ends by itself when no more calls can come."""
        self._closed = True
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            await self._process.wait()

    async def _ask(self, question: bytes) -> bytes | None:
        """The answer; None when the worker died."""
        if self._closed:
            raise WorkerDied(f"the process for {self._what} was ended: the server is stopping")
        try:
            await self.start()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(_LENGTH.pack(len(question)) + question)
            await process.stdin.drain()
            (length,) = _LENGTH.unpack(await process.stdout.readexactly(_LENGTH.size))
            return await process.stdout.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            if (process := self._kill()) is not None:
                await process.wait()
            return None
        except BaseException:  # nobody waits for this answer: it must not be the next call's
            self._kill()
            raise

    def _kill(self) -> asyncio.subprocess.Process | None:
        process, self._killed = self._process, True
        if process is not None and process.returncode is None:
            # Not process.kill(): that may take the exit status of one that has ended, and asyncio then knows none.
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return process


class Workers:
    """Several workers: as many calls run at a time, the others wait for their turn. ``close`` them.

    A worker is started when it is needed for the first time, and kept.
    """

    def __init__(self, count: int) -> None:
        self._all = [Worker() for _ in range(count)]
        self._free: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()  # the one that worked last is warm
        self.waiting = 0
        """Calls that wait for their turn."""
        self.running = 0
        """Calls that have a worker."""
        for worker in reversed(self._all):
            self._free.put_nowait(worker)

    @property
    def pids(self) -> list[int]:
        """The processes that there are."""
        return [worker.pid for worker in self._all if worker.pid is not None]

    async def start(self) -> None:
        """Have one process ready."""
        await self._all[0].start()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[Worker]:
        """A worker that is free, for the length of an ``async with``."""
        self.waiting += 1
        try:
            worker = await self._free.get()
        finally:
            self.waiting -= 1
        self.running += 1
        try:
            yield worker
        finally:
            self.running -= 1
            self._free.put_nowait(worker)

    async def close(self) -> None:
        """End all, whatever they are doing."""
        await asyncio.gather(*(worker.close() for worker in self._all))


def without_settings(environ: os._Environ[str]) -> dict[str, str]:
    """An environment for a child that has no business with sysom's settings, and none with its secrets."""
    return {name: value for name, value in environ.items() if not name.startswith(("SYSOM_", "SLACK_"))}


def main() -> None:
    """The worker's side: calls come in on stdin, answers go out on stdout, both with their length before them."""
    parent, module, nice = sys.argv[1:]
    end_with_parent(int(parent))
    os.nice(int(nice))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    importlib.import_module(module)  # with SciPy, some: the first call finds it here
    while (call := _received(calls)) is not None:
        answers.write(_answer(call))
        answers.flush()


def _received(calls: BinaryIO) -> bytes | None:
    head = calls.read(_LENGTH.size)
    return calls.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else None


def _answer(call: bytes) -> bytes:
    try:
        function, arguments, named = pickle.loads(call)  # noqa: S301 - from our parent
        answer = pickle.dumps((True, function(*arguments, **named)))
    except Exception as error:
        answer = _refused(error)
    return _LENGTH.pack(len(answer)) + answer


def _refused(error: Exception) -> bytes:
    """The error, where it survives the way; its words, where not."""
    error.add_note(f"in the worker:\n{traceback.format_exc()}")
    try:
        answer = pickle.dumps((False, error))
        pickle.loads(answer)  # noqa: S301 - just made
    except Exception:
        return pickle.dumps(
            (False, RuntimeError(f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
        )
    return answer


if __name__ == "__main__":
    main()
