"""`sysom import`: what files tell, in the store as a job; all of it or nothing, in words."""

import gzip
import json
import os
import sqlite3
from contextlib import closing

import pytest
from click.testing import CliRunner

import probes.importers
from bot import cli
from diagnosis import engine, service
from diagnosis.store import open_store
from diagnosis.store.sqlite import SqliteStore
from probes.importers import Note, Part, Unusable
from tests.diagnosis.store.arrivals import add
from tests.diagnosis.store.imported import THEN, a_part
from tests.probes.batches import SECOND, a_batch, utc
from tests.recorded import DATA

recorded = pytest.mark.skipif(not DATA.is_dir(), reason=f"the recorded traces are not at {DATA}")
EVER = (0, 1 << 61)
HEAD = b'{"traceEvents": '


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """No setting of the machine's reaches a test; the state folder is an empty one."""
    for name in list(os.environ):
        if name.startswith(("SYSOM_", "SLACK_")):
            monkeypatch.delenv(name)
    config = tmp_path / "sysom.toml"
    config.write_text("")
    monkeypatch.setenv("SYSOM_CONFIG", str(config))
    monkeypatch.setenv("SYSOM_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Files that the Kineto importer is made to read in its own words: ``files(name, items…)`` writes one; an
    exception among the items is raised there."""
    told = {}

    def read(paths, *, job):
        for path in paths:
            for item in told[path.name]:
                if isinstance(item, Exception):
                    raise item
                yield item(path) if callable(item) else item

    def write(name, *items):
        path = tmp_path / "traces" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(HEAD + name.encode())
        told[name] = items
        return path

    monkeypatch.setattr("probes.importers.kineto.read", read)
    return write


def of(rank, second=0, **changes):
    """A part of any file."""
    where = {name: changes.pop(name) for name in ("node", "utc") if name in changes}
    at = THEN + second * SECOND
    batch = a_part(rank, second, **({"source": "kineto"} | changes))
    return lambda path: Part(batch, at, at + SECOND, path, **where)


def ran(*arguments):
    return CliRunner().invoke(cli.main, [str(one) for one in arguments], prog_name="sysom")


def imported(*arguments, job="traced"):
    done = ran("import", *arguments, "--job", job)
    assert done.exit_code == 0, done.output
    return done.output.splitlines()


def evidence(state, job="traced", window=EVER):
    store = open_store(f"sqlite://{state / 'sysom.db'}", read_only=True)
    try:
        return store.evidence(job, *window)
    finally:
        store.close()


def is_empty(state):
    if not (state / "sysom.db").exists():
        return True
    with closing(sqlite3.connect(state / "sysom.db")) as db:
        return all(
            db.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
            for table in ("boot", "sender", "batch", "watch", "chunk", "event")
        )


def test_what_was_found_is_said_and_what_comes_next(files, state, tmp_path):
    files("a", of(0), of(0, 1), Note("streams stand for groups", rank=0))
    files("b", of(2, 3), Note("streams stand for groups", rank=2), Note("two ranks are missing"))
    (tmp_path / "traces" / "README").write_text("words")
    assert imported(tmp_path / "traces") == [
        "kineto, 2 files: ranks 0 and 2 of 4",
        "  steps 0 to 3, with gaps (3 steps); 3 collectives; 6 operations",
        "  4.000 s, from 2022-10-10T22:13:20.000Z to 2022-10-10T22:13:24.000Z",
        "Missing or odd:",
        "  - ranks 0 and 2: streams stand for groups",
        "  - two ranks are missing",
        f"  - left out: {tmp_path / 'traces' / 'README'}: text of an unknown kind",
        "Stored as traced. Now: sysom diagnose traced",
    ]
    found = evidence(state)
    assert sorted(found.ranks) == [0, 2]
    assert found.ranks[0].operations.step.tolist() == [0, 0, 1, 1]
    assert found.notes == ["ranks 0 and 2: streams stand for groups", "two ranks are missing"]


def test_the_same_files_again_change_nothing(files, state):
    path = files("a", of(0))
    imported(path)
    before = (state / "sysom.db").read_bytes()
    assert imported(path) == [
        "These files are stored as traced already: nothing to do. Now: sysom diagnose traced"
    ]
    assert (state / "sysom.db").read_bytes() == before


def test_a_name_that_is_taken_is_refused_unless_it_is_to_be_replaced(files, state):
    imported(files("a", of(0)))
    other = files("b", of(1))
    refused = ran("import", other, "--job", "traced")
    assert refused.exit_code == 2
    assert "there is a job named 'traced' already; --replace puts this import in its place" in refused.output
    assert sorted(evidence(state).ranks) == [0]
    imported(other, "--replace")
    assert sorted(evidence(state).ranks) == [1]


def test_a_job_that_agents_watch_is_never_replaced(files, state):
    store = SqliteStore(state / "sysom.db")
    add(store, a_batch(3))
    store.close()
    refused = ran("import", files("a", of(0)), "--job", "job-1", "--replace")
    assert refused.exit_code == 2
    assert "seen by agents, whose data an import never replaces" in refused.output


@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_broken_file_anywhere_leaves_nothing(files, state, tmp_path, where):
    for place, name in enumerate("abc"):
        path = tmp_path / "traces" / name
        broken = Unusable(f"{path}: byte 17: not JSON: get it again", path)
        files(name, of(place), *([broken] if place == where else []))
    done = ran("import", tmp_path / "traces", "--job", "traced")
    assert done.exit_code == 2
    assert f"{'abc'[where]}: byte 17: not JSON: get it again" in done.output
    assert "Traceback" not in done.output
    assert is_empty(state)


def test_a_broken_file_is_left_out_when_that_is_asked_for_and_said_ever_after(files, state, tmp_path):
    path = tmp_path / "traces" / "b"
    files("a", of(0))
    files("b", of(1), Unusable(f"{path}: byte 17: not JSON", path))
    files("c", of(2))
    output = imported(tmp_path / "traces", "--partial")
    assert f"  - left out: {path}: byte 17: not JSON" in output
    assert output[0] == "kineto, 3 files: ranks 0 and 2 of 4"
    found = evidence(state)
    assert sorted(found.ranks) == [0, 2]
    assert found.notes == [f"left out: {path}: byte 17: not JSON"]


def test_when_the_only_file_is_broken_nothing_is_left_to_import(files, state, tmp_path):
    path = tmp_path / "traces" / "a"
    files("a", Unusable(f"{path}: byte 17: not JSON", path))
    done = ran("import", path, "--job", "traced", "--partial")
    assert (done.exit_code, "byte 17" in done.output) == (2, True)
    assert is_empty(state)


def test_files_that_contradict_each_other_are_named_and_not_stored(files, state, tmp_path):
    files("a", of(0))
    files("b", of(0))
    done = ran("import", tmp_path / "traces", "--job", "traced")
    assert done.exit_code == 2
    assert f"{tmp_path / 'traces' / 'a'} and {tmp_path / 'traces' / 'b'} both tell what rank 0" in done.output
    assert is_empty(state)


def test_of_a_world_of_eight_the_ranks_in_it_are_used(files, state, tmp_path):
    for rank in (0, 1, 2, 3, 12):
        files(f"{rank:02}", of(rank, world_size=8))
    output = imported(tmp_path / "traces")
    assert output[0] == "kineto, 5 files: ranks 0–3 of 8"
    said = "12 is of rank 12, beyond a job of 8 ranks: it is left out"
    assert f"  - {said}" in output
    assert evidence(state).notes == [said]


# --- nodes


def test_nodes_are_as_the_command_says_and_else_as_the_files_do(files, state, tmp_path):
    for rank in range(4):
        files(f"{rank}", of(rank, node="from-file" if rank == 3 else ""))
    output = imported(tmp_path / "traces", "--node", "0-1=node-a", "--node", "2=node=b")
    assert output[0].endswith("on 3 nodes")
    assert {rank: one.node for rank, one in evidence(state).ranks.items()} == {
        0: "node-a",
        1: "node-a",
        2: "node=b",
        3: "from-file",
    }


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        (["x=node-a"], "does not say which rank ran where"),
        (["0="], "does not say which rank ran where"),
        (["5-2=node-a"], "is no range of ranks"),
        (["0-999999999=node-a"], "is no range of ranks"),
        (["0-3=node-a", "2=node-b"], "rank 2 is said to be on node-a and on node-b"),
        (["0-3=node-a"], "--node names ranks 1–3, of which these files tell nothing"),
    ],
)
def test_nodes_that_cannot_be_are_refused(files, state, nodes, words):
    path = files("a", of(0))
    done = ran("import", path, "--job", "traced", *[one for node in nodes for one in ("--node", node)])
    assert (done.exit_code, words in done.output) == (2, True)
    assert is_empty(state)


# --- time


def test_a_long_import_is_diagnosed_as_a_whole(files, state, monkeypatch):
    hour = 3600
    path = files("a", *(of(0, second) for second in range(0, 3 * hour, hour // 2)))
    imported(path)
    seen = []
    real = engine.diagnose
    monkeypatch.setattr(engine, "diagnose", lambda evidence: seen.append(evidence) or real(evidence))
    url = f"sqlite://{state / 'sysom.db'}"
    verdict = service.diagnose_job(url, "traced", now_ns=utc(0))
    assert seen[0].ranks[0].collectives.seq.tolist() == list(range(0, 3 * hour, hour // 2))
    assert not [words for words in verdict.not_seen if "newest data" in words]
    service.diagnose_job(url, "traced", now_ns=utc(0), last_ns=hour * SECOND)
    assert seen[1].ranks[0].collectives.seq.tolist() == [4 * hour // 2, 5 * hour // 2]


def test_instants_without_a_date_are_kept_and_said(files, state):
    batch = a_part(0)
    path = files("a", lambda path: Part(batch, THEN, THEN + SECOND, path, utc=False))
    output = imported(path)
    assert "  1.000 s, without a date" in output
    assert "  - the files tell no date: instants are counted from 1970-01-01" in output


# --- calls that cannot be


@pytest.mark.parametrize("job", ["", " ", "x" * 513])
def test_a_job_needs_a_name(files, job):
    done = ran("import", files("a", of(0)), "--job", job)
    assert done.exit_code == 2


def test_a_path_that_is_not_there_is_said(tmp_path, state):
    done = ran("import", tmp_path / "nowhere", "--job", "traced")
    assert (done.exit_code, "nowhere cannot be read" in done.output) == (2, True)
    assert is_empty(state)


def test_words_from_a_file_cannot_act_on_the_terminal(files):
    path = files("a", of(0), Note("odd \x1b[2J kernel"))
    assert "\x1b" not in "".join(imported(path))


# --- with the importers as they are


def test_each_importer_that_is_named_is_there():
    import importlib

    for module in probes.importers.MODULES.values():
        assert callable(importlib.import_module(module).read)


@recorded
@pytest.mark.parametrize(
    ("path", "first_line"),
    [
        ("flight-recorder/gpu_error_1st", "flight-recorder, 16 files: ranks 0–15"),
        ("flight-recorder/lock_gil_1st", "flight-recorder, 16 files: ranks 0–15"),
        ("kineto/two-of-128-ranks", "kineto, 2 files: ranks 0 and 1 of 128"),
        ("kineto/cpu-only-rank-34-of-300.json.gz", "kineto, 1 file: rank 34 of 300"),
    ],
)
def test_recorded_traces_are_imported_and_diagnosed(path, first_line):
    assert imported(DATA / path)[0] == first_line
    verdict = ran("diagnose", "traced", "--json")
    assert verdict.exit_code in (0, 1, 3)
    assert json.loads(verdict.output)["job"] == "traced"


@recorded
@pytest.mark.parametrize("cut", ["half of the gzip file", "half of the JSON", "the gzip file's last byte"])
def test_a_recorded_trace_that_is_cut_short_is_used_or_refused_and_that_is_said(state, tmp_path, cut):
    whole = (DATA / "kineto" / "two-of-128-ranks" / "sampled_rank-0.json.gz").read_bytes()
    plain = gzip.decompress(whole)
    path = tmp_path / "cut-trace"
    path.write_bytes(
        {
            "half of the gzip file": whole[: len(whole) // 2],
            "half of the JSON": plain[: len(plain) // 2],
            "the gzip file's last byte": whole[:-1],
        }[cut]
    )
    done = ran("import", path, "--job", "traced")
    assert "cut-trace" in done.output
    assert "Traceback" not in done.output
    if done.exit_code == 0:
        said = evidence(state).notes
        assert any("cut-trace" in note and "what is missing is not known" in note for note in said)
    else:
        assert (done.exit_code, is_empty(state)) == (2, True)


@recorded
@pytest.mark.parametrize("name", ["no-distributed-info.json.gz", "rank-not-found.json.gz"])
def test_recorded_traces_without_a_rank_are_refused_in_words(state, name):
    done = ran("import", DATA / "kineto" / "malformed" / name, "--job", "traced")
    assert (done.exit_code, name in done.output, "Traceback" in done.output) == (2, True, False)
    assert is_empty(state)
