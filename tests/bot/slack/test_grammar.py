"""What people type after /sysom, and what they are told when it is no command."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bot.slack.grammar import Diagnose, GrammarError, Help, Jobs, parse


@pytest.mark.parametrize(
    ("typed", "job"),
    [
        ("diagnose job-123", "job-123"),
        ("  DIAGNOSE   job-123  ", "job-123"),
        ("diagnose `job-123`", "job-123"),
        ("diagnose “job-123”", "job-123"),
        ("diagnose ‘job-123’", "job-123"),
        ("diagnose *job-123*", "job-123"),
        ("diagnose *`job-123`*", "job-123"),
        ("`diagnose job-123`", "job-123"),
        ("/sysom diagnose job-123", "job-123"),
        ("diagnose\u00a0job-123", "job-123"),
        ("diagnose job-\u200b123\u202e", "job-123"),
        ("diagnose a&amp;b", "a&b"),
        ("diagnose <http://job.example|job.example>", "job.example"),
        ('diagnose "my job"', "my job"),
        ("diagnose jobs", "jobs"),
        ("diagnose help", "help"),
        ("diagnose a_b_c", "a_b_c"),
        ("diagnose it's", "it's"),
        ("diagnose " + "x" * 253, "x" * 253),
    ],
)
def test_a_job_is_taken_as_it_was_meant(typed: str, job: str) -> None:
    assert parse(typed) == Diagnose(job)


@pytest.mark.parametrize(
    "typed", ["", "   ", "help", "Help", "--help", "?", "help diagnose", "\u200b", "/sysom"]
)
def test_nothing_or_help_is_a_call_for_help(typed: str) -> None:
    assert parse(typed) == Help()


def test_jobs_lists_the_jobs() -> None:
    assert parse("jobs") == Jobs()


@pytest.mark.parametrize(
    ("typed", "says", "suggests"),
    [
        ("diagnose", "Which job?", ("/sysom diagnose JOB", "/sysom jobs")),
        ("diagnose ``", "empty", ("/sysom jobs",)),
        ("diagnos job-1", "“diagnos” is not a command", ("/sysom diagnose job-1",)),
        ("job", "“job” is not a command", ("/sysom jobs",)),
        ("job-123", "“job-123” is not a command", ("/sysom diagnose job-123", "/sysom help")),
        ("restart job-123", "“restart” is not a command", ("/sysom help",)),
        ("jobs job-123", "stands alone", ("/sysom jobs", "/sysom diagnose job-123")),
        (
            "diagnose job-1 job-2",
            "takes one job, and these are 2 words",
            ("/sysom diagnose job-1", '/sysom diagnose "job-1 job-2"'),
        ),
        ("diagnose " + "x" * 254, "254 characters", ("/sysom jobs",)),
        ("x" * 1001, "1,001 characters", ("/sysom diagnose JOB",)),
    ],
)
def test_a_mistake_is_answered_with_what_to_type(typed: str, says: str, suggests: tuple[str, ...]) -> None:
    with pytest.raises(GrammarError) as caught:
        parse(typed)
    assert says in str(caught.value)
    assert caught.value.suggestions == suggests


@given(st.text(max_size=1200))
def test_any_text_is_a_command_or_a_short_error(typed: str) -> None:
    said: tuple[str, ...] = ()
    job = "none"
    try:
        command = parse(typed)
        job = command.job if isinstance(command, Diagnose) else job
    except GrammarError as error:
        said = (str(error), *error.suggestions)
    assert all(0 < len(text) < 200 for text in said)
    assert 0 < len(job) <= 253
    assert job == job.strip()
