"""Where nothing can be watched: `make run` says why, and shows a recording of a real run instead."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.stack import until
from bot.demo import show

ROOT = Path(__file__).resolve().parents[3]
WITHOUT_ROOT = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "--"]
"""Another user, who may still read what is root's: the interpreter may lie in a folder of root's alone."""
WITHOUT_BPF = ["setpriv", "--bounding-set", "-sys_admin,-bpf,-perfmon", "--"]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="takes capabilities away, which only root has")


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[str]:
    """What a command says until the demo is at its end; then Ctrl-C, and it must end well."""
    said = folder / "said.txt"
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("SYSOM_", "SLACK_", "PYTEST_"))}
    with said.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=kept | {"PYTHONDONTWRITEBYTECODE": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:

        def told() -> str | None:
            assert process.poll() is None, said.read_text()
            return text if "Ctrl-C ends everything" in (text := said.read_text()) else None

        yield until(told, "the demo's end", 120)
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(timeout=60)
    words = said.read_text()
    assert "Traceback" not in words
    assert "Stopping." in words


def names_the_fault_that_was_put_in(text: str) -> None:
    truth = re.search(r"The truth.*: process '(\S+)' was put on CPU (\d+) beside rank (\d)", text)
    assert truth, text
    intruder, _, rank = truth.groups()
    answer = text.partition("ada types: /sysom diagnose job-123")[2].partition("The truth")[0]
    assert f"job-123 is slow: rank {rank} on node-1" in answer
    assert f"CPU contention on rank {rank}" in answer
    assert re.search(rf"{intruder} \(pid \d+", answer)


def test_without_root_one_command_says_why_and_shows_a_recording(tmp_path: Path) -> None:
    prefix = WITHOUT_ROOT if os.geteuid() == 0 else []
    with running([*prefix, "make", "run"], tmp_path) as text:
        assert "Live watching is not possible here: watching a node needs root" in text
        assert "a recording instead, of a real run on " in text
        names_the_fault_that_was_put_in(text)
        page = re.search(r"Go on typing at (http://\S+)", text)
        assert page
        assert b"<html" in urllib.request.urlopen(page[1]).read().lower()


@as_root
def test_root_without_bpf_as_in_a_container_is_told_what_is_missing(tmp_path: Path) -> None:
    with running([*WITHOUT_BPF, ".venv/bin/sysom", "up", "--demo"], tmp_path) as text:
        assert "Live watching is not possible here: root without the capabilities CAP_BPF" in text
        names_the_fault_that_was_put_in(text)


def test_the_recording_is_small_whole_and_of_a_run_with_a_baseline() -> None:
    shown = show.recording()
    assert shown.cut_short == ""
    assert {rank.job for batch in shown.batches for rank in batch.ranks} == {show.JOB}
    seconds = [batch.end_ns / 1e9 for batch in shown.batches]
    assert 45 <= seconds[-1] - seconds[0] <= 90
    size = (ROOT / "bot/demo/recorded/contention.sysomrec").stat().st_size
    assert size < 500_000
