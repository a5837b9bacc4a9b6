"""Sends what the spool holds to the server: oldest first, deleted once the server has it.

Called again and again by the agent's loop with a budget of time; never raises for trouble with the network, the
server or the spool, but says in :class:`ShipResult` what it is.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec

from probes.codec import schema_of
from probes.credentials import Bearer, TokenError, tls_words, trust
from probes.pace import Backoff, Uniform, retry_after_s
from probes.records import SCHEMA, Reply
from probes.spool import Spool, SpoolError

log = logging.getLogger(__name__)

PATH = "/api/v1/batches"
LONGEST_PATIENCE_S = 10.0
"""A request may take the call's budget, doubled with each failure up to this: a slow server must in the end
be waited for, or the same batch would be sent and given up forever."""
_FOR_GOOD = {400, 409, 413}
"""Answers that the same batch would get again."""
_OTHER_SCHEMA = "other_schema"


@dataclass(frozen=True)
class ShipResult:
    """What one call did."""

    stored: int
    duplicates: int
    """Batches that the server had already (its answer to the first sending was lost)."""
    refused: int
    """Batches set aside because the server will never take them."""
    left: int
    """Batches still in the spool."""
    error: str
    """What keeps the rest here, or what is wrong with the spool, in words; empty when nothing does."""
    refused_words: str
    """What the server said of the last batch that it will never take; empty when there was none."""
    wait_s: float
    """Until the next attempt; 0 when there is none to wait for."""


class _Answer(msgspec.Struct):
    ok: bool = False
    reason: str = ""
    error: str = ""


def open_client(server: str, token: str | Callable[[], str], ca: Path | None = None) -> httpx.Client:
    """A client for :func:`ship_pending`. Close it after use.

    ``server``: for example ``https://sysom:8750``. ``token``: this node's, or what gives it
    (:func:`probes.credentials.token_file`), asked again when the server refuses the last one. ``ca``: PEM file that
    the server's certificate is checked with, instead of the system's.

    Raises ``ValueError`` for an address that is none, a token or a ``ca`` that cannot be used.
    """
    try:
        url = httpx.URL(server)
    except httpx.InvalidURL as error:
        raise ValueError(f"the server's address {server!r} cannot be used: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"the server's address {server!r} must look like http://HOST:PORT")
    if ca is not None and url.scheme == "http":
        raise ValueError(
            f"SYSOM_SERVER_CA is set, but {server!r} is not encrypted: make it https://, or unset SYSOM_SERVER_CA"
        )
    return httpx.Client(
        base_url=url,
        headers={"Content-Type": "application/octet-stream"},
        auth=Bearer(token),
        verify=trust(ca) if url.scheme == "https" else True,
        trust_env=False,  # proxies and certificates of the job's environment are not for the agent
    )


def ship_pending(
    spool: Spool,
    client: httpx.Client,
    backoff: Backoff,
    *,
    budget_s: float = 0.5,
    on_reply: Callable[[bytes, Reply], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    uniform: Uniform = random.uniform,
) -> ShipResult:
    """Send pending batches until none is left, ``budget_s`` is over, ``backoff`` lets no more go, or one cannot be
    delivered; then make what waits safe (:meth:`probes.spool.Spool.settle`).

    ``backoff`` is one object for all calls. To drain at shutdown pass a fresh one and a larger budget. The
    last request may outlast the budget, by ``LONGEST_PATIENCE_S`` at most. ``on_reply`` gets each accepted batch as
    it went over the wire, and the server's reply, once the batch is off the spool; what it raises is logged.
    """
    end = clock() + budget_s
    stored = duplicates = refused = 0
    refused_words = trouble = ""
    pending = spool.pending() if (allowed := backoff.allowance(clock())) else []
    for seq in pending:
        try:
            if (wire := spool.read(seq)) is None:
                continue
        except SpoolError as error:
            trouble = str(error)
            break
        answer = _send(client, wire, min(budget_s * 2**backoff.failures, LONGEST_PATIENCE_S))
        if isinstance(answer, str):
            backoff.failed(answer, clock(), uniform)
            break
        reply = receipt(answer)
        words = _refused_for_good(answer, wire) if reply is None else None
        if reply is None and words is None:
            headers = answer.headers
            asked_s = retry_after_s(headers.get("Retry-After", ""), headers.get("Date", ""))
            backoff.failed(_words(answer), clock(), uniform, asked_s)
            break
        backoff.accepted()
        try:
            if reply is not None:
                stored, duplicates = stored + reply.stored, duplicates + (not reply.stored)
                spool.remove(seq)
            else:
                refused, refused_words = refused + 1, words or ""
                spool.refuse(seq, refused_words)
        except SpoolError as error:  # the batch is not sent again: the others must not wait for its file
            trouble = str(error)
        if reply is not None and on_reply is not None:
            _tell(on_reply, wire, reply)
        allowed -= 1
        if not allowed or clock() >= end:
            break
    try:
        spool.settle(clock())
    except SpoolError as error:
        trouble = str(error)
    left = len(spool.pending())
    wait_s = backoff.wait_s(clock()) if left else 0.0
    return ShipResult(stored, duplicates, refused, left, backoff.error or trouble, refused_words, wait_s)


def _send(client: httpx.Client, wire: bytes, patience_s: float) -> httpx.Response | str:
    """The server's answer, or why there is none."""
    try:
        return client.post(PATH, content=wire, timeout=patience_s)
    except httpx.HTTPError as error:  # also an answer that cannot be read
        words = tls_words(error) or str(error) or type(error).__name__
        return f"the server {client.base_url} cannot be reached: {words}"
    except TokenError as error:
        return f"the server {client.base_url} does not accept this agent, and {error}"


def _tell(on_reply: Callable[[bytes, Reply], None], wire: bytes, reply: Reply) -> None:
    try:
        on_reply(wire, reply)
    except Exception:  # whatever it is: the batch is stored, and others wait
        log.exception("what the server replied could not be followed")


def receipt(response: httpx.Response) -> Reply | None:
    """The server's reply; None when it is anything else (a proxy's page with status 200 is no receipt)."""
    if response.status_code != 200:
        return None
    try:
        return msgspec.json.decode(response.content, type=Reply)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _answer(response: httpx.Response) -> _Answer | None:
    try:
        answer = msgspec.json.decode(response.content, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return answer if answer.reason else None


def _refused_for_good(response: httpx.Response, wire: bytes) -> str | None:
    """Why the same batch would be refused again; None when it might be taken later.

    A server of another version may be upgraded, so batches of this agent's version are kept until then; older
    ones, from before the agent's own upgrade, never fit again.

    A 400 that is not in the server's own words comes from something in between, and says nothing about the
    batch. A 413 does, whoever says it.
    """
    if response.status_code not in _FOR_GOOD:
        return None
    answer = _answer(response)
    if answer is not None and answer.reason == _OTHER_SCHEMA and schema_of(wire) >= SCHEMA:
        return None
    if answer is not None:
        return f"{response.status_code} {answer.reason}: {answer.error}"
    return "413: too large for something on the way to the server" if response.status_code == 413 else None


def _words(response: httpx.Response) -> str:
    answer = _answer(response)
    said = f"{answer.error}" if answer else f"answered {response.status_code} {response.reason_phrase}"
    server = f"the server {response.request.url.copy_with(path='/', query=None)}"
    if response.status_code in (401, 403):
        return f"{server} does not accept this agent: {said}"
    if answer is None and response.status_code < 500:
        return f"{server} {said}, and not as a server of sysom does: check the address"
    return f"{server} cannot take batches now: {said}"
