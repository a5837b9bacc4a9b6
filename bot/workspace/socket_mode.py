"""Socket Mode: connections, envelopes and their acknowledgement.

The protocol is that of docs.slack.dev/apis/events-api/using-socket-mode.
"""

import asyncio
import functools
import secrets
import uuid
from collections.abc import Callable
from typing import Literal

import msgspec
from starlette.websockets import WebSocket

from bot.workspace.clock import Clock
from bot.workspace.delivery import ACKNOWLEDGE_WITHIN, Delivery, Kind, Settled
from bot.workspace.world import Change, Json, World

CONNECTIONS = 10  # how many one app may hold open
TICKET_LIFE = 30.0  # seconds in which a fresh URL must be used
WARNING = 10.0  # seconds from the warning to the end of a connection
TICKETS = 1000  # how many unused addresses are remembered

# `link_disabled`: Socket Mode was switched off; the others Slack does from time to time.
Disconnect = Literal["warning", "refresh_requested", "link_disabled"]


class _Connection:
    """One open WebSocket. What is put into `outgoing` is sent in order; None closes it."""

    def __init__(self) -> None:
        self.outgoing: asyncio.Queue[Json | None] = asyncio.Queue()


class SocketMode:
    """The server's side of Socket Mode for one app."""

    def __init__(self, world: World, clock: Clock, address: Callable[[], str]) -> None:
        self._world = world
        self._clock = clock
        self._address = address
        self._tickets: dict[str, float] = {}
        self._connections: list[_Connection] = []
        self._enabled = True
        self._waiting: dict[str, tuple[asyncio.Future[Delivery], Callable[[], None], Settled]] = {}

    @property
    def connections(self) -> int:
        """How many connections are open now."""
        return len(self._connections)

    @property
    def pending(self) -> int:
        """How many envelopes wait for their acknowledgement now."""
        return len(self._waiting)

    def open_url(self) -> str:
        """A WebSocket address that works once and soon."""
        ticket = secrets.token_urlsafe(24)
        self._tickets[ticket] = self._clock.now() + TICKET_LIFE
        if len(self._tickets) > TICKETS:
            del self._tickets[next(iter(self._tickets))]
        return f"ws://{self._address()}/link/?ticket={ticket}&app_id={self._world.app_id}"

    async def serve(self, socket: WebSocket) -> None:
        """One connection, from the handshake to its end."""
        due = self._tickets.pop(socket.query_params.get("ticket", ""), 0.0)
        if due < self._clock.now():
            await socket.close()  # before accepting: the handshake is answered with 403
            return
        await socket.accept()
        if not self._enabled or len(self._connections) >= CONNECTIONS:
            refusal = "too_many_websockets" if self._enabled else "link_disabled"
            await socket.send_text(msgspec.json.encode(_disconnect(refusal)).decode())
            await socket.close()
            return
        connection = _Connection()
        self._connections.append(connection)
        connection.outgoing.put_nowait(self._hello())
        sender = asyncio.create_task(_send(socket, connection))
        self._world.tell(Change("delivery"))
        try:
            while True:
                message = await socket.receive()
                if message["type"] == "websocket.disconnect":
                    break
                self._acknowledge(message.get("text") or "")
        finally:
            # Whatever the app left unacknowledged runs into its deadline, as in Slack.
            self._close(connection)
            sender.cancel()
            self._world.tell(Change("delivery"))

    def deliver(
        self, kind: Kind, payload: Json, settled: Settled, *, attempt: int, reason: str, copies: int
    ) -> "asyncio.Future[Delivery]":
        """Send an envelope over one connection, each in its turn (see `delivery.Way`)."""
        envelope_id = str(uuid.uuid4())
        result: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        if not self._connections:
            delivery = Delivery(
                envelope_id, acknowledged=False, error="dispatch_failed", reason="connection_failed"
            )
            result.set_result(delivery)
            settled(delivery)
            return result
        timer = self._clock.after(ACKNOWLEDGE_WITHIN, lambda: self._expire(envelope_id))
        self._waiting[envelope_id] = (result, timer, settled)
        envelope: Json = {
            "envelope_id": envelope_id,
            "payload": payload,
            "type": kind,
            "accepts_response_payload": kind == "slash_commands" or payload.get("type") == "view_submission",
        }
        if kind == "events_api":
            envelope |= {"retry_attempt": attempt, "retry_reason": reason}
        for _ in range(copies):
            connection = self._connections.pop(0)
            self._connections.append(connection)
            connection.outgoing.put_nowait(envelope)
        return result

    def disconnect(self, reason: Disconnect) -> None:
        """Tell every connection that it will end in 10 s (`warning`), or end it."""
        for connection in tuple(self._connections):
            connection.outgoing.put_nowait(_disconnect(reason))
            if reason == "warning":
                self._clock.after(WARNING, functools.partial(self._end, connection))
            else:
                self._end(connection)

    def enable(self, enabled: bool) -> None:
        """Switch Socket Mode on or off; off ends the connections there are, and refuses new ones."""
        self._enabled = enabled
        if not enabled:
            self.disconnect("link_disabled")

    def stop(self) -> None:
        """Close all connections, and give up the envelopes that are still out."""
        for connection in tuple(self._connections):
            self._end(connection)
        for envelope_id in tuple(self._waiting):
            self._expire(envelope_id)

    def _hello(self) -> Json:
        return {
            "type": "hello",
            "num_connections": len(self._connections),
            "debug_info": {"host": "workspace", "build_number": 1, "approximate_connection_time": 18060},
            "connection_info": {"app_id": self._world.app_id},
        }

    def _acknowledge(self, text: str) -> None:
        try:
            answer = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError):
            return  # Slack ignores what is not JSON too; the envelope's deadline tells the app
        envelope_id = str(answer.get("envelope_id")) if isinstance(answer, dict) else ""
        if envelope_id in self._waiting:
            payload = answer.get("payload")
            payload = payload if isinstance(payload, dict) and payload else None
            self._settle(Delivery(envelope_id, acknowledged=True, payload=payload))

    def _expire(self, envelope_id: str) -> None:
        self._settle(Delivery(envelope_id, acknowledged=False, error="operation_timeout", reason="timeout"))

    def _settle(self, delivery: Delivery) -> None:
        result, timer, settled = self._waiting.pop(delivery.envelope_id)
        timer()
        if not result.done():  # somebody who stopped waiting has cancelled it
            result.set_result(delivery)
        settled(delivery)
        self._world.tell(Change("delivery"))

    def _end(self, connection: _Connection) -> None:
        connection.outgoing.put_nowait(None)
        self._close(connection)

    def _close(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)


def _disconnect(reason: str) -> Json:
    return {"type": "disconnect", "reason": reason, "debug_info": {"host": "workspace"}}


async def _send(socket: WebSocket, connection: _Connection) -> None:
    while (message := await connection.outgoing.get()) is not None:
        await socket.send_text(msgspec.json.encode(message).decode())
    await socket.close()
