"""The server is killed at random moments under load, again and again: what it acknowledged is there, once."""

import contextlib
import http.client
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import httpx

from diagnosis.store import Keep, rows
from diagnosis.store.sqlite import SqliteStore
from probes import codec
from tests.bot.processes import is_gone, wait_until
from tests.probes.batches import a_batch, utc

KILLS = 47
KILLS_OF_ALL = 3
APART_S = 5
"""Batches of one node, so that a minute is over, and packed, after every twelfth."""
NODES = ("node-a", "node-b", "node-c", "node-d")


class Sender(threading.Thread):
    """One node's agent: each batch again and again until it is acknowledged, and at times once more."""

    def __init__(self, node, post):
        super().__init__(daemon=True)
        self.node = node
        self._post = post
        self._random = random.Random(node)
        self.stopping = threading.Event()
        self.acknowledged = 0
        self.retries = 0

    def run(self):
        while not self.stopping.is_set():
            seq = self.acknowledged
            batch = a_batch(seq * APART_S, seq=seq, node=self.node)
            wire = codec.encode(batch)
            for _ in range(1 + (self._random.random() < 0.1)):
                while not self.stopping.is_set():
                    if self._post(self.node, wire):
                        self.acknowledged = seq + 1
                        break
                    self.retries += 1
                    self.stopping.wait(0.002)


@contextlib.contextmanager
def senders(post):
    threads = [Sender(node, post) for node in NODES]
    for thread in threads:
        thread.start()
    try:
        yield threads
    finally:
        for thread in threads:
            thread.stopping.set()
        for thread in threads:
            thread.join()


def check(path, threads):
    """Everything that was acknowledged is there once, and so are its rows."""
    store = SqliteStore(path, keep=Keep(14, 20))
    assert store.health().integrity == "ok"
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        kept = dict.fromkeys(NODES, ()) | {
            node: tuple(map(int, seqs.split(",")))
            for node, seqs in db.execute(
                "SELECT node, group_concat(seq) FROM (SELECT node, seq FROM batch"
                " JOIN sender ON sender.id = batch.sender JOIN boot ON boot.id = sender.boot ORDER BY node, seq)"
                " GROUP BY node"
            )
        }
        assert db.execute("SELECT count(*) FROM sender").fetchone() == (len(NODES),)
        assert db.execute("SELECT count(*) FROM chunk").fetchone() > (0,)
    for thread in threads:
        seqs = kept[thread.node]
        assert len(seqs) in (thread.acknowledged, thread.acknowledged + 1)  # one may have lost its answer
        assert seqs == tuple(range(len(seqs)))
        second = [seq * APART_S for seq in range(len(seqs))]
        assert numbers_of(store, thread.node) == [2 * one + k for one in second for k in (0, 1)]
    store.close()


def numbers_of(store, node):
    """The sequence numbers of a node's collectives, as they are stored."""
    with store._reading() as db:
        (watch,) = [watch for watch in rows.watches(db, "job-1") if watch.node == node]
        return rows.columns_of(db, watch, 0, utc(10**9)).collectives["seq"].tolist()


def test_a_store_that_is_killed_has_what_it_acknowledged(tmp_path):
    path = tmp_path / "sysom.db"
    door = subprocess.Popen(
        [sys.executable, "-m", "tests.diagnosis.store.door", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    port = int(door.stdout.readline())

    def live():
        door.stdin.write("live\n")
        door.stdin.flush()
        return int(door.stdout.readline())

    def post(node, wire):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("POST", "/", wire, {"X-Node": node})
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    chance = random.Random(7)
    life = live()
    with senders(post) as threads:
        try:
            for _ in range(KILLS):
                before = sum(thread.acknowledged for thread in threads)
                wait_until(
                    lambda before=before: sum(thread.acknowledged for thread in threads) > before,
                    "a batch that is acknowledged",
                )
                threading.Event().wait(chance.uniform(0, 0.15))
                os.kill(life, signal.SIGKILL)
                life = live()
        finally:
            for thread in threads:
                thread.stopping.set()
            os.kill(life, signal.SIGKILL)
            door.kill()
            door.wait()
    assert sum(thread.retries for thread in threads) > KILLS  # it was killed while they sent
    check(path, threads)


def test_a_server_that_is_killed_has_what_it_acknowledged(tmp_path):
    """`sysom serve` as it is, with its process that writes."""
    url = [""]

    def start(number):
        said = tmp_path / f"said-{number}"
        with said.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "bot.cli", "-v", "serve"],
                env=os.environ
                | {
                    "SYSOM_LISTEN": "127.0.0.1:0",
                    "SYSOM_STATE": str(tmp_path),
                    "SYSOM_NODE_TOKENS": ",".join(f"{node}=token-of-{node}" for node in NODES),
                },
                stderr=errors,
            )
        found = wait_until(
            lambda: re.search(r"listens on (\S+),", said.read_text()) or process.poll() is not None,
            "the server",
            60,
        )
        url[0] = found[1]
        return process

    http_ = httpx.Client(trust_env=False, timeout=5)

    def post(node, wire):
        headers = {"Authorization": f"Bearer token-of-{node}"}
        try:
            answer = http_.post(f"{url[0]}/api/v1/batches", content=wire, headers=headers)
            return answer.status_code == 200 and "stored" in answer.json()
        except httpx.HTTPError:
            return False

    chance = random.Random(11)
    server = start(0)
    with http_, senders(post) as threads:
        try:
            for number in range(1, KILLS_OF_ALL + 1):
                before = sum(thread.acknowledged for thread in threads)
                wait_until(
                    lambda before=before: sum(thread.acknowledged for thread in threads) > before + 20,
                    "batches that are acknowledged",
                )
                threading.Event().wait(chance.uniform(0, 0.3))
                server.kill()
                server.wait()
                server = start(number)
        finally:
            for thread in threads:
                thread.stopping.set()
            children = of(server.pid)
            server.kill()
            server.wait()
    wait_until(lambda: all(map(is_gone, children)), "the end of the server's own processes")
    check(tmp_path / "sysom.db", threads)


def of(pid):
    """Processes that a process started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
