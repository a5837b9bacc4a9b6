"""The server's HTTP: agents post batches here; ``/healthz`` says whether it works and what it refused.

The event loop only moves bytes. Decoding and storing happen in one writer thread with a bounded queue; when
it is full, agents are told to come back (they keep what they have).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from diagnosis.ingest import Ingest, Refusal
from probes.records import MAX_WIRE_BYTES, SCHEMA

BODY_TIMEOUT_S = 30.0
"""A body that takes longer is given up: 4 MiB at 1.1 Mbit/s."""
MAX_WAITING = 32
"""Batches taken at a time, being read, waiting or written: with 4 MiB each at most 128 MiB."""


def create_app(
    ingest: Ingest, *, max_waiting: int = MAX_WAITING, body_timeout_s: float = BODY_TIMEOUT_S
) -> Starlette:
    """The application: ``POST /api/v1/batches`` and ``GET /healthz``.

    Errors are JSON: ``{"ok": false, "reason": WORD, "error": WORDS}``. Closing the application (its lifespan)
    waits for the batches that were taken.
    """
    writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ingest")
    waiting = 0

    async def batches(request: Request) -> Response:
        nonlocal waiting
        node = ingest.authorise(request.headers.get("authorization"))
        if waiting >= max_waiting:
            raise ingest.refused(503, "busy", "the server is behind: send this batch again", retry_after_s=1)
        waiting += 1
        try:
            wire = await _body(request, ingest, body_timeout_s)
            reply = await asyncio.get_running_loop().run_in_executor(writer, ingest.accept, node, wire)
        finally:
            waiting -= 1
        return _json(200, {"ok": True, **msgspec.structs.asdict(reply)})

    async def healthz(_: Request) -> Response:
        return _json(200, {"ok": True, "schema": SCHEMA, "waiting": waiting, "counts": ingest.counts.read()})

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(writer.shutdown)

    return Starlette(
        routes=[
            Route("/api/v1/batches", batches, methods=["POST"]),
            Route("/healthz", healthz, methods=["GET"]),
        ],
        exception_handlers={Refusal: _refusal, HTTPException: _http_error, Exception: _fault},
        lifespan=lifespan,
    )


async def _body(request: Request, ingest: Ingest, timeout_s: float) -> bytes:
    """The body, read up to the limit whatever Content-Length says."""
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > MAX_WIRE_BYTES:
                    raise ingest.refused(
                        413, "too_large", f"a batch may have {MAX_WIRE_BYTES} bytes: send less per batch"
                    )
    except TimeoutError as error:
        raise ingest.refused(
            408, "slow", f"the batch did not arrive within {timeout_s:g} s: check the network to the server"
        ) from error
    except ClientDisconnect as error:
        raise ingest.refused(400, "disconnected", "the sender went away while it sent") from error
    return bytes(body)


def _json(status: int, content: dict[str, object], headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


async def _refusal(_: Request, refusal: Exception) -> Response:
    assert isinstance(refusal, Refusal)
    headers = {} if refusal.retry_after_s is None else {"Retry-After": str(refusal.retry_after_s)}
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if refusal.status in (408, 413):
        headers["Connection"] = "close"  # the rest of the body is not read
    return _json(refusal.status, {"ok": False, "reason": refusal.reason, "error": str(refusal)}, headers)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    content: dict[str, object] = {"ok": False, "reason": "http", "error": error.detail}
    return _json(error.status_code, content, dict(error.headers or {}))


async def _fault(_: Request, error: Exception) -> Response:
    words = f"the server failed ({type(error).__name__}): its log has the details"
    return _json(500, {"ok": False, "reason": "fault", "error": words})
