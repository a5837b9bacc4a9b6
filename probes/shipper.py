"""Sends what the spool holds to the server: oldest first, deleted once the server has it.

Called again and again by the agent's loop with a budget of time; never raises for trouble with the network or
the server, but says in :class:`ShipResult` what it is.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import msgspec

from probes.records import SCHEMA, Reply, schema_of
from probes.spool import Spool

PATH = "/api/v1/batches"
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
"""Waits double from the first to the longest while the server is away."""
LONGEST_PATIENCE_S = 10.0
"""A request may take the call's budget, doubled with each failure up to this: a slow server must in the end
be waited for, or the same batch would be sent and given up forever."""
_FOR_GOOD = {400, 409, 413}
"""Answers that the same batch would get again."""
_OTHER_SCHEMA = "other_schema"


@dataclass
class Backoff:
    """When to try next, kept between calls. ``next_try`` is in the clock's seconds."""

    failures: int = 0
    next_try: float = 0.0
    error: str = ""


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
    """What keeps the rest here, in words; empty when nothing does."""
    refused_words: str
    """What the server said of the last batch that it will never take; empty when there was none."""
    wait_s: float
    """Until the next attempt; 0 when there is none to wait for."""


class _Answer(msgspec.Struct):
    ok: bool = False
    reason: str = ""
    error: str = ""


def open_client(server: str, token: str) -> httpx.Client:
    """A client for :func:`ship_pending`. ``server``: for example ``http://sysom:8080``. Close it after use.

    Raises ``ValueError`` for an address that is none.
    """
    try:
        url = httpx.URL(server)
    except httpx.InvalidURL as error:
        raise ValueError(f"the server's address {server!r} cannot be used: {error}") from error
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"the server's address {server!r} must look like http://HOST:PORT")
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/octet-stream"}
    # Proxies of the job's environment are not for the agent.
    return httpx.Client(base_url=url, headers=headers, trust_env=False)


def ship_pending(
    spool: Spool,
    client: httpx.Client,
    backoff: Backoff,
    *,
    budget_s: float = 0.5,
    clock: Callable[[], float] = time.monotonic,
    uniform: Callable[[float, float], float] = random.uniform,
) -> ShipResult:
    """Send pending batches until none is left, ``budget_s`` is over, or one cannot be delivered. Raises
    :class:`probes.spool.SpoolError` when the spool's files cannot be deleted or moved.

    ``backoff`` is one object for all calls. To drain at shutdown pass a fresh one and a larger budget. The
    last request may outlast the budget, by ``LONGEST_PATIENCE_S`` at most.
    """
    end = clock() + budget_s
    stored = duplicates = refused = 0
    refused_words = ""
    if clock() >= backoff.next_try:
        for seq in spool.pending():
            wire = spool.read(seq)
            if wire is None:
                continue
            patience = min(budget_s * 2**backoff.failures, LONGEST_PATIENCE_S)
            try:
                response = client.post(PATH, content=wire, timeout=patience)
            except httpx.HTTPError as error:  # also an answer that cannot be read
                trouble = str(error) or type(error).__name__
                _wait(backoff, f"the server {client.base_url} cannot be reached: {trouble}", clock, uniform)
                break
            if (reply := _reply(response)) is not None:
                spool.remove(seq)
                stored, duplicates = stored + reply.stored, duplicates + (not reply.stored)
            elif (words := _refused_for_good(response, wire)) is not None:
                spool.refuse(seq, words)
                refused, refused_words = refused + 1, words
            else:
                _wait(backoff, _words(response), clock, uniform, _retry_after_s(response))
                break
            backoff.failures, backoff.next_try, backoff.error = 0, 0.0, ""
            if clock() >= end:
                break
    wait_s = max(0.0, backoff.next_try - clock())
    return ShipResult(stored, duplicates, refused, len(spool.pending()), backoff.error, refused_words, wait_s)


def _wait(
    backoff: Backoff,
    words: str,
    clock: Callable[[], float],
    uniform: Callable[[float, float], float],
    at_least_s: float = 0.0,
) -> None:
    # Half fixed, half random: agents of a whole cluster must not come back in one moment.
    wait_s = min(FIRST_WAIT_S * 2.0**backoff.failures, LONGEST_WAIT_S)
    backoff.failures = min(backoff.failures + 1, 16)
    backoff.next_try = clock() + max(at_least_s, wait_s / 2) + uniform(0, wait_s / 2)
    backoff.error = words


def _reply(response: httpx.Response) -> Reply | None:
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


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds that the server asks to wait, an hour at most; the form with a date is not honoured."""
    value = response.headers.get("Retry-After", "")
    return min(float(value), 3600.0) if value.isdecimal() and len(value) < 10 else 0.0
