"""Tokens that rotate, and certificates: with the real server, over TLS."""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from bot.web.app import create_app
from diagnosis.ingest import Ingest
from diagnosis.store.sqlite import SqliteStore
from probes.credentials import TokenError, token_file
from probes.pace import Backoff
from probes.shipper import ShipResult, open_client, ship_pending
from probes.spool import Spool
from tests.bot.web.live import serving
from tests.probes.batches import a_batch

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(tmp_path / "sysom.db")
    yield store
    store.close()


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    spool = Spool(tmp_path / "spool")
    for _ in range(2):
        spool.put(a_batch(spool.next_seq, agent=spool.agent))
    yield spool
    spool.close()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("old\n")
    return path


def server(store: SqliteStore, token: str) -> Ingest:
    return Ingest(store, {"node-a": token})


def ship(spool: Spool, client: httpx.Client) -> ShipResult:
    return ship_pending(spool, client, Backoff(), budget_s=20.0)


def test_a_token_that_was_rotated_is_read_when_the_server_refuses_the_old_one(
    store: SqliteStore, spool: Spool, token: Path
) -> None:
    with (
        serving(create_app(server(store, "new"))) as address,
        open_client(address, token_file(token)) as client,
    ):
        token.write_text("new\n")
        result = ship(spool, client)
    assert (result.stored, result.duplicates, result.left, result.error) == (2, 0, 0, "")


def test_until_the_file_holds_the_new_token_batches_wait(
    store: SqliteStore, spool: Spool, token: Path
) -> None:
    with (
        serving(create_app(server(store, "new"))) as address,
        open_client(address, token_file(token)) as client,
    ):
        refused = ship(spool, client)
        assert refused.left == 2
        assert "does not accept this agent: this token is not known" in refused.error
        token.unlink()
        gone = ship(spool, client)
        assert gone.left == 2
        assert gone.error.endswith(
            f"does not accept this agent, and the token file {token} (SYSOM_NODE_TOKEN_FILE) cannot be read: "
            "No such file or directory"
        )
        token.write_text("new")
        assert ship(spool, client).stored == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty: put the token in it"),
        (b" \n", "is empty: put the token in it"),
        (b"one\ntwo\n", "must hold the token alone"),
        ("tökén".encode(), "must hold the token alone"),
        (b"x" * 5000, "must hold the token alone"),
    ],
)
def test_a_file_that_holds_no_token_is_refused_at_once_and_not_shown(
    token: Path, content: bytes, words: str
) -> None:
    token.write_bytes(content)
    with pytest.raises(TokenError, match=words) as refused:
        open_client("http://server", token_file(token))
    assert "two" not in str(refused.value)


@pytest.mark.parametrize(("name", "words"), [("missing", "No such file"), (".", "Is a directory")])
def test_a_token_file_that_cannot_be_read_is_said(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"\(SYSOM_NODE_TOKEN_FILE\) cannot be read: {words}"):
        open_client("http://server", token_file(tmp_path / name))


def test_a_token_that_all_users_can_read_is_used_with_one_warning(
    token: Path, caplog: pytest.LogCaptureFixture
) -> None:
    token.chmod(0o644)
    read = token_file(token)
    assert (read(), read()) == ("old", "old")
    assert caplog.text.count("all users of this node can read the token") == 1
    assert "chmod 600" in caplog.text
    caplog.clear()
    token.chmod(0o600)
    assert token_file(token)() == "old"
    assert caplog.text == ""


class Authority:
    """Signs certificates, as an organisation's own authority would."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"authority of {folder.name}")])
        builder = self._builder(self._name, self._key, NOW + DAY)
        own = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.pem = folder / "ca.pem"
        folder.mkdir()
        self.pem.write_bytes(own.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, until: datetime.datetime
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - 2 * DAY)
            .not_valid_after(until)
        )

    def sign(self, address: str, until: datetime.datetime = NOW + DAY) -> Path:
        """A PEM file with a key and its certificate for an IP address."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
        builder = self._builder(x509.Name([]), key, until).add_extension(names, critical=True)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        path = self._folder / "server.pem"
        certificate = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        path.write_bytes(private + certificate)
        return path


@contextmanager
def serving_tls(ingest: Ingest, pem: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The real server with uvicorn's own TLS."""
    plain = uvicorn.Config

    def config(*args: object, **options: object) -> uvicorn.Config:
        return plain(*args, **options, ssl_certfile=str(pem))  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(uvicorn, "Config", config)
        with serving(create_app(ingest)) as address:
            yield address.replace("http://", "https://")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


def test_a_server_of_our_own_authority_is_believed(
    store: SqliteStore, spool: Spool, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    pem = authority.sign("127.0.0.1")
    with (
        serving_tls(server(store, "t"), pem, monkeypatch) as address,
        open_client(address, "t", authority.pem) as client,
    ):
        assert ship(spool, client).stored == 2


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other authority", "not signed by anyone known here .* set SYSOM_SERVER_CA"),
        ("system's authorities", "not signed by anyone known here .* set SYSOM_SERVER_CA"),
        ("other name", "its certificate is for another name .* correct SYSOM_SERVER"),
        ("expired", "its certificate is not valid now .*: renew it, or set this node's clock"),
    ],
)
def test_a_certificate_that_is_not_to_be_believed_is_said_and_nothing_is_sent(
    store: SqliteStore,
    spool: Spool,
    authority: Authority,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    words: str,
) -> None:
    address = "127.0.0.2" if case == "other name" else "127.0.0.1"
    pem = authority.sign(address, NOW - DAY if case == "expired" else NOW + DAY)
    ca = {"other authority": Authority(tmp_path / "theirs").pem, "system's authorities": None}.get(
        case, authority.pem
    )
    with (
        serving_tls(server(store, "t"), pem, monkeypatch) as url,
        open_client(url, "t", ca) as client,
    ):
        result = ship(spool, client)
    assert (result.left, store.jobs()) == (2, [])
    assert re.search(rf"the server {url}/? cannot be reached: .*{words}", result.error), result.error


def test_a_server_that_does_not_speak_tls_is_said(store: SqliteStore, spool: Spool) -> None:
    with (
        serving(create_app(server(store, "t"))) as address,
        open_client(address.replace("http", "https"), "t") as client,
    ):
        result = ship(spool, client)
    assert "it does not speak TLS as expected" in result.error
    assert "is it https, and the right port?" in result.error


def test_certificates_that_cannot_be_used_are_said_at_once(tmp_path: Path) -> None:
    ca = tmp_path / "ca.pem"
    with pytest.raises(ValueError, match=r"ca.pem \(SYSOM_SERVER_CA\) cannot be read: No such file"):
        open_client("https://server", "t", ca)
    ca.write_text("no certificate")
    with pytest.raises(ValueError, match=r"holds no certificate that can be read: it must be PEM"):
        open_client("https://server", "t", ca)
    with pytest.raises(ValueError, match="is not encrypted: make it https://"):
        open_client("http://server", "t", ca)
