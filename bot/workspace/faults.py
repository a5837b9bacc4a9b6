"""Faults on demand: what goes wrong between an app and Slack, made to happen to the next calls of a method."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Literal, cast

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from bot.workspace.clock import Clock

# How a request in HTTP mode may fail its check: signed with another secret, signed rightly six minutes ago,
# with a timestamp that is no number, with a signature that is not ASCII, or with neither header.
BadSignature = Literal["wrong", "stale", "no_number", "not_ascii", "missing"]


class Fault(msgspec.Struct, frozen=True):
    """What happens to one call: `limited` and `error` and `lost` instead of its effect, `slow` and `cut`
    after it took place."""

    kind: Literal["limited", "error", "lost", "slow", "cut"]
    seconds: float = 0.0
    status: int = 500


class Faults:
    """Faults that wait for the calls they are meant for, in order.

    A method is a name of the Web API, `response_url` or `upload` (the second step of an upload).
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[str, deque[Fault]] = {}
        self._signatures: deque[BadSignature] = deque()
        self._held: set[asyncio.Event] = set()

    def rate_limit(self, method: str, *, times: int = 1, retry_after: int = 1) -> None:
        """Answer the next `times` calls with HTTP 429 and `Retry-After: retry_after` (seconds)."""
        self._add(method, times, Fault("limited", seconds=retry_after))

    def server_error(self, method: str, *, times: int = 1, status: int = 500) -> None:
        """Answer with a status of 500 and above, and the HTML page that a balancer gives."""
        self._add(method, times, Fault("error", status=status))

    def slow(self, method: str, *, seconds: float, times: int = 1) -> None:
        """Do what the call asks, and answer it `seconds` of the workspace's clock later."""
        self._add(method, times, Fault("slow", seconds=seconds))

    def drop(self, method: str, *, after_effect: bool, times: int = 1) -> None:
        """Break the connection without an answer: before the call has any effect, or after it took place,
        so that the message is there and the caller does not know."""
        self._add(method, times, Fault("cut" if after_effect else "lost"))

    def signature(self, bad: BadSignature, *, times: int = 1) -> None:
        """Send the next requests of HTTP mode with a signature that fails the check."""
        self._signatures.extend([bad] * times)

    def take_signature(self) -> BadSignature | None:
        """The fault for this request of HTTP mode."""
        return self._signatures.popleft() if self._signatures else None

    async def around(
        self, method: str, request: Request, answer: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Answer a request with `answer`, or with the fault that waits for this call of the method."""
        waiting = self._waiting.get(method)
        fault = waiting.popleft() if waiting else None
        if fault is None:
            return await answer(request)
        if fault.kind == "limited":
            return too_fast(int(fault.seconds))
        if fault.kind == "error":
            return HTMLResponse("<html><body>upstream failed</body></html>", fault.status)
        if fault.kind == "lost":
            return await _sever(request)
        response = await answer(request)
        if fault.kind == "cut":
            return await _sever(request)
        await self._wait(fault.seconds)
        return response

    def stop(self) -> None:
        """Let go of all answers that are held back."""
        for over in self._held:
            over.set()

    async def _wait(self, seconds: float) -> None:
        over = asyncio.Event()
        self._held.add(over)
        self._clock.after(seconds, over.set)
        await over.wait()
        self._held.discard(over)

    def _add(self, method: str, times: int, fault: Fault) -> None:
        self._waiting.setdefault(method, deque()).extend([fault] * times)


def too_fast(seconds: int) -> Response:
    """The answer to a call that comes too early, by `seconds`."""
    return JSONResponse({"ok": False, "error": "ratelimited"}, 429, {"Retry-After": str(seconds)})


async def _sever(request: Request) -> Response:
    """Break the connection on which a request came, without a byte of an answer.

    ASGI knows no such thing, so this reaches for the transport of uvicorn, which serves the workspace.
    """
    cycle = cast(Any, request.receive).__self__
    cycle.transport.abort()
    while (await request.receive())["type"] != "http.disconnect":
        pass
    return Response()
