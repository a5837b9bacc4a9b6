"""The agent as a process beside a real job: kill switch, signed commands, doctor, ends of all kinds."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import uvicorn
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bench.stack import until
from bot.demo import job as demo_job
from bot.demo.job import TrainingJob
from diagnosis.orders import Signer
from probes import in_kernel, status
from probes.codec import decode
from probes.loaded import PROBES
from probes.records import Batch, Command, CommandKind, Event
from probes.shipper import PATH
from tests.live.conftest import LIGHT

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

LOAD_S = 120.0
"""Loading the probes takes seconds, on a machine full of other work more."""
SOON_S = 60.0
"""What takes an interval or two, there."""


@dataclass
class Server:
    """Takes batches, and asks for what the test puts into ``asked`` until it has heard the outcome."""

    signer: Signer = field(default_factory=lambda: Signer(Ed25519PrivateKey.generate()))
    liar: Signer | None = None
    """Signs instead, when it is set."""
    batches: list[Batch] = field(default_factory=list)
    asked: list[Command] = field(default_factory=list)
    url: str = ""

    async def take(self, request: Request) -> Response:
        batch = decode(await request.body())
        self.batches.append(batch)
        done = {event.detail.partition(" ")[0] for event in self.events("command-done", "command-refused")}
        open_ = [command for command in self.asked if command.id not in done]
        reply = (self.liar or self.signer).reply(batch, stored=True, commands=open_)
        return Response(msgspec.json.encode(reply), media_type="application/json")

    def events(self, *kinds: str) -> list[Event]:
        return [event for batch in list(self.batches) for event in batch.events if event.kind in kinds]

    def outcome(self, command: Command) -> str:
        """Ask, and wait for what comes of it: kind and words."""
        self.asked.append(command)

        def heard() -> str:
            own = [
                e for e in self.events("command-done", "command-refused") if e.detail.startswith(command.id)
            ]
            return f"{own[0].kind}: {own[0].detail.partition(' ')[2]}" if own else ""

        return until(heard, f"the outcome of {command.id}", SOON_S)

    def probe(self, name: str) -> str:
        """State of a probe as the newest batch has it."""
        found = (
            [probe.state for probe in self.batches[-1].probes if probe.name == name] if self.batches else []
        )
        return found[0] if found else ""


@pytest.fixture
def server() -> Iterator[Server]:
    served = Server()
    app = Starlette(routes=[Route(PATH, served.take, methods=["POST"])])
    listening = socket.create_server(("127.0.0.1", 0))
    served.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    running = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield served
    finally:
        running.should_exit = True
        thread.join()
        listening.close()


@pytest.fixture(scope="module")
def job(root_and_bpf: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TrainingJob]:
    """One job beside which agents come and go: it must outlive them all."""
    training = demo_job.start("life-job", cpus=(0, 1), options=LIGHT, logs=tmp_path_factory.mktemp("logs"))
    try:
        until(lambda: steps(training) > 3 or not training.running(), "the job's first steps", 180)
        assert training.running(), training.last_words()
        yield training
    finally:
        training.stop()


def steps(training: TrainingJob) -> int:
    """How many steps rank 0 has made."""
    assert training.words is not None
    path = training.words / "steps-0.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def goes_on(training: TrainingJob) -> None:
    before = steps(training)
    until(lambda: steps(training) > before + 5, "steps of the job, which goes on", SOON_S)
    assert training.running(), training.last_words()


@dataclass
class Node:
    """An agent's folders and settings, and the commands that a person types beside it."""

    folder: Path
    server: Server

    def environment(self) -> dict[str, str]:
        return os.environ | {
            "SYSOM_SERVER": self.server.url,
            "SYSOM_NODE": "life-node",
            "SYSOM_NODE_TOKEN": "token",
            "SYSOM_STATE": str(self.folder / "state"),
            "SYSOM_RUNTIME": str(self.folder / "run"),
            "SYSOM_COMMAND_KEY": self.server.signer.public,
        }

    @contextlib.contextmanager
    def agent(self, **more: str) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen(
            [sys.executable, "-m", "bot.cli", "-v", "agent"], env=self.environment() | more
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)

    def types(self, *words: str) -> subprocess.CompletedProcess[str]:
        """A command in another shell, that knows where the runtime folder is and nothing else of the agent."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith("SYSOM_")}
        return subprocess.run(
            [sys.executable, "-m", "bot.cli", *words],
            env=plain | {"SYSOM_RUNTIME": str(self.folder / "run")},
            capture_output=True,
            text=True,
        )

    def told(self) -> status.AgentStatus | None:
        return next(iter(status.living(self.folder / "run")), None)

    def watching(self) -> bool:
        """Whether an agent says that its probes watch the job's two ranks."""
        now = self.told()
        mine = [rank for rank in now.ranks if rank.startswith("life-job ")] if now else []
        on = {probe.name for probe in now.probes if probe.state == "on"} if now is not None else set()
        return len(mine) == 2 and on >= set(PROBES)


@pytest.fixture
def node(tmp_path: Path, server: Server) -> Node:
    return Node(tmp_path, server)


def programs_of(pid: int) -> list[in_kernel.Program]:
    """Our BPF programs that this process holds, and those that nobody does: other agents may run here."""
    return [one for one in in_kernel.programs() if pid in one.holders or not one.holders]


def listed_by_bpftool() -> set[int]:
    out = subprocess.run(
        ["bpftool", "prog", "list", "--json"], capture_output=True, text=True, check=True
    ).stdout
    return {program["id"] for program in json.loads(out)}


def test_the_kill_switch_takes_everything_off_and_back(job: TrainingJob, node: Node) -> None:
    with node.agent() as agent:
        until(node.watching, "an agent that watches", LOAD_S)
        mine = {program.id for program in programs_of(agent.pid)}
        assert mine <= listed_by_bpftool()
        assert any(program.name.startswith("gloo") for program in programs_of(agent.pid))

        pressed = node.types("agent", "--detach-all", "--why", "job life-job crashes")
        assert f"Agent {agent.pid} (life-node, watching " in pressed.stdout
        assert agent.poll() is None, "an agent that follows is not killed"
        assert programs_of(agent.pid) == []
        assert not mine & listed_by_bpftool()
        others = "held by process" in pressed.stdout  # of other work on this machine
        assert pressed.returncode == (1 if others else 0), pressed.stdout
        assert str(agent.pid) not in pressed.stdout.partition("STILL THERE")[2]

        now = node.told()
        assert now is not None
        assert now.detached == "job life-job crashes"
        assert {probe.state for probe in now.probes} == {"off"}
        until(lambda: node.server.probe("gloo") == "off", "a batch that says so", SOON_S)
        (event,) = node.server.events("detached")
        assert event.detail == "job life-job crashes"
        seen = node.types("doctor")
        assert seen.returncode == 1
        assert "The kill switch is on" in seen.stdout
        assert "job life-job crashes" in seen.stdout
        goes_on(job)
        assert programs_of(agent.pid) == [], "nothing is attached again by itself"

        assert node.types("agent", "--attach").returncode == 0
        until(node.watching, "an agent that watches again", LOAD_S)
        assert programs_of(agent.pid)
        until(lambda: node.server.events("attached"), "the server's hearing of it", SOON_S)
    assert job.running()


def test_an_agent_that_starts_under_the_kill_switch_attaches_nothing(job: TrainingJob, node: Node) -> None:
    node.types("agent", "--detach-all")
    with node.agent() as agent:
        until(lambda: node.server.events("rank-found"), "an agent that has seen the job", LOAD_S)
        now = node.told()
        assert now is not None
        assert now.detached == "no reason was given"
        assert programs_of(agent.pid) == []


def test_an_agent_that_hangs_is_killed_and_the_job_goes_on(job: TrainingJob, node: Node) -> None:
    with node.agent() as agent:
        until(node.watching, "an agent that watches", LOAD_S)
        agent.send_signal(signal.SIGSTOP)
        pressed = node.types("agent", "--detach-all")
        assert agent.wait(timeout=SOON_S) == -signal.SIGKILL
        assert f"Agent {agent.pid}" in pressed.stdout
        assert "did not follow within 5 s: killed" in pressed.stdout, pressed.stdout
        assert programs_of(agent.pid) == []
        goes_on(job)
    assert job.running()


def test_signed_commands_are_done_once_and_hold_after_a_restart(job: TrainingJob, node: Node) -> None:
    server = node.server
    numbers = itertools.count(1)

    def command(kind: CommandKind, **what: str | int) -> Command:
        return msgspec.convert({"id": f"c{next(numbers)}-", "kind": kind, **what}, Command)

    with node.agent():
        until(node.watching, "an agent that watches", LOAD_S)
        words = server.outcome(command(CommandKind.PROBE_OFF, probe="gloo"))
        assert words == "command-done: probe gloo is switched off"
        until(lambda: server.probe("gloo") == "off", "a batch that says so", SOON_S)
        assert server.outcome(command(CommandKind.PROBE_OFF, probe="nvml")).startswith("command-refused: ")
        refused = server.outcome(command(CommandKind.CAPTURE_START, job="no-such-job", seconds=30))
        assert refused.startswith("command-refused: ")
        assert "no-such-job" in refused
    with node.agent():
        until(lambda: (now := node.told()) is not None and now.ranks, "an agent that sees the job", LOAD_S)
        until(lambda: server.probe("thread_time") == "on", "a batch of the new agent", LOAD_S)
        assert server.probe("gloo") == "off", "what was switched off stays off"
        assert server.outcome(command(CommandKind.PROBE_ON, probe="gloo")).startswith("command-done: ")
        until(node.watching, "an agent that watches again", LOAD_S)
        started = server.outcome(command(CommandKind.CAPTURE_START, job="life-job", seconds=600))
        assert started == "command-done: life-job is watched at full detail for 600 s"
        until(
            lambda: "life-job" in (node.told() or status_of_nobody()).captures,
            "the capture in the status",
            SOON_S,
        )
        assert "full detail" in node.types("doctor").stdout
        server.liar = Signer(Ed25519PrivateKey.generate())
        server.asked.append(command(CommandKind.CAPTURE_END, job="life-job"))
        until(lambda: server.events("orders-refused"), "orders that are not believed", SOON_S)
        assert "life-job" in (node.told() or status_of_nobody()).captures, "and not followed"
    server.liar = None
    server.asked.pop()
    with node.agent():
        until(
            lambda: "life-job" in (node.told() or status_of_nobody()).captures,
            "the capture's going on",
            LOAD_S,
        )
        assert server.outcome(command(CommandKind.CAPTURE_END, job="life-job")).startswith("command-done: ")
        until(lambda: not (node.told() or status_of_nobody()).captures, "the capture's end", SOON_S)
    outcomes = [event.detail.split()[0] for event in server.events("command-done", "command-refused")]
    assert sorted(outcomes) == sorted(set(outcomes)), "each told once"


def status_of_nobody() -> status.AgentStatus:
    return status.AgentStatus(pid=0, node="", state="", server="", started_ns=0, at_ns=0)


def test_the_doctor_and_prometheus_show_what_each_probe_costs(job: TrainingJob, node: Node) -> None:
    port = demo_job.free_port()
    with node.agent(SYSOM_METRICS_LISTEN=f"127.0.0.1:{port}") as agent:
        until(node.watching, "an agent that watches", LOAD_S)

        def measured() -> bool:
            now = node.told()
            costs = {probe.name: probe.cost_ms_per_s for probe in now.probes} if now is not None else {}
            return bool(costs) and all(costs[name] > 0 for name in PROBES)

        until(measured, "the first measurement of both probes", LOAD_S)
        shown = node.types("doctor")
        assert shown.returncode == 0, shown.stdout
        lines = shown.stdout.splitlines()
        assert len(lines) <= 40
        assert max(map(len, lines)) <= 80
        for name in ("thread_time", "gloo"):
            (row,) = [line.split() for line in lines if line.startswith(f"  {name}")]
            assert row[1] == "on"
            assert 0 < float(row[2]) < 1000
        told = json.loads(node.types("doctor", "--json").stdout)
        assert [one["pid"] for one in told["agents"]] == [agent.pid]
        assert told["agents"][0]["agent_ms_per_s"] > 0
        assert told["agents"][0]["memory_bytes"] > 10_000_000
        assert not any(finding["name"].startswith("probe ") for finding in told["findings"]), (
            "not loaded again"
        )

        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SOON_S) as answer:
            families = {
                family.name: family for family in text_string_to_metric_families(answer.read().decode())
            }
        on = {s.labels["probe"]: s.value for s in families["sysom_agent_probe_on"].samples}
        assert (on["thread_time"], on["gloo"], on["storage"]) == (1, 1, 0), "storage is on in captures only"
        stored = [s for s in families["sysom_agent_batches"].samples if s.labels == {"outcome": "stored"}]
        assert stored[0].value > 0


ENDS: list[tuple[str, Callable[[subprocess.Popen[bytes]], None], int]] = [
    ("SIGTERM", lambda agent: agent.terminate(), 0),
    ("SIGKILL", lambda agent: agent.kill(), -signal.SIGKILL),
]


@pytest.mark.parametrize(("end", "expected"), [end[1:] for end in ENDS], ids=[end[0] for end in ENDS])
def test_an_ended_agent_leaves_nothing_attached_and_the_next_goes_on(
    job: TrainingJob,
    node: Node,
    tmp_path: Path,
    end: Callable[[subprocess.Popen[bytes]], None],
    expected: int,
) -> None:
    with node.agent() as agent:
        until(node.watching, "an agent that watches", LOAD_S)
        second = subprocess.run(
            [sys.executable, "-m", "bot.cli", "agent"], env=node.environment(), capture_output=True, text=True
        )
        assert second.returncode == 2
        assert "another agent uses the spool" in second.stderr
        until(lambda: node.server.batches, "a batch", SOON_S)
        end(agent)
        assert agent.wait(timeout=SOON_S) == expected
        until(lambda: not programs_of(agent.pid), "the kernel's removal of its programs", SOON_S)
    if expected == 0:
        assert status.read_all(tmp_path / "run") == []
    assert status.living(tmp_path / "run") == []
    goes_on(job)
    sent = len(node.server.batches)
    with node.agent():
        until(lambda: len(node.server.batches) > sent, "batches of the next agent", LOAD_S)
    numbers = [batch.seq for batch in node.server.batches]
    assert sorted(set(numbers)) == list(range(len(set(numbers)))), (
        "no number is missing, none used for another batch"
    )
    assert job.running()
