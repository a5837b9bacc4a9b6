"""Signing what agents are asked to do. The private key stays on the server, in one file of its state folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from probes.records import MAX_COMMANDS, ORDERS_CONTEXT, Batch, Command, Orders, Reply


class SigningError(RuntimeError):
    """The signing key cannot be used; the message says why and what to do."""


class Signer:
    """Signs orders with an Ed25519 key."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @property
    def public(self) -> str:
        """What agents check with (``SYSOM_COMMAND_KEY``): 64 hexadecimal digits."""
        return self._key.public_key().public_bytes_raw().hex()

    def reply(self, batch: Batch, *, stored: bool, commands: Sequence[Command] = ()) -> Reply:
        """The reply to ``batch`` that carries the first ``MAX_COMMANDS`` of ``commands``."""
        if not commands:
            return Reply(stored=stored)
        orders = Orders(
            node=batch.node,
            boot_id=batch.boot_id,
            agent=batch.agent,
            seq=batch.seq,
            commands=list(commands[:MAX_COMMANDS]),
        )
        text = msgspec.json.encode(orders).decode()
        return Reply(
            stored=stored, orders=text, signature=self._key.sign(ORDERS_CONTEXT + text.encode()).hex()
        )


def signer(path: Path) -> Signer:
    """The signer whose key is in ``path``, made (mode 0600) when it is not there. Raises :class:`SigningError`."""
    try:
        if not path.exists():
            _make(path)
        raw = bytes.fromhex(path.read_text().strip())
        return Signer(Ed25519PrivateKey.from_private_bytes(raw))
    except OSError as error:
        raise SigningError(f"the key for commands {path} cannot be used: {error}") from error
    except ValueError as error:
        raise SigningError(
            f"{path} does not hold a key (64 hexadecimal digits): restore it, or delete it, and give agents the "
            "new one (`sysom key`)"
        ) from error


def _make(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    with open(beside, "w", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, 0o600)) as file:
        file.write(Ed25519PrivateKey.generate().private_bytes_raw().hex() + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(beside, path)  # never over a key that another process made meanwhile
    except FileExistsError:
        pass
    finally:
        beside.unlink()
