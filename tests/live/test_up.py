"""`make run` without a Slack: one command, a real job, a real fault, the answer in the workspace."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest

from bench.stack import until
from probes.bpf import Kernel

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]


def test_one_command_names_the_process_and_leaves_nothing_behind(
    root_and_bpf: Kernel, tmp_path: Path
) -> None:
    said = tmp_path / "said.txt"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("SYSOM_", "SLACK_"))
    }
    folders = demo_folders()
    with said.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "bot.cli", "up", "--demo"],
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:

        def told() -> str | None:
            assert process.poll() is None, said.read_text()
            return text if "Ctrl-C ends everything" in (text := said.read_text()) else None

        text = until(told, "the demo's end", 400)
        truth = re.search(r"The truth: process '(\S+)' was put on CPU (\d+) beside rank (\d)", text)
        assert truth, text
        intruder, _, rank = truth.groups()
        answer = text.partition("ada types: /sysom diagnose job-123")[2].partition("The truth:")[0]
        assert f"job-123 is slow: rank {rank} on " in answer
        assert f"CPU contention on rank {rank}" in answer
        assert re.search(rf"{intruder} \(pid \d+", answer)
        page = re.search(r"Go on typing at (http://\S+)", text)
        assert page
        assert b"<html" in urllib.request.urlopen(page[1]).read().lower()
    finally:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does at Ctrl-C
        status = process.wait(timeout=60)
    words = said.read_text()
    assert status == 0, words
    assert "Traceback" not in words
    assert not members(process.pid, intruder)
    assert demo_folders() == folders


def demo_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("sysom-demo-*"))


def members(session: int, intruder: str) -> list[str]:
    """Processes of the demo that still run: of its session, marked as its job's, its agent, its fault."""
    left = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                in_session = int((folder / "stat").read_text().rpartition(")")[2].split()[3]) == session
                told = (folder / "environ").read_bytes()
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, IndexError):
                continue
            of_job = b"SYSOM_JOB_ID=job-123\0" in told or b"/sysom-demo-" in told
            if in_session or of_job or intruder in line:
                left.append(line)
    return left
