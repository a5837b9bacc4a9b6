"""What an agent shows the server, and what it asks of it: a token that can be rotated, certificates to believe."""

from __future__ import annotations

import logging
import ssl
import stat
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

import httpx

log = logging.getLogger(__name__)

MAX_TOKEN_BYTES = 4096
_NOT_YET_VALID, _EXPIRED, _WRONG_NAMES = 9, 10, {62, 64}  # X509_V_ERR_… of OpenSSL's x509_vfy.h


class TokenError(ValueError):
    """A token that cannot be used; the message says why and what to do, and never holds the token."""


def token_file(path: Path) -> Callable[[], str]:
    """Reads this node's token from a file, each time anew: for :func:`probes.shipper.open_client`. A file that all
    users of the node can read is used, with one warning. What it gives raises :class:`TokenError`."""
    warned = False

    def read() -> str:
        nonlocal warned
        try:
            with path.open("rb") as file:
                mode = path.stat().st_mode
                content = file.read(MAX_TOKEN_BYTES + 1)
        except OSError as error:
            raise TokenError(
                f"the token file {path} (SYSOM_NODE_TOKEN_FILE) cannot be read: {error.strerror}"
            ) from error
        if mode & stat.S_IROTH and not warned:
            warned = True
            log.warning(
                "all users of this node can read the token in %s (SYSOM_NODE_TOKEN_FILE): chmod 600 it", path
            )
        return _checked(content.decode("latin-1"), f"the token file {path} (SYSOM_NODE_TOKEN_FILE)")

    return read


def _checked(text: str, where: str) -> str:
    token = text.strip()
    if not token:
        raise TokenError(f"{where} is empty: put the token in it that the server has for this node")
    if len(token) > MAX_TOKEN_BYTES or not all("!" <= character <= "~" for character in token):
        raise TokenError(
            f"{where} holds more than a token (spaces, several lines, or characters beyond ASCII): it must hold "
            "the token alone"
        )
    return token


class Bearer(httpx.Auth):
    """The token on every request. A server that refuses it has perhaps a new one: the token is asked for again,
    and the same request sent with it, at once. Raises :class:`TokenError` when it is made, and from requests."""

    def __init__(self, token: str | Callable[[], str]) -> None:
        self._read = token if callable(token) else partial(_checked, token, "SYSOM_NODE_TOKEN")
        self._token: str = self._read()

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["Authorization"] = f"Bearer {self._token}"
        response = yield request
        if response.status_code in (401, 403) and (fresh := self._read()) != self._token:
            self._token = fresh
            request.headers["Authorization"] = f"Bearer {fresh}"
            yield request


def trust(ca: Path | None) -> ssl.SSLContext:
    """Believe certificates signed by those in ``ca`` (PEM), else by the system's. Raises ``ValueError``."""
    try:
        return ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        raise ValueError(
            f"{ca} (SYSOM_SERVER_CA) holds no certificate that can be read: it must be PEM, "
            "-----BEGIN CERTIFICATE-----"
        ) from error
    except OSError as error:
        raise ValueError(f"{ca} (SYSOM_SERVER_CA) cannot be read: {error.strerror}") from error


def tls_words(error: BaseException) -> str:
    """What is wrong between two TLS ends and what to do; empty when this is another error."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, ssl.SSLError):
        found = found.__cause__ or found.__context__
    if isinstance(found, ssl.SSLCertVerificationError):
        if found.verify_code in _WRONG_NAMES:
            return f"its certificate is for another name ({found.verify_message}): correct SYSOM_SERVER"
        if found.verify_code in (_NOT_YET_VALID, _EXPIRED):
            return f"its certificate is not valid now ({found.verify_message}): renew it, or set this node's clock"
        return (
            f"its certificate is not signed by anyone known here ({found.verify_message}): set SYSOM_SERVER_CA to "
            "the PEM file of the authority that signed it"
        )
    if found is not None:
        return f"it does not speak TLS as expected ({found}): is it https, and the right port?"
    return ""
