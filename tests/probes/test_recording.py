"""Recordings: written as they come, read up to where they are whole, played as if it were now."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probes import codec, recording, records
from probes.codec import RecordError
from probes.recording import FLUSH_BATCHES, Header, RecordingError, Writer, read
from probes.replay import end_utc_ns, play, retimed, to_server
from tests.probes.batches import a_batch

HEADER = Header(
    node="node-1", made_ns=1_796_000_000_000_000_000, kernel="6.18", cpus=2, note="a hog on rank 1"
)


def add(writer: Writer, count: int) -> None:
    for second in range(count):
        writer.add(a_batch(second))


def made(path: Path, count: int, *, close: bool = True) -> Writer:
    writer = Writer(path, HEADER)
    add(writer, count)
    if close:
        writer.close()
    return writer


def test_what_was_recorded_is_what_is_read(tmp_path: Path) -> None:
    made(tmp_path / "r", 25)
    found = read(tmp_path / "r")
    assert (found.header, found.cut_short) == (HEADER, "")
    assert found.batches == [a_batch(second) for second in range(25)]


def test_a_recording_is_its_owners_alone(tmp_path: Path) -> None:
    made(tmp_path / "r", 1)
    assert (tmp_path / "r").stat().st_mode & 0o777 == 0o600


def test_of_a_recorder_that_was_killed_all_but_the_last_seconds_can_be_played(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            made(tmp_path / "r", 3 * FLUSH_BATCHES + 4, close=False)
        finally:
            os._exit(0)  # as SIGKILL: nothing is flushed or ended
    os.waitpid(child, 0)
    found = read(tmp_path / "r")
    assert found.batches == [a_batch(second) for second in range(3 * FLUSH_BATCHES)]
    assert "cut short" in found.cut_short
    assert "30 batches are whole" in found.cut_short


def test_a_file_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("precious")
    with pytest.raises(RecordingError, match="give the recording another name"):
        Writer(tmp_path / "r", HEADER)
    assert (tmp_path / "r").read_text() == "precious"


def test_on_a_full_disk_the_recorder_says_so_and_what_is_there_stays(tmp_path: Path, monkeypatch) -> None:
    writer = made(tmp_path / "r", FLUSH_BATCHES, close=False)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer._file.fileno())
    with pytest.raises(RecordingError, match=r"No space left on device.*its \d+ batches so far"):
        add(writer, FLUSH_BATCHES)
    os.close(full)
    assert len(read(tmp_path / "r").batches) == FLUSH_BATCHES


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not a recording of sysom"),
        (b"PK\x03\x04", "is not a recording of sysom"),
        (recording.MAGIC, "is damaged before its first batch"),
        (recording.MAGIC + b"not zstd", "is damaged before its first batch"),
    ],
)
def test_what_is_no_recording_is_refused_in_words(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "r").write_bytes(content)
    with pytest.raises(RecordingError, match=words):
        read(tmp_path / "r")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_happened_to_a_file_it_is_read_in_part_or_refused(tmp_path_factory, data) -> None:
    path = tmp_path_factory.mktemp("r") / "r"
    made(path, 12)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        found = read(path)
    except RecordingError:
        return
    assert found.batches == [a_batch(second) for second in range(len(found.batches))]


# --- playing


def played(path: Path, **how) -> list[records.Batch]:
    out: list[records.Batch] = []
    play(
        retimed([read(path)], 5_000_000_000_000_000_000 >> 1, **how),
        lambda node, wire: out.append(codec.decode(wire)),
        live=False,
        wait=pytest.fail,
    )
    return out


def test_a_replay_ends_now_and_keeps_everything_else(tmp_path: Path) -> None:
    made(tmp_path / "r", 12)
    out = played(tmp_path / "r")
    assert end_utc_ns(out[-1]) == 5_000_000_000_000_000_000 >> 1
    originals = [a_batch(second) for second in range(12)]
    assert [b.ranks for b in out] == [b.ranks for b in originals]
    between = [end_utc_ns(b) - end_utc_ns(a) for a, b in itertools.pairwise(out)]
    assert between == [end_utc_ns(b) - end_utc_ns(a) for a, b in itertools.pairwise(originals)]


def test_each_replay_is_stored_anew(tmp_path: Path) -> None:
    made(tmp_path / "r", 3)
    names = [{(b.boot_id, b.agent, b.seq) for b in played(tmp_path / "r")} for _ in range(2)]
    assert len(names[0]) == len(names[1]) == 3
    assert not names[0] & names[1]


def test_nodes_are_played_in_the_order_of_their_clocks(tmp_path: Path) -> None:
    paths = []
    for number, seconds in enumerate(([0, 2, 4], [1, 3])):
        path = tmp_path / f"r{number}"
        writer = Writer(path, HEADER)
        for second in seconds:
            writer.add(msgspec.structs.replace(a_batch(second), node=f"node-{number}"))
        writer.close()
        paths.append(path)
    batches = list(retimed([read(path) for path in paths], 10**18))
    assert [batch.node for batch in batches] == ["node-0", "node-1", "node-0", "node-1", "node-0"]
    assert len({batch.boot_id for batch in batches}) == 2


def test_a_job_gets_another_name_everywhere(tmp_path: Path) -> None:
    made(tmp_path / "r", 2)
    out = played(tmp_path / "r", job="job-7")
    assert {rank.job for batch in out for rank in batch.ranks} == {"job-7"}
    assert not [e for b in out for e in b.events if e.job not in ("", "job-7")]


def test_an_empty_recording_cannot_be_played_and_says_why(tmp_path: Path) -> None:
    made(tmp_path / "r", 0)
    with pytest.raises(RecordingError, match="ended before its first second was over"):
        list(retimed([read(tmp_path / "r")], 10**18))


def test_live_waits_for_each_second(tmp_path: Path, monkeypatch) -> None:
    made(tmp_path / "r", 3)
    found = read(tmp_path / "r")
    length = end_utc_ns(found.batches[-1]) - end_utc_ns(found.batches[0])
    clock = [10**18]
    monkeypatch.setattr("probes.replay.time.time_ns", lambda: clock[0])
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        clock[0] += round(seconds * 1e9)

    play(retimed([found], 10**18 + length), lambda node, wire: None, live=True, wait=wait)
    assert sum(waits) == pytest.approx(length / 1e9)
    assert len(waits) == 2


def test_plain_batches_are_checked_as_those_from_the_wire_are() -> None:
    with pytest.raises(RecordError, match="not a batch"):
        codec.from_plain(b"\xc1")


def served(*answers: httpx.Response) -> tuple[httpx.Client, list[float]]:
    """A client of a server that gives these answers, one after the other; and what was waited between."""
    left = iter(answers)
    client = httpx.Client(transport=httpx.MockTransport(lambda request: next(left)), base_url="http://server")
    return client, []


STORED = {"stored": True, "orders": "", "signature": ""}


def test_a_server_that_is_behind_is_waited_for_as_it_asks() -> None:
    busy = [httpx.Response(429, headers={"Retry-After": "3"}), httpx.Response(503)]
    client, waits = served(*busy, httpx.Response(200, json=STORED))
    to_server(client, wait=waits.append)("node-1", b"batch")
    assert waits == [3.0, 0.2]


def test_a_page_of_something_on_the_way_is_no_receipt() -> None:
    client, waits = served(httpx.Response(200, text="<html>Please log in</html>"))
    with pytest.raises(RecordingError, match="does not take the batch of node 'node-1': 200 <html>Please"):
        to_server(client, wait=waits.append)("node-1", b"batch")
