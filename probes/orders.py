"""What the server asks of this agent: believed only when it is signed and meant for the batch just sent."""

from __future__ import annotations

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from probes.records import MAX_COMMANDS, ORDERS_CONTEXT, Batch, Command, Orders, Reply

KEY_BYTES = 32
MAX_ID = 128
"""Longest id of a command, in characters."""


class OrdersRefused(ValueError):
    """Orders that this agent does not follow; the message says why and what to do."""


def public_key(text: str) -> Ed25519PublicKey:
    """The server's key from its 64 hexadecimal digits (``SYSOM_COMMAND_KEY``). Raises ``ValueError``."""
    try:
        raw = bytes.fromhex(text.strip())
        if len(raw) != KEY_BYTES:
            raise ValueError
        return Ed25519PublicKey.from_public_bytes(raw)
    except ValueError as error:
        raise ValueError(
            "SYSOM_COMMAND_KEY must be the 64 hexadecimal digits that `sysom key` prints on the server"
        ) from error


def commands(reply: Reply, sent: Batch, key: Ed25519PublicKey | None) -> list[Command]:
    """The commands of a reply to ``sent``; empty when there are none.

    Raises :class:`OrdersRefused`: no ``key`` to check them with, a signature that does not fit, orders for
    another batch, anything that is not on the fixed list, an id that its outcome could not be told with.
    """
    if not reply.orders:
        return []
    if key is None:
        raise OrdersRefused(
            "the server sends commands, and this agent has no key to check them with: set SYSOM_COMMAND_KEY to "
            "what `sysom key` prints on the server"
        )
    try:
        key.verify(bytes.fromhex(reply.signature), ORDERS_CONTEXT + reply.orders.encode())
    except (InvalidSignature, ValueError) as error:
        raise OrdersRefused(
            "commands whose signature does not fit SYSOM_COMMAND_KEY: none is followed. If the server has a new "
            "key, set SYSOM_COMMAND_KEY to what `sysom key` prints there"
        ) from error
    try:
        orders = msgspec.json.decode(reply.orders, type=Orders)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise OrdersRefused(
            f"signed orders that this version does not know ({error}): upgrade the agent, or the server"
        ) from error
    if (orders.node, orders.boot_id, orders.agent, orders.seq) != (
        sent.node,
        sent.boot_id,
        sent.agent,
        sent.seq,
    ):
        raise OrdersRefused(f"signed orders for batch {orders.seq} of node {orders.node!r}: not this agent's")
    if len(orders.commands) > MAX_COMMANDS:
        raise OrdersRefused(f"{len(orders.commands)} commands at once; {MAX_COMMANDS} are the most")
    for command in orders.commands:
        if not 0 < len(command.id) <= MAX_ID or not all("!" <= character <= "~" for character in command.id):
            raise OrdersRefused(
                f"a command whose id is not 1 to {MAX_ID} letters, digits and signs: none is followed"
            )
    return orders.commands
