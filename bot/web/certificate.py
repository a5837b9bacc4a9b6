"""The server's certificate: checked before it is used, and renewed without a restart."""

from __future__ import annotations

import logging
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

log = logging.getLogger(__name__)

SOON = timedelta(days=10)
"""What renews certificates by itself does so 30 days before their end: this late, something has gone wrong."""


class CertificateError(ValueError):
    """A certificate that cannot be used; the message says which file, why, and what to do."""


class Certificate:
    """A certificate chain and its private key, from two PEM files. Raises :class:`CertificateError`."""

    def __init__(self, chain: Path, key: Path) -> None:
        self._chain = chain
        self._key = key
        self._tried = self._version()
        self.context = _context(chain, key)
        """For a server; connections that begin after :meth:`refresh` get the new certificate."""
        self.problem = ""
        """Why the newest files are not in use; empty when they are."""
        self._ends = _end(chain)

    def stale(self) -> bool:
        """Whether the files are others than those that were read last."""
        return self._version() != self._tried

    def refresh(self) -> None:
        """Take the files as they are now, if they can be used; if not, that is logged and the old stay."""
        self._tried = self._version()
        try:
            # First elsewhere: a pair that does not fit would spoil the one in use.
            _context(self._chain, self._key)
            ends = _end(self._chain)
            self.context.load_cert_chain(self._chain, self._key)
        except (CertificateError, OSError) as error:
            self.problem = f"{error}; the certificate read before stays in use"
            log.error("%s", self.problem)
        else:
            self.problem = ""
            self._ends = ends
            log.warning("the certificate %s was read again", self._chain)

    def warning(self, now: datetime | None = None) -> str:
        """That the one in use has expired or soon will; empty when it is good for longer. ``now``: UTC."""
        now = now or datetime.now(UTC)
        if self._ends - now > SOON:
            return ""
        state = "expires" if self._ends > now else "has expired"
        return (
            f"the certificate {self._chain} {state} at {self._ends:%Y-%m-%d %H:%M} UTC: renew it; agents send "
            "nothing to a server whose certificate has expired"
        )

    def _version(self) -> tuple[tuple[int, ...], ...]:
        return tuple(_version(path) for path in (self._chain, self._key))


def _context(chain: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for name, path in (("SYSOM_TLS_CERT", chain), ("SYSOM_TLS_KEY", key)):
        try:
            path.open("rb").close()
        except OSError as error:
            raise CertificateError(f"{name}: {path} cannot be read: {error.strerror}") from error
    try:
        # Without a password one would be asked for at the terminal.
        context.load_cert_chain(chain, key, password=_no_password)
    except _EncryptedError as error:
        raise CertificateError(
            f"SYSOM_TLS_KEY: {key} is encrypted: give a key without a password that only this user can read"
        ) from error
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            what = (
                "is not the key of the certificate in SYSOM_TLS_CERT: give the two that were issued together"
            )
        else:
            what = (
                f"and {chain} are not a certificate and its key as PEM files ({error.reason or 'no PEM block'}): "
                "the first holds the certificate and those above it, the second the private key"
            )
        raise CertificateError(f"SYSOM_TLS_KEY: {key} {what}") from error
    return context


def _end(chain: Path) -> datetime:
    """UTC; of the server's own certificate, which is the first of its chain."""
    try:
        return x509.load_pem_x509_certificates(chain.read_bytes())[0].not_valid_after_utc
    except (OSError, ValueError) as error:
        raise CertificateError(f"SYSOM_TLS_CERT: {chain} cannot be read: {error}") from error


class _EncryptedError(ValueError):
    pass


def _no_password() -> str:
    raise _EncryptedError


def _version(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
