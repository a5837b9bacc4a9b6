"""The terminal's form of a verdict: the numbers of Slack's form, in plain text of 100 columns."""

from __future__ import annotations

import re

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.cells import cell_len

from bot.rendering import environment, jobs_text, terminal, verdict_text
from bot.slack import messages
from diagnosis.store import JobInfo
from tests.bot import verdicts

SECOND = 1_000_000_000


def test_a_slow_job_in_full() -> None:
    assert (
        verdict_text(verdicts.SLOW)
        == """\
job-123 is slow: rank 2 on node-7

The median step takes 52.1 ms since 2026-01-02 14:05:12 UTC; before, it took 33.0 ms (+58 %).
4 of 4 ranks seen · 5,530 steps · 2026-01-02 14:00:00 to 14:10:00 UTC

CPU contention on rank 2, node-7 (operating system)
stress-7f (pid 4411) had the CPU for 18.4 ms of each step while rank 2 wanted it.
It costs 19.1 ms of each step and explains 96 % of this rank’s extra time.
How sure: almost certain (97 %). Owner of the fix: whoever runs the node.

What next
1. Stop or move pid 4411 (stress-7f) on node-7
2. Pin the ranks of job-123 to CPUs of their own

Where the time goes
ms per step                 rank 2  peers   more
waiting for a CPU             19.9    0.4  +19.5
waiting for peers              0.6   19.7  −19.1
running on a CPU              30.6   30.9   −0.3
asleep outside collectives     0.5    0.6   −0.1
interrupts                     0.2    0.2    0.0
unexplained                    0.3
whole step (mean)             52.1

Evidence
  • Late into collectives (nccl), rank 2: 19.2 ms/step, peers 0.10 (+19.1; q < 0.001)
  • Waiting for a CPU (os), rank 2: 19.9 ms/step, peers 0.40 (+19.5; q < 0.001)

Cleared
  • ranks 0, 1 and 3: waited for rank 2

Ruled out
  • Runs longer: it ran 30.6 ms of each step, its peers 30.9 ms

Not seen
  • GPU: no probe was on
  • the hypervisor: stolen time is estimated

page: https://sysom.example/jobs/job-123
"""
    )


@pytest.mark.parametrize("kind", verdicts.ALL)
def test_slack_shows_no_number_that_the_terminal_does_not(kind: str) -> None:
    verdict = verdicts.ALL[kind]
    root, details = messages.root(verdict, "UABC"), messages.details(verdict)
    said = str(root.blocks) + (str(details.blocks) if details else "")
    said = re.sub(r"<!date[^|]*\\|[^>]*>|<!date[^>]*>|<https[^>]*>", "", said)
    text = verdict_text(verdict)
    quantities = re.findall(r"[\d,.]*\d (?:ms|%)|[+−][\d,.]*\d", said)
    assert quantities or kind == "insufficient"
    assert [quantity for quantity in quantities if quantity not in text] == []


@pytest.mark.parametrize("kind", verdicts.ALL)
def test_every_kind_begins_with_its_headline(kind: str) -> None:
    first = verdict_text(verdicts.ALL[kind]).split("\n")[0]
    assert messages.root(verdicts.ALL[kind], "U1AB").blocks[0]["text"]["text"].endswith(first)


@settings(max_examples=30, deadline=None)
@given(st.one_of(st.just(verdicts.EVIL), st.text(max_size=60), st.sampled_from(["x" * 500, "火" * 200, ""])))
def test_no_name_moves_the_cursor_or_leaves_the_100_columns(evil: str) -> None:
    text = verdict_text(verdicts.hostile(evil, many=3))
    assert all(character == "\n" or character.isprintable() or character == " " for character in text)
    assert max(cell_len(line) for line in text.split("\n")) <= 100
    text.encode()


def test_a_long_line_goes_on_under_its_own_text() -> None:
    verdict = replace(verdicts.SLOW, not_seen=["word " * 40])
    lines = verdict_text(verdict).split("\n")
    start = lines.index("Not seen") + 1
    assert lines[start].startswith("  • word")
    assert lines[start + 1].startswith("    word")


def test_numbered_lines_go_on_under_their_text_and_instants_are_utc() -> None:
    verdict = replace(
        verdicts.SLOW, actions=["see what was changed at 2026-01-02T14:05:12.345Z " + "word " * 30]
    )
    lines = verdict_text(verdict).split("\n")
    start = lines.index("What next") + 1
    assert lines[start].startswith("1. see what was changed at 2026-01-02 14:05:12 UTC word")
    assert lines[start + 1].startswith("   word")


def test_the_list_of_jobs() -> None:
    now = 1_796_000_000 * SECOND
    jobs = [
        JobInfo("job-123", 4, 4, 1, now - 7200 * SECOND, now - 3 * SECOND),
        JobInfo("a\x1b[2Jb", 1024, 1000, 128, now - 300 * SECOND, now - 240 * SECOND),
    ]
    assert (
        jobs_text(jobs, now)
        == """\
job             ranks  nodes  newest data  first seen
job-123        4 of 4      1      3 s ago     2 h ago
a�[2Jb   1000 of 1024    128    4 min ago   5 min ago
"""
    )
    no_date = JobInfo("trace", 64, 16, 0, 0, 2_000 * SECOND, "operations")
    assert jobs_text([no_date], now).splitlines()[1].split() == [
        "trace",
        "16",
        "of",
        "64",
        "–",
        *["no", "date"] * 2,
    ]
    assert jobs_text([], now).startswith("No job has been seen yet.")


def test_a_template_cannot_forget_to_escape() -> None:
    made = environment(lambda value: str(value).upper())
    assert (
        made.from_string("literal {{ data }} {% if data %}{{ data }}{% endif %}").render(data="a")
        == "literal A A"
    )


def test_a_misspelt_name_in_a_template_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        terminal().from_string("{{ verdikt.job }}").render()
