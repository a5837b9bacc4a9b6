"""``sysom serve`` as a process of its own: its memory under bombs, and what a hang-up means to it."""

import os
import re
import signal
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import zstandard
from click.testing import CliRunner

from bot import cli
from bot.demo import show
from diagnosis.orders import signer
from probes import codec
from probes.codec import MAX_PLAIN_BYTES
from tests.bot.processes import wait_until
from tests.bot.test_server import children
from tests.bot.web.certificates import issue
from tests.probes.batches import a_batch

MIB = 1 << 20
RECORDED = Path(show.__file__).with_name("recorded") / "contention.sysomrec"


class Served:
    """A server's process, and what it has said."""

    def __init__(self, process, said):
        self.process = process
        self._said = said

    def said(self, pattern):
        return re.search(pattern, self._said.read_text())

    @property
    def url(self):
        return self.said(r"listens on (\S+),")[1]


@contextmanager
def served(tmp_path, **settings):
    said = tmp_path / "said"
    with said.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "bot.cli", "-v", "serve"],
            env=os.environ | {"SYSOM_LISTEN": "127.0.0.1:0", "SYSOM_STATE": str(tmp_path), **settings},
            stderr=errors,
            start_new_session=True,
        )
    served = Served(process, said)
    try:
        wait_until(lambda: served.said("listens on") or process.poll() is not None, "the server")
        yield served
    finally:
        process.terminate()
        process.wait(20)


def peak_bytes(pid):
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) * 1024


def zeros(size, **options):
    return zstandard.ZstdCompressor(**options).compress(bytes(size))


BOMBS = [
    (zeros(64 * MIB), "bomb"),
    (zeros(64 * MIB, write_content_size=False), "not_zstd"),
    (zeros(MAX_PLAIN_BYTES), "not_a_batch"),
    (zeros(MAX_PLAIN_BYTES) * 8, "truncated"),
]


def test_bombs_are_refused_and_memory_stays_as_it_was(tmp_path):
    with served(tmp_path, SYSOM_NODE_TOKENS="node-a=token") as server:
        headers = {"Authorization": "Bearer token"}
        with httpx.Client(base_url=server.url, headers=headers, trust_env=False) as http:

            def post(wire):
                answer = http.post("/api/v1/batches", content=wire, timeout=30)
                return answer.json().get("reason", answer.status_code)

            assert post(codec.encode(a_batch(1))) == 200
            assert [post(wire) for wire, _ in BOMBS] == [reason for _, reason in BOMBS]
            pids = [server.process.pid, *children("diagnosis.writer", server.process.pid)]
            assert len(pids) == 2
            before = [peak_bytes(pid) for pid in pids]
            with ThreadPoolExecutor(3) as pool:
                said = set(pool.map(post, [wire for wire, _ in BOMBS] * 25))
            assert said == {reason for _, reason in BOMBS}
            grown = [after - was for was, after in zip(before, map(peak_bytes, pids), strict=True)]
            assert max(grown) < 8 * MIB, grown
            assert post(codec.encode(a_batch(2))) == 200


def test_a_hangup_has_the_files_read_again_and_the_server_goes_on(tmp_path):
    chain, key = issue(tmp_path, "one")
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('node-a = "token"')
    tokens.chmod(0o600)
    settings = {
        "SYSOM_NODE_TOKENS_FILE": str(tokens),
        "SYSOM_TLS_CERT": str(chain),
        "SYSOM_TLS_KEY": str(key),
    }
    with served(tmp_path, **settings) as server:
        assert server.url.startswith("https://")
        os.kill(server.process.pid, signal.SIGHUP)
        wait_until(lambda: server.said("certificate .*cert.pem was read again"), "the certificate")
        assert server.process.poll() is None


def test_a_hangup_never_ends_a_daemon_whatever_it_waits_for(tmp_path):
    """As `systemctl reload` does, while Slack is not reached and with no file to read again."""
    away = {"HTTPS_PROXY": "http://127.0.0.1:9", "SLACK_BOT_TOKEN": "xoxb-1", "SLACK_APP_TOKEN": "xapp-1"}
    with served(tmp_path, SYSOM_NODE_TOKENS="node-a=token", **away) as server:
        wait_until(lambda: server.said("no Slack yet"), "the bot's first attempt")
        os.kill(server.process.pid, signal.SIGHUP)
        assert httpx.get(f"{server.url}/healthz", trust_env=False).json()["ok"]
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(20) == 0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"SYSOM_NODE_TOKENS_FILE": "/none"}, "the file of tokens /none cannot be read: No such file"),
        ({"SYSOM_NODE_TOKENS": "a=hush,b=hush"}, "nodes 'a' and 'b' share a token"),
        (
            {"SYSOM_NODE_TOKENS": "a=b", "SYSOM_TLS_CERT": "/none", "SYSOM_TLS_KEY": "/none"},
            "SYSOM_TLS_CERT: /none cannot be read",
        ),
        (
            {"SYSOM_NODE_TOKENS": "a=b", "SYSOM_STATE": "/proc/none"},
            "the folder /proc/none cannot be made (No such file or directory): give SYSOM_STATE one",
        ),
        (
            {"SYSOM_NODE_TOKENS": "a=b", "SYSOM_LISTEN": "192.0.2.1:8750"},
            "SYSOM_LISTEN: the server cannot listen on 192.0.2.1:8750: Cannot assign requested address\n",
        ),
        ({}, "SYSOM_NODE_TOKENS is not set: no agent could send anything"),
    ],
)
def test_what_cannot_be_served_is_said_at_the_start(tmp_path, settings, words):
    ran = CliRunner().invoke(cli.main, ["serve"], env={"SYSOM_STATE": str(tmp_path), **settings})
    assert ran.exit_code == 2
    assert f"sysom: {words}" in ran.stderr
    assert "hush" not in ran.stderr


def test_the_key_that_agents_get_is_printed_and_made_once(tmp_path):
    printed = {
        subprocess.run(
            [sys.executable, "-m", "bot.cli", "key"],
            env=os.environ | {"SYSOM_STATE": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    }
    assert printed == {signer(tmp_path / "command.key").public + "\n"}


def test_a_recording_is_sent_as_an_agent_sends_with_the_nodes_token_file_and_our_own_authority(tmp_path):
    chain, key = issue(tmp_path, "one")
    token = tmp_path / "token"
    token.write_text("token\n")
    token.chmod(0o600)
    tls = {"SYSOM_TLS_CERT": str(chain), "SYSOM_TLS_KEY": str(key)}
    recording = show.recording()
    with served(tmp_path, SYSOM_NODE_TOKENS=f"{recording.header.node}=token", **tls) as server:
        node = {
            "SYSOM_SERVER": server.url,
            "SYSOM_SERVER_CA": str(chain),
            "SYSOM_NODE_TOKEN_FILE": str(token),
        }
        ran = CliRunner().invoke(cli.main, ["replay", str(RECORDED), "--send"], env=node)
        assert (ran.exit_code, ran.stderr) == (0, "")
        trusting = ssl.create_default_context(cafile=chain)
        health = httpx.get(f"{server.url}/healthz", verify=trusting, trust_env=False).json()
    assert health["counts"] == {"stored": len(recording.batches)}


def test_what_a_recording_cannot_be_sent_with_is_said():
    for node, words in (
        ({}, "neither SYSOM_NODE_TOKEN nor SYSOM_NODE_TOKEN_FILE is set"),
        ({"SYSOM_NODE_TOKEN": "x", "SYSOM_SERVER": "server:8750"}, "must look like http://HOST:PORT"),
    ):
        ran = CliRunner().invoke(cli.main, ["replay", str(RECORDED), "--send"], env=node)
        assert ran.exit_code == 2
        assert words in ran.stderr
        assert "unexpected" not in ran.stderr
