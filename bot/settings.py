"""All settings of sysom, typed, in one place: defaults, then a TOML file, then environment variables.

The file is the one named by SYSOM_CONFIG, else /etc/sysom.toml where that exists; its keys are the names below.
An environment variable is ``SYSOM_`` and the name in capitals; the Slack tokens also go by Slack's own names,
SLACK_BOT_TOKEN, SLACK_APP_TOKEN and SLACK_SIGNING_SECRET.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from diagnosis.tokens import TokensError, checked

SECRETS = ("node_tokens", "node_token", "slack_bot_token", "slack_app_token", "slack_signing_secret")
"""Settings that are never printed."""


class SettingsError(ValueError):
    """A setting that cannot be used; the message names it and says what is expected."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What can be set. Secrets are never printed."""

    store: str = ""
    """Where batches are kept: sqlite:///path/to/file.db. Default: sysom.db in ``state``."""
    state: str = ""
    """Folder for the store, the agent's spool and caches. Default: the user's data folder, sysom in it."""
    listen: str = "127.0.0.1:8750"
    """Server: address and port for agents and pages."""
    node_tokens: dict[str, str | list[str]] = {}
    """Server: node → its token, or all that are valid. In the environment: node=token,node=token, a node with two
    tokens twice."""
    node_tokens_file: str = ""
    """Server: TOML file of node = "token" or node = ["new", "old"]; read again when it changes."""
    tls_cert: str = ""
    """Server: file with its certificate chain (PEM); with ``tls_key`` it speaks https."""
    tls_key: str = ""
    """Server: file with the certificate's private key (PEM)."""
    keep_days: float = 14.0
    """Server: batches older than this are deleted."""
    keep_gb: float = 20.0
    """Server: the store's file stays below this; the oldest go first."""
    server: str = "http://127.0.0.1:8750"
    """Agent: where the server is."""
    server_ca: str = ""
    """Agent: file of certificates (PEM) that the server's is checked with. Default: the system's."""
    node: str = ""
    """Agent: name of this node. Default: the host's name."""
    node_token: str = ""
    """Agent: this node's token."""
    node_token_file: str = ""
    """Agent: file that holds the token instead; read again when the server refuses the token."""
    command_key: str = ""
    """Agent: the server's public key, as `sysom key` prints it. Without it no command is followed."""
    cpu_budget_percent: float = 0.4
    """Agent: share of this node's CPU time that watching may take, in percent."""
    memory_budget_mb: int = 512
    """Agent: memory that the agent may hold, in MB."""
    events_budget: int = 20_000
    """Agent: events of probes per second that may come to the agent."""
    runtime: str = "/run/sysom"
    """Agent: folder for what running agents tell on this node, and for the kill switch. Gone with a reboot."""
    metrics_listen: str = ""
    """Agent: address and port for Prometheus, for example 127.0.0.1:8752. Default: none."""
    spool_mb: int = 256
    """Agent: disk that batches may take while the server is away, in MB."""
    slack_bot_token: str = ""
    """Slack's bot token, xoxb-…"""
    slack_app_token: str = ""
    """Slack's app-level token for Socket Mode, xapp-…"""
    slack_signing_secret: str = ""
    """Slack's signing secret: requests come by HTTP to ``listen``, at /slack/events, instead of Socket Mode."""
    workspace_listen: str = "127.0.0.1:0"
    """Local workspace: address and port; port 0 takes a free one."""

    def __repr__(self) -> str:
        """Without secrets: what fails may come with all that it was called with."""
        shown = (
            f"{name}={'…' if name in SECRETS else repr(value)}"
            for name in self.__struct_fields__
            if (value := getattr(self, name))
        )
        return f"Settings({', '.join(shown)})"

    def store_url(self) -> str:
        """The store's URL, the default filled in."""
        return self.store or f"sqlite://{self.state_folder().resolve()}/sysom.db"

    def state_folder(self) -> Path:
        """Folder for what sysom keeps; not created here."""
        if self.state:
            return Path(self.state)
        data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
        return Path(data) / "sysom"

    def command_key_file(self) -> Path:
        """Where the server keeps the private key that it signs commands with."""
        return self.state_folder() / "command.key"

    def node_name(self) -> str:
        """This node's name."""
        return self.node or socket.gethostname()

    def has_slack(self) -> bool:
        """Whether a real Slack is set."""
        return bool(self.slack_bot_token and (self.slack_app_token or self.slack_signing_secret))


_ALIASES = {
    "SLACK_BOT_TOKEN": "slack_bot_token",
    "SLACK_APP_TOKEN": "slack_app_token",
    "SLACK_SIGNING_SECRET": "slack_signing_secret",
}
_EXPECTED = {"int": "a whole number", "float": "a number", "str": "text"}
LEAST_KEEP_DAYS = 0.05
"""An hour and some: a verdict looks at ten minutes and at what was before them."""
LEAST_KEEP_GB = 0.01
"""An empty store has 0.1 MB; one rank's day has some 80 MB."""
_NOT_SETTINGS = {"SYSOM_CONFIG", "SYSOM_JOB_ID"}
_OF_KUBERNETES = re.compile(
    r"SYSOM_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)?)"
)
"""Put into every container beside a Service named "sysom" (kubernetes.io/docs: "Discovering services")."""


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings. Raises :class:`SettingsError`, naming the key and where it stands."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    config = environ.get("SYSOM_CONFIG") or "/etc/sysom.toml"
    if environ.get("SYSOM_CONFIG") or Path(config).exists():
        values |= _from_file(Path(config))
    known = set(Settings.__struct_fields__)
    for variable, value in environ.items():
        name = _ALIASES.get(variable)
        if name is None and variable.startswith("SYSOM_") and not _is_none_of_ours(variable):
            name = variable.removeprefix("SYSOM_").lower()
            if name not in known:
                raise SettingsError(f"{variable}: no such setting; there are {', '.join(sorted(known))}")
        if name is not None and not _is_text(value):
            raise SettingsError(f"{variable} holds bytes that are no UTF-8 text: set it again")
        if name is not None and value.strip():
            values[name] = _pairs(variable, value) if name == "node_tokens" else value
    try:
        settings = msgspec.convert(values, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsError(_in_words(str(error), config)) from error
    settings = _with_clean_tokens(settings)
    for name, least in (("keep_days", LEAST_KEEP_DAYS), ("keep_gb", LEAST_KEEP_GB)):
        if not least <= (most := getattr(settings, name)) < float("inf"):
            raise SettingsError(
                f"{name} is {most:g}: {least:g} is the least, since all that is beyond it is deleted"
            )
    if bool(settings.slack_bot_token) != bool(settings.slack_app_token or settings.slack_signing_secret):
        raise SettingsError(
            "a Slack needs both SLACK_BOT_TOKEN (xoxb-…) and SLACK_APP_TOKEN (xapp-…), or for HTTP in its place "
            "SYSOM_SLACK_SIGNING_SECRET; one is missing"
        )
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise SettingsError(
            "https needs both SYSOM_TLS_CERT and SYSOM_TLS_KEY (PEM files); one is missing: without both, put a "
            "proxy that speaks TLS in front"
        )
    for name in ("listen", "workspace_listen"):
        host, port = address(getattr(settings, name), name)
    if not _is_loopback(host):
        raise SettingsError(
            f"workspace_listen is {settings.workspace_listen!r}: the local workspace asks nobody who they are, so "
            f"it listens on this machine alone; take 127.0.0.1:{port}, and from elsewhere "
            f"ssh -L {port or 8751}:127.0.0.1:{port or 'PORT'} to this machine"
        )
    return settings


def _is_none_of_ours(variable: str) -> bool:
    return variable in _NOT_SETTINGS or _OF_KUBERNETES.fullmatch(variable) is not None


def _in_words(problem: str, config: str) -> str:
    """What is wrong with a value, without the value: it may be a secret."""
    found = re.fullmatch(r"Expected `([^`]+)`, got .* - at `\$\.(\w+)(.*)`", problem)
    if found is None:
        return f"settings: {problem} (from the environment or {config})"
    expected, name, inside = found.groups()
    kind = 'node = "token" or ["new", "old"]' if name == "node_tokens" else _EXPECTED.get(expected, expected)
    return (
        f"{name} must be {kind}{' throughout' * bool(inside)} (SYSOM_{name.upper()}, or {name} in {config})"
    )


def _is_text(value: str) -> bool:
    """Python keeps an environment's bytes that are no UTF-8 as lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def address(text: str, name: str) -> tuple[str, int]:
    """(host, port) from "host:port". Raises :class:`SettingsError`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise SettingsError(f"{name} is {text!r}; it must be host:port, for example 127.0.0.1:8750")
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _with_clean_tokens(settings: Settings) -> Settings:
    """Tokens as they were meant: a file or a secret often brings a newline along. Never prints one."""
    changes: dict[str, Any] = {
        name: _token(name, getattr(settings, name)) for name in SECRETS if name != "node_tokens"
    }
    changes["node_tokens"] = {
        node: _token(what, value) if isinstance(value, str) else [_token(what, token) for token in value]
        for node, value in settings.node_tokens.items()
        for what in [f"node_tokens, the token of {node!r},"]
    }
    return msgspec.structs.replace(settings, **changes)


def _token(where: str, token: str) -> str:
    try:
        return checked(token, where)
    except TokensError as error:
        raise SettingsError(str(error)) from None


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"the settings file {path} is not TOML: {error}") from error


def _pairs(variable: str, value: str) -> dict[str, str | list[str]]:
    pairs: dict[str, str | list[str]] = {}
    for number, item in enumerate(value.split(","), start=1):
        node, separator, token = (part.strip() for part in item.partition("="))
        if not separator or not node or not token:  # the item may be a token: it is counted, not shown
            raise SettingsError(
                f"item {number} of {variable} is not node=token; it must be node=token,node=token"
            )
        before = pairs.get(node, [])
        pairs[node] = [before, token] if isinstance(before, str) else [*before, token] if before else token
    return pairs
