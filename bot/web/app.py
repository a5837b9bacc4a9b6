"""The server's HTTP: agents post batches here; ``/healthz`` and ``/metrics`` say how the server is.

The event loop only moves bytes. Everything that can be refused without reading a body is: who sends, how much,
how often. Decoding and storing happen elsewhere, one batch after the other; when too many wait, agents are told
to come back (they keep what they have).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from bot.intake import Intake, InThread
from bot.web.metrics import CONTENT_TYPE, Metrics
from bot.web.rates import Rate
from bot.web.watching import Watching
from diagnosis.ingest import Ingest, Refusal, authorise
from probes.codec import MAX_WIRE_BYTES
from probes.records import SCHEMA

log = logging.getLogger(__name__)

BODY_TIMEOUT_S = 30.0
"""A body that takes longer is given up: 4 MiB at 1.1 Mbit/s."""
MAX_WAITING = 32
"""Batches taken at a time, being read, waiting or written: with 4 MiB each at most 128 MiB."""
MAX_OF_NODE = 4
"""Of these, one node's; an agent sends one after the other, and again what it gave up."""
NODE_BATCHES_PER_S, NODE_BATCHES_BURST = 100, 400
"""One node's. An agent sends one a second; what 256 MB of its disk hold (26,000 batches of 10 kB, 16 ranks) is
taken in under five minutes."""
NODE_BYTES_PER_S, NODE_BYTES_BURST = 8 << 20, 32 << 20
"""One node's: those 256 MB in half a minute, were they large batches."""
STRANGERS_PER_S, STRANGERS_BURST = 1, 60
"""Requests of one address that no token came with, or an unknown one."""


def create_app(
    ingest: Ingest | Intake,
    *,
    metrics: Metrics | None = None,
    routes: Sequence[Route] = (),
    refreshed: Sequence[Callable[[], str]] = (),
    max_waiting: int = MAX_WAITING,
    body_timeout_s: float = BODY_TIMEOUT_S,
    node_batches: Rate | None = None,
    node_bytes: Rate | None = None,
    strangers: Rate | None = None,
) -> Starlette:
    """The application: ``POST /api/v1/batches``, ``GET /healthz``, ``GET /metrics``, and ``routes``.

    Errors are JSON: ``{"ok": false, "reason": WORD, "error": WORDS}``. Closing the application (its lifespan)
    waits for the batches that were taken. ``refreshed``: asked each second; what it says is a warning.
    """
    intake = InThread(ingest) if isinstance(ingest, Ingest) else ingest
    metrics = metrics or Metrics()
    node_batches = node_batches or Rate(NODE_BATCHES_PER_S, NODE_BATCHES_BURST)
    node_bytes = node_bytes or Rate(NODE_BYTES_PER_S, NODE_BYTES_BURST)
    strangers = strangers or Rate(STRANGERS_PER_S, STRANGERS_BURST)
    watching = Watching(intake, metrics, refreshed)
    metrics.problems = lambda: len(watching.problems())
    metrics.warnings = lambda: len(watching.warnings())
    waiting: Counter[str] = Counter()

    async def batches(request: Request) -> Response:
        node = await _sender(request, intake, strangers)
        size = _stated_size(request)
        wait = max(node_batches.wait_s(node), node_bytes.wait_s(node))
        if wait > 0:
            raise Refusal(
                429,
                "rate",
                f"more comes from node {node!r} than is taken of one node ({NODE_BATCHES_PER_S} batches and "
                f"{NODE_BYTES_PER_S >> 20} MiB a second): send this batch again later",
                math.ceil(wait),
            )
        if waiting.total() >= max_waiting or waiting[node] >= MAX_OF_NODE:
            raise Refusal(503, "busy", "the server is behind: send this batch again", retry_after_s=1)
        node_batches.take(node)
        node_bytes.take(node, size or 0)
        waiting[node] += 1
        metrics.waiting.inc()
        try:
            wire = await _body(request, body_timeout_s)
            if size is None:
                node_bytes.take(node, len(wire))
            # What was read is stored, though the server stops or the sender goes meanwhile.
            taken = await asyncio.shield(intake.take(node, wire))
        finally:
            metrics.waiting.dec()
            waiting[node] -= 1
            if not waiting[node]:
                del waiting[node]
        metrics.counts.add("stored" if taken.reply.stored else "duplicate")
        if taken.clock_jumped:
            metrics.counts.add("clock_jumped")
        metrics.taken(node, len(wire), taken.lag_s if taken.reply.stored else None)
        return _json(200, {"ok": True, **msgspec.structs.asdict(taken.reply)})

    async def healthz(_: Request) -> Response:
        problems, warnings = watching.problems(), watching.warnings()
        content = {
            "ok": not problems,
            "problems": problems,
            "warnings": warnings,
            "schema": SCHEMA,
            "nodes": intake.tokens.nodes,
            "waiting": waiting.total(),
            "counts": metrics.counts.read(),
        }
        return _json(503 if problems else 200, content)

    async def numbers(_: Request) -> Response:
        return Response(metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def refusal(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        metrics.counts.add(f"refused_{error.reason}")
        if error.reason == "store":
            watching.failed(str(error))
        headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
        if error.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if error.status == 408:
            headers["Connection"] = "close"  # the rest of the body is not waited for
        return _json(error.status, {"ok": False, "reason": error.reason, "error": str(error)}, headers)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with watching.running():
            yield
        await intake.close()

    return Starlette(
        routes=[
            Route("/api/v1/batches", batches, methods=["POST"]),
            Route("/healthz", healthz, methods=["GET"]),
            Route("/metrics", numbers, methods=["GET"]),
            *routes,
        ],
        exception_handlers={Refusal: refusal, HTTPException: _http_error, Exception: _fault},
        lifespan=lifespan,
    )


async def _sender(request: Request, intake: Intake, strangers: Rate) -> str:
    """The node that sends. Strangers are heard a limited number of times, so that guessing is slow."""
    header = request.headers.get("authorization")
    try:
        return authorise(intake.tokens, header)
    except Refusal as refusal:
        if intake.tokens.stale():  # perhaps the token was given just now
            await asyncio.to_thread(intake.tokens.refresh)
            return authorise(intake.tokens, header)
        address = request.client.host if request.client else ""
        wait = strangers.wait_s(address)
        if wait > 0:
            raise Refusal(
                429,
                "strangers",
                f"too many requests without a known token; the last: {refusal}",
                math.ceil(wait),
            ) from None
        strangers.take(address)
        raise


def _stated_size(request: Request) -> int | None:
    """What Content-Length says, within the limit; None where it is not said."""
    stated = request.headers.get("content-length", "")
    if not stated.isdecimal():
        return None
    if len(stated) > 12 or int(stated) > MAX_WIRE_BYTES:
        raise _too_large()
    return int(stated)


def _too_large() -> Refusal:
    return Refusal(413, "too_large", f"a batch may have {MAX_WIRE_BYTES} bytes: send less per batch")


async def _body(request: Request, timeout_s: float) -> bytes:
    """The body, read up to the limit whatever Content-Length says."""
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > MAX_WIRE_BYTES:
                    raise _too_large()
    except TimeoutError as error:
        raise Refusal(
            408, "slow", f"the batch did not arrive within {timeout_s:g} s: check the network to the server"
        ) from error
    except ClientDisconnect as error:
        raise Refusal(400, "disconnected", "the sender went away while it sent") from error
    return bytes(body)


def _json(status: int, content: dict[str, object], headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, "application/json")


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    content: dict[str, object] = {"ok": False, "reason": "http", "error": error.detail}
    return _json(error.status_code, content, dict(error.headers or {}))


async def _fault(_: Request, error: Exception) -> Response:
    words = f"the server failed ({type(error).__name__}): its log has the details"
    return _json(500, {"ok": False, "reason": "fault", "error": words})
