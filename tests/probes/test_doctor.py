"""What the doctor says: what to read first stands first, on one screen, whatever jobs and reasons are called."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from probes import doctor, kill_switch, screen, status
from probes.doctor import Examination, Finding
from probes.loaded import NOT_YET
from probes.records import Probe
from tests.probes.test_status import me

OK = Finding("kernel", True, "6.1")
NOTE = Finding("GPU", False, "none is seen", needed=False)
MISSING = Finding("BCC", False, "BCC is not installed: apt-get install python3-bpfcc")
LOADING = Probe(name="gloo", state="off", why=NOT_YET)
SECOND = 1_000_000_000


def found(**changes: Any) -> Examination:
    fields: dict[str, Any] = {
        "node": "node-a",
        "kernel": "6.1",
        "cpus": 4,
        "at": "2026-01-02T03:04:05Z",
        "at_ns": time.monotonic_ns(),
        "ok": True,
        "summary": "Watching 2 ranks.",
        "detached": "",
        "detached_since": "",
        "agents": [],
        "findings": [OK, NOTE],
    }
    return Examination(**fields | changes)


def busy(**changes: Any) -> status.AgentStatus:
    """An agent with something in every line."""
    now = time.monotonic_ns()
    fields: dict[str, Any] = {
        "started_ns": now - 200 * SECOND,
        "ranks": ["job-1 rank 0 (pid 7)", "job-1 rank 1 (pid 8)"],
        "probes": [
            Probe(name="thread_time", state="on", cost_ms_per_s=7.5),
            Probe(
                name="gloo",
                state="on",
                hits=1234,
                lost=5,
                why="2 collectives seen in part only",
                cost_ms_per_s=-1.0,
            ),
        ],
        "captures": {"job-1": 12.0},
        "shed": ["who had the CPU: watching takes 50 ms"],
        "agent_ms_per_s": 10.0,
        "budget_ms_per_s": 40.0,
        "memory_bytes": 98_000_000,
        "memory_budget_bytes": 512_000_000,
        "events_per_s": 310.0,
        "events_budget": 20_000,
        "spool_batches": 9,
        "lag_s": 150.0,
        "batches": {"stored": 1500, "duplicate": 1, "dropped": 3},
        "shipping": "the server cannot be reached",
    }
    return me(**fields | changes)


def text(examination: Examination) -> str:
    lines = screen.lines(examination)
    assert len(lines) <= 40
    assert all(len(line) <= 80 for line in lines)
    return "\n".join(lines)


def test_each_probe_s_cost_stands_in_time_and_in_share_of_the_node() -> None:
    lines = screen.lines(found(agents=[busy()]))
    (row,) = [line.split() for line in lines if line.startswith("  thread_time")]
    assert row == ["thread_time", "on", "7.50", "0.188", "0", "0"]  # 7.5 ms of 4 × 1000 ms is 0.1875 %
    (row,) = [line.split() for line in lines if line.startswith("  gloo")]
    assert row == ["gloo", "on", "–", "–", "1,234", "5"]
    (row,) = [line.split() for line in lines if line.startswith("  the agent itself")]
    assert row == ["the", "agent", "itself", "10.00", "0.250"]
    (row,) = [line.split() for line in lines if line.startswith("  together")]
    assert row == ["together", "17.50", "0.438", "of", "40.0", "ms/s"]


def test_what_an_agent_gave_up_captures_and_keeps_is_said() -> None:
    said = text(found(agents=[busy()]))
    assert "up 3 min, 2 ranks" in said
    assert "98 of 512 MB; 310 of 20,000 events per second" in said
    assert "who had the CPU: watching takes 50 ms" in said
    assert "job-1 for 12 s more" in said
    assert "1,500 stored by the server, 9 wait here (the oldest for 2 min), 3 dropped" in " ".join(
        said.split()
    )
    assert "2 collectives seen in part only" in said


def test_more_than_the_budget_is_marked() -> None:
    assert "of 10.0 ms/s, OVER" in text(found(agents=[busy(budget_ms_per_s=10.0)]))


def test_an_agent_that_is_silent_or_detached_stands_out() -> None:
    silent = busy(at_ns=time.monotonic_ns() - 30 * SECOND, detached="why")
    assert "DETACHED, SILENT FOR 30 s" in text(found(agents=[silent]))


def test_what_is_missing_comes_before_what_is_there_and_says_how_to_get_it() -> None:
    said = text(found(findings=[OK, NOTE, MISSING]))
    assert said.index("MISSING BCC") < said.index("note    GPU") < said.index("ok      kernel")
    assert "apt-get install python3-bpfcc" in said


def test_each_point_s_name_stands_apart_from_its_words() -> None:
    assert "ok      probe thread_time loads" in text(
        found(findings=[Finding("probe thread_time", True, "loads")])
    )


def test_long_and_hostile_words_stay_on_one_screen() -> None:
    bad = "x\n\x1b[2J" + "very long " * 200
    agents = [
        busy(
            node="n" * 300,
            shed=[bad] * 5,
            shipping=bad,
            captures={bad: 3.0},
            probes=[Probe(name="p" * 99, state="unavailable", why=bad, hits=10**15, lost=10**9)] * 4,
        )
    ] * 9
    examination = found(
        agents=agents, summary=bad[:300], detached=bad, findings=[Finding("ranks", True, bad)] * 14
    )
    lines = screen.lines(examination)
    assert len(lines) <= 40
    assert all("\n" not in line for line in lines)


@pytest.mark.parametrize(
    ("agents", "findings", "why", "ok", "words"),
    [
        ([], [OK], "", True, "No agent runs here"),
        ([], [OK, MISSING], "", False, "cannot be watched: BCC missing"),
        ([{"shed": [], "shipping": ""}], [OK], "", True, "Watching 2 ranks."),
        ([{"probes": [LOADING]}], [OK], "", True, "loads its probes"),
        ([{"shipping": ""}], [OK], "", True, "1 thing given up"),
        ([{}], [OK], "", True, "batches wait on this node"),
        ([{"ranks": [], "shed": [], "shipping": ""}], [OK], "", True, "no rank to watch runs here"),
        ([{"at_ns": 0}], [OK], "", False, "it hangs, or is stopped"),
        ([{"probes": [Probe(name="gloo", state="unavailable")]}], [OK], "", False, "gloo cannot watch"),
        ([{}], [OK], "job-1", False, "The kill switch is on"),
    ],
)
def test_the_first_line_says_whether_all_is_well(
    agents: list[dict[str, Any]], findings: list[Finding], why: str, ok: bool, words: str
) -> None:
    # Made here: what told something when tests were collected is silent by now.
    said_ok, said = doctor._summary(findings, [busy(**changes) for changes in agents], why)
    assert (said_ok, words in said) == (ok, True), said


@pytest.mark.parametrize(("seconds", "words"), [(30, "loads its probes"), (90, "it hangs, or is stopped")])
def test_an_agent_that_loads_its_probes_may_be_silent_for_a_while(seconds: int, words: str) -> None:
    silent = busy(at_ns=time.monotonic_ns() - seconds * SECOND, probes=[LOADING])
    assert words in doctor._summary([OK], [silent], "")[1]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where the doctor loaded probes."""
    tried: list[Path] = []

    def load(cache: Path) -> list[Finding]:
        tried.append(cache)
        return [Finding("probe gloo", True, "loads")]

    monkeypatch.setattr(doctor, "_probes", load)
    monkeypatch.setattr(doctor, "_elsewhere", lambda agents: [])
    for look in ("_root", "_kernel", "_uprobes", "_bcc"):
        monkeypatch.setattr(doctor, look, lambda: OK)
    monkeypatch.setattr(doctor, "_tracing", lambda: [OK])
    monkeypatch.setattr(doctor, "_headers", lambda cache: OK)
    monkeypatch.setattr(doctor, "_pid_namespace", lambda place: OK)
    return tried


def test_probes_are_loaded_to_try_them_when_no_agent_runs(loads: list[Path], tmp_path: Path) -> None:
    seen = doctor.examine(tmp_path / "cache", tmp_path)
    assert loads == [tmp_path / "cache"]
    assert Finding("probe gloo", True, "loads") in seen.findings


def test_nothing_is_loaded_beside_a_running_agent_or_under_the_kill_switch(
    loads: list[Path], tmp_path: Path
) -> None:
    status.write(tmp_path, me())
    assert [agent.pid for agent in doctor.examine(tmp_path / "cache", tmp_path).agents] == [os.getpid()]
    status.remove(tmp_path, os.getpid())
    kill_switch.engage(tmp_path, "not now")
    seen = doctor.examine(tmp_path / "cache", tmp_path)
    assert (seen.detached, seen.ok, loads) == ("not now", False, [])
    assert seen.detached_since


def test_a_pid_namespace_of_its_own_is_missing_and_the_way_out_said(tmp_path: Path) -> None:
    (tmp_path / "self" / "ns").mkdir(parents=True)
    (tmp_path / "self" / "ns" / "pid").touch()
    finding = doctor._pid_namespace(tmp_path)
    assert not finding.ok
    assert "hostPID: true" in finding.words
