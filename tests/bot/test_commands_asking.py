"""`sysom capture`, `sysom probe`, `sysom commands`: what is asked of agents, and how that is told."""

import os
import time

import pytest
from click.testing import CliRunner

from bot import cli
from diagnosis.store.sqlite import SqliteStore
from probes.records import Command, CommandKind, Probe
from tests.probes.batches import SECOND, a_batch, a_rank

DAY_NS = 86_400 * SECOND


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """No setting of the machine's reaches a test; the state folder is an empty one."""
    for name in list(os.environ):
        if name.startswith(("SYSOM_", "SLACK_")) or name == "SUDO_USER":
            monkeypatch.delenv(name)
    config = tmp_path / "sysom.toml"
    config.write_text("")
    monkeypatch.setenv("SYSOM_CONFIG", str(config))
    monkeypatch.setenv("SYSOM_STATE", str(tmp_path / "state"))


@pytest.fixture
def store(tmp_path):
    """What a server keeps: job-1 runs on node-a and node-b, and ran on node-c a day ago; job-2 has ended."""
    store = SqliteStore(tmp_path / "state" / "sysom.db")
    now = time.time_ns()

    def arrives(node, at_ns, **rank):
        probes = [Probe(name="gloo", state="on"), Probe(name="thread-time", state="on")]
        offset = at_ns - 101 * SECOND
        batch = a_batch(100, node=node, utc_offset_ns=offset, probes=probes, ranks=[a_rank(100, **rank)])
        store.add(batch, at_ns)

    arrives("node-a", now - SECOND)
    arrives("node-b", now - 3 * SECOND, rank=1)
    arrives("node-c", now - DAY_NS, rank=2)
    arrives("node-d", now, job="job-2", ended=True)
    arrives("node-e", now - DAY_NS, job="job-3")
    yield store
    store.close()


def ran(*arguments):
    return CliRunner().invoke(cli.main, arguments, prog_name="sysom")


def asked(store):
    return {
        node: [(one.kind, one.job, one.seconds, one.probe) for one in of_node]
        for node, of_node in store.pending_commands(time.time_ns()).items()
    }


def test_a_capture_is_asked_of_the_nodes_where_the_job_runs_now(store):
    result = ran("capture", "job-1", "--seconds", "60")
    assert result.exit_code == 0, result.output
    assert "capture of job-1 for 60 s is asked of 2 nodes (node-a, node-b)" in result.output
    assert "sysom commands says what became of it" in result.output
    start = [(CommandKind.CAPTURE_START, "job-1", 60, "")]
    assert asked(store) == {"node-a": start, "node-b": start}


def test_a_capture_has_an_end_and_can_be_ended(store):
    assert ran("capture", "job-1").exit_code == 0
    assert asked(store)["node-a"] == [(CommandKind.CAPTURE_START, "job-1", 30, "")]
    assert "end of the capture of job-1 is asked" in ran("capture", "job-1", "--end").output
    assert asked(store)["node-b"][1] == (CommandKind.CAPTURE_END, "job-1", 0, "")
    for seconds in ("0", "601"):
        assert ran("capture", "job-1", "--seconds", seconds).exit_code == 2


def test_each_command_has_its_own_id_an_end_and_who_asked(store, monkeypatch):
    monkeypatch.setenv("SUDO_USER", "alice")
    ran("capture", "job-1")
    commands = store.commands(10)
    assert len({one.command.id for one in commands}) == 2
    assert all(len(one.command.id) == 16 for one in commands)
    assert all(one.expires_ns - one.issued_ns == 300 * SECOND for one in commands)
    assert all(one.by.endswith("(sudo by alice)") for one in commands)
    assert store.pending_commands(time.time_ns() + 301 * SECOND) == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("capture", "job-11"), "no job named 'job-11' is known; did you mean job-1"),
        (("capture", "job-2"), "all ranks of job 'job-2' have ended: nothing runs"),
        (
            ("capture", "job-3"),
            "no rank of job 'job-3' was seen in the last 2 minutes (the newest data is of 24 h ago",
        ),
        (("probe", "off", "gloo"), "say where, with one of --node NODE and --job JOB"),
        (("probe", "off", "gloo", "--node", "a", "--job", "b"), "say where, with one of"),
        (
            ("probe", "off", "gloo", "--node", "nodea"),
            "no agent of a node named 'nodea' is known; did you mean node-a",
        ),
        (
            ("probe", "off", "glo", "--node", "node-a"),
            "no probe named 'glo' is known on node-a; did you mean gloo?",
        ),
        (("probe", "off", "x", "--job", "job-1"), "on node-a, node-b; there are gloo, thread-time"),
        (("probe", "off", "gloo", "--job", "nope"), "no job named 'nope' is known; known jobs: "),
    ],
)
def test_what_cannot_be_asked_is_refused_with_what_can(store, arguments, words):
    result = ran(*arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert asked(store) == {}


def test_a_probe_is_switched_on_a_node_or_where_a_job_runs(store):
    assert ran("probe", "off", "gloo", "--node", "node-c").exit_code == 0
    assert asked(store) == {"node-c": [(CommandKind.PROBE_OFF, "", 0, "gloo")]}
    assert "asked of 2 nodes" in ran("probe", "on", "gloo", "--job", "job-1").output
    assert asked(store)["node-b"] == [(CommandKind.PROBE_ON, "", 0, "gloo")]


def test_without_a_store_nothing_is_made(tmp_path):
    result = ran("capture", "job-1")
    assert result.exit_code == 2
    assert "there is no store at" in result.output
    assert not (tmp_path / "state").exists()


def test_what_became_of_it_is_listed_with_the_newest_first(store):
    assert "Nothing has been asked" in ran("commands").output
    now = time.time_ns()
    for number, (id_, probe) in enumerate([("a", "gloo"), ("b", "thread-time"), ("c", "x")]):
        command = Command(id=id_, kind=CommandKind.PROBE_OFF, probe=probe)
        store.add_command("node-a", command, now - (600 - number) * SECOND, now - 300 * SECOND, "alice")
    store.settle_command("b", "done", "gloo is off", now)
    store.settle_command("b", "refused", "said twice", now)
    store.settle_command("c", "refused", "no such probe\n\x1b[31m", now)
    ran("capture", "job-1", "--end")
    lines = ran("commands").output.splitlines()
    assert [line.partition(", asked by")[0] for line in lines[0:4:2]] == [
        "just now, node-b: end the capture of job-1",
        "just now, node-a: end the capture of job-1",
    ]
    assert lines[1].startswith("    the agent has not answered yet; it will be asked for 29")
    assert lines[4] == "9 min ago, node-a: switch x off, asked by alice"
    assert lines[5].startswith("    refused: no such probe")
    assert "\x1b" not in "".join(lines)
    assert lines[7] == "    done: gloo is off"
    assert lines[9].startswith("    the agent never answered, and is not asked any more")
    assert len(ran("commands", "--last", "1").output.splitlines()) == 2
