"""Which node a token belongs to. A node may have several at a time, so that one can be replaced without a gap.

Tokens come from the settings, which stay as they are, and from a TOML file of ``node = "token"`` or
``node = ["new", "old"]``, which is read again when it changed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import threading
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

log = logging.getLogger(__name__)

Given = Mapping[str, str | Sequence[str]]
"""Node → its token, or its tokens."""
MAX_FILE_BYTES = 16 << 20
"""100,000 nodes with two tokens each are about 12 MB."""
_Version = tuple[int, ...]


class TokensError(ValueError):
    """Tokens that do not tell nodes apart; the message names the nodes and no token."""


class Tokens:
    """Looks nodes up by their tokens. Safe from several threads.

    Raises :class:`TokensError` for an empty token, one that two nodes share, and a ``file`` that cannot be used.
    A later version of the file that cannot be used changes nothing; ``problem`` says so.
    """

    def __init__(self, given: Given, file: Path | None = None) -> None:
        self._given = given
        self._file = file
        self._lock = threading.Lock()
        self._tried: _Version = ()
        self._owners: dict[bytes, str] = {}
        self.problem = ""
        """What is wrong with the newest version of the file; empty when it is in use."""
        self.warning = ""
        """What is not as it should be with the file that is in use."""
        if file is None:
            self._owners = _owners(given)
        else:
            self._read(file)

    @property
    def nodes(self) -> int:
        """How many nodes have a token."""
        return len(set(self._owners.values()))

    def node_of(self, token: str) -> str | None:
        """The node that a token belongs to.

        What is looked up is a digest: how long that takes tells nothing about a token, because whoever guesses
        cannot steer the digests, and the time does not grow with the number of nodes.
        """
        return self._owners.get(_digest(token))

    def stale(self) -> bool:
        """Whether the file is another one than that which was read last. One call of the system."""
        if self._file is None:
            return False
        try:
            return _version(self._file.stat()) != self._tried
        except OSError:
            return self._tried != ()

    def refresh(self) -> None:
        """Read the file again. Blocks; never raises: what cannot be used is said and logged, the old stay."""
        if self._file is None:
            return
        try:
            self._read(self._file)
        except TokensError as error:
            words = f"{error}; the tokens read before stay in use"
            if words != self.problem:
                log.error("%s", words)
            self.problem = words

    def _read(self, file: Path) -> None:
        with self._lock:
            self._tried = ()
            try:
                with file.open("rb") as open_file:
                    before = os.fstat(open_file.fileno())
                    self._tried = _version(before)
                    raw = open_file.read(MAX_FILE_BYTES + 1)
                    if _version(os.fstat(open_file.fileno())) != _version(before):
                        self._tried = (-1,)  # somebody writes to it: look again
            except OSError as error:
                raise TokensError(f"the file of tokens {file} cannot be read: {error.strerror}") from error
            from_file = _parsed(file, raw)
            both = {
                node: [*_several(self._given.get(node, ())), *from_file.get(node, [])]
                for node in {**self._given, **from_file}
            }
            self._owners = _owners(both)
            self.problem = ""
            self._warn_of(file, before)

    def _warn_of(self, file: Path, status: os.stat_result) -> None:
        warning = ""
        if status.st_mode & stat.S_IROTH:
            warning = f"everybody on this machine can read the file of tokens {file}: chmod o= {file}"
        if warning and warning != self.warning:
            log.warning("%s", warning)
        self.warning = warning


def _parsed(file: Path, raw: bytes) -> dict[str, list[str]]:
    if len(raw) > MAX_FILE_BYTES:
        raise TokensError(
            f"the file of tokens {file} has more than {MAX_FILE_BYTES} bytes: is it the right one?"
        )
    try:
        found = tomllib.loads(raw.decode())
    except RecursionError:
        raise TokensError(f"the file of tokens {file} is nested too deeply: is it the right one?") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        where = str(error) if isinstance(error, tomllib.TOMLDecodeError) else "it is not UTF-8"
        raise TokensError(f"the file of tokens {file} is not TOML: {where}") from None
    if not found:  # as it is for a moment while it is written anew
        raise TokensError(f'the file of tokens {file} names no node: write node = "token", one a line')
    tokens = {}
    for node, value in found.items():
        several = [value] if isinstance(value, str) else value
        if not isinstance(several, list) or not all(isinstance(one, str) for one in several):
            raise TokensError(
                f'the file of tokens {file}: node {node!r} must have "token" or ["new", "old"]'
                + ("; a name with dots stands in quotes" if isinstance(value, dict) else "")
            )
        tokens[node] = [
            checked(one, f"the file of tokens {file}: a token of node {node!r}") for one in several
        ]
    return tokens


def checked(token: str, what: str) -> str:
    """The token without the white space around it that a file or a secret brings along.

    Raises :class:`TokensError` for one with characters that no token has; never shows it.
    """
    token = token.strip()
    if not all("!" <= character <= "~" for character in token):
        raise TokensError(
            f"{what} holds a character that no token has (a space, a control character, or one beyond ASCII): "
            "copy it again"
        )
    return token


def _owners(tokens: Given) -> dict[bytes, str]:
    owners: dict[bytes, str] = {}
    for node, value in tokens.items():
        for token in _several(value):
            if not token:
                raise TokensError(f"a token of node {node!r} is empty: give it one, or leave the node out")
            owner = owners.setdefault(_digest(token), node)
            if owner != node:
                raise TokensError(f"nodes {owner!r} and {node!r} share a token: give each its own")
    return owners


def _several(value: str | Sequence[str]) -> Sequence[str]:
    return [value] if isinstance(value, str) else value


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _version(status: os.stat_result) -> _Version:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
