"""Socket Mode: connections, envelopes and their acknowledgement.

The protocol is that of docs.slack.dev/apis/events-api/using-socket-mode.
"""

import asyncio
import secrets
import uuid
from collections.abc import Callable
from typing import Any, Literal

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from bot.workspace.clock import Clock
from bot.workspace.world import Change, Json, World

ACKNOWLEDGE_WITHIN = 3.0  # seconds, for every envelope
CONNECTIONS = 10  # how many one app may hold open
TICKET_LIFE = 30.0  # seconds in which a fresh URL must be used
# Seconds before the first, second and third delivery of an event that nobody acknowledged.
RETRIES = (0.0, 60.0, 300.0)

Disconnect = Literal["warning", "refresh_requested"]


class Delivery(msgspec.Struct, frozen=True):
    """How an envelope fared: acknowledged, with the answer's payload if it had one; or why it was not."""

    envelope_id: str
    acknowledged: bool
    payload: Json | None = None
    error: Literal["", "operation_timeout", "dispatch_failed"] = ""


Settled = Callable[[Delivery], None]


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
        self._stopped = False
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
        return f"ws://{self._address()}/link/?ticket={ticket}&app_id={self._world.app_id}"

    async def serve(self, socket: WebSocket) -> None:
        """One connection, from the handshake to its end."""
        due = self._tickets.pop(socket.query_params.get("ticket", ""), 0.0)
        if due < self._clock.now() or len(self._connections) >= CONNECTIONS:
            await socket.close()  # before accepting: the handshake is answered with 403
            return
        await socket.accept()
        connection = _Connection()
        self._connections.append(connection)
        connection.outgoing.put_nowait(self._hello())
        sender = asyncio.create_task(_send(socket, connection))
        self._world.tell(Change("delivery"))
        try:
            while True:
                self._acknowledge(await socket.receive_text())
        except WebSocketDisconnect:
            pass  # the app went away; its unacknowledged envelopes run into their deadline, as in Slack
        finally:
            self._close(connection)
            sender.cancel()
            self._world.tell(Change("delivery"))

    def deliver(
        self, kind: str, payload: Json, settled: Settled = lambda delivery: None, **more: Any
    ) -> "asyncio.Future[Delivery]":
        """Send an envelope over one connection, each in its turn; the result is there after at most 3 s.

        `settled` is called at the very moment that decides it, the future's waiters shortly after.
        """
        envelope_id = str(uuid.uuid4())
        result: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        if not self._connections:
            delivery = Delivery(envelope_id, acknowledged=False, error="dispatch_failed")
            result.set_result(delivery)
            settled(delivery)
            return result
        timer = self._clock.after(ACKNOWLEDGE_WITHIN, lambda: self._expire(envelope_id))
        self._waiting[envelope_id] = (result, timer, settled)
        connection = self._connections.pop(0)
        self._connections.append(connection)
        connection.outgoing.put_nowait({"envelope_id": envelope_id, "payload": payload, "type": kind, **more})
        return result

    def deliver_event(self, payload: Json, attempt: int = 0, reason: str = "") -> None:
        """Send an event, and again up to three times while nobody acknowledges it."""

        def again(delivery: Delivery) -> None:
            if self._stopped or delivery.acknowledged or attempt == len(RETRIES):
                return
            why = "timeout" if delivery.error == "operation_timeout" else "connection_failed"
            self._clock.after(RETRIES[attempt], lambda: self.deliver_event(payload, attempt + 1, why))

        self.deliver(
            "events_api",
            payload,
            again,
            accepts_response_payload=False,
            retry_attempt=attempt,
            retry_reason=reason,
        )

    def disconnect(self, reason: Disconnect) -> None:
        """Tell every connection that it will end (`warning`), or end it (`refresh_requested`)."""
        for connection in tuple(self._connections):
            message = {"type": "disconnect", "reason": reason, "debug_info": {"host": "workspace"}}
            connection.outgoing.put_nowait(message)
            if reason == "refresh_requested":
                connection.outgoing.put_nowait(None)
                self._close(connection)

    def stop(self) -> None:
        """Close all connections, and give up the envelopes that are still out."""
        self._stopped = True
        for connection in tuple(self._connections):
            connection.outgoing.put_nowait(None)
            self._close(connection)
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
        self._settle(Delivery(envelope_id, acknowledged=False, error="operation_timeout"))

    def _settle(self, delivery: Delivery) -> None:
        result, timer, settled = self._waiting.pop(delivery.envelope_id)
        timer()
        if not result.done():  # somebody who stopped waiting has cancelled it
            result.set_result(delivery)
        settled(delivery)
        self._world.tell(Change("delivery"))

    def _close(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)


async def _send(socket: WebSocket, connection: _Connection) -> None:
    while (message := await connection.outgoing.get()) is not None:
        await socket.send_text(msgspec.json.encode(message).decode())
    await socket.close()
