"""How messages read: the right words in the right order, on one screen, whatever the names are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bot.slack import grammar, limits, messages
from bot.slack.blocks import Message
from bot.workspace import mrkdwn as slack
from bot.workspace.limits import check_blocks
from diagnosis.store import JobInfo, StoreError, UnknownJob
from diagnosis.verdict import Verdict
from tests.bot import verdicts

NOW_NS = 1_767_363_000_000_000_000
SECOND = 1_000_000_000


def read(message: Message | None) -> str:
    """All texts of the blocks, a block per paragraph."""
    assert message is not None
    return "\n\n".join(_text(block) for block in message.blocks)


def _text(block: dict[str, Any]) -> str:
    if block["type"] in ("header", "section"):
        return str(block["text"]["text"])
    element = block["elements"][0]
    return str(element["text"] if block["type"] == "context" else element["elements"][0]["text"])


def test_a_slow_job_reads_from_what_to_why_to_what_next() -> None:
    said = read(messages.root(verdicts.SLOW, "U123ABC"))
    in_order = [
        "🔴 job-123 is slow: rank 2 on node-7",
        "The median step takes *52.1 ms* since <!date^1767362712^",
        "before, it took *33.0 ms* (+58 %)",
        "*CPU contention* on rank 2, `node-7` (operating system)",
        "stress-7f (pid 4411) had the CPU for 18.4 ms",
        "costs *19.1 ms* of each step and explains 96 %",
        "How sure: *almost certain (97 %)*. Owner of the fix: whoever runs the node.",
        "1. Stop or move pid 4411",
        "waiting for a CPU",
        "4 of 4 ranks seen · 5,530 steps",
        "Not seen: GPU: no probe was on (and 1 more)",
        "Asked by <@U123ABC> · evidence and the rest in the thread",
        "<https://sysom.example/jobs/job-123|page>",
    ]
    places = [said.index(words) for words in in_order]
    assert places == sorted(places)


def test_the_account_adds_up() -> None:
    said = read(messages.root(verdicts.SLOW, "U123ABC"))
    # 30.6 + 19.9 + 0.6 + 0.5 + 0.2 and 0.3 unexplained
    assert "whole step (mean)             52.1" in said
    assert "waiting for a CPU             19.9    0.4  +19.5" in said


def test_the_thread_holds_what_the_root_has_no_room_for() -> None:
    said = read(messages.details(verdicts.SLOW))
    assert "*Waiting for a CPU* (os), rank 2: 19.9 ms/step, peers 0.40 (+19.5; q &lt; 0.001)" in said
    assert "• ranks 0, 1 and 3: waited for rank 2" in said
    assert "• Runs longer: it ran 30.6 ms of each step, its peers 30.9 ms" in said
    assert "• the hypervisor: stolen time is estimated" in said


def test_a_healthy_job_blames_nobody_and_says_what_was_not_seen() -> None:
    root = messages.root(verdicts.HEALTHY, "U123ABC")
    said = read(root)
    assert said.startswith("🟢 job-123 is healthy")
    assert "All 4 ranks keep step" in said
    assert "\nNot seen: GPU: no probe was on\n" in read(Message("", root.blocks[-1:]))
    assert "Owner of the fix" not in said


def test_what_a_machine_never_tells_is_said_in_the_thread_only() -> None:
    verdict = replace(verdicts.SLOW, not_seen=["probe machine on vm, in part: cpufreq is not told"])
    assert "Not seen" not in read(messages.root(verdict, "U123ABC"))
    assert "• probe machine on vm, in part: cpufreq is not told" in read(messages.details(verdict))


def test_too_little_evidence_says_what_is_missing_and_what_to_do() -> None:
    said = read(messages.root(verdicts.INSUFFICIENT, "U123ABC"))
    assert said.startswith("⚪ job-123: not enough evidence")
    assert "*What is missing*\n• ranks 1–3: no agent reported them" in said
    assert "1. Start sysom agent on the nodes of ranks 1–3" in said
    assert "How sure" not in said
    assert messages.details(verdicts.INSUFFICIENT) is None


def test_a_hang_says_since_when_nothing_moves() -> None:
    said = read(messages.root(verdicts.HANG, "U123ABC"))
    assert said.startswith("⛔ job-123 hangs: rank 2 on node-7")
    assert "No step has ended since <!date^1767362820^" in said
    assert "*Rank 2 holds up the others* on `node-7`" in said
    assert "costs" not in said


def test_a_culprit_without_a_cause_is_named_and_the_cause_is_not() -> None:
    said = read(messages.root(verdicts.NO_CAUSE, "U123ABC"))
    assert "no single known cause explains enough of it, the best one 43 %" in said
    assert "(layer unknown)" in said
    assert "How sure: *possible (55 %)*. Owner of the fix: not known." in said


def test_a_slow_job_without_a_culprit_is_the_jobs() -> None:
    said = read(messages.root(verdicts.NOBODY, "U123ABC"))
    assert "job-123 is slow: no single rank is to blame" in said
    assert "All ranks turned slow together" in said
    assert "Owner of the fix: whoever runs the job." in said
    assert "median rank" in read(messages.details(verdicts.NOBODY))


def test_several_culprits_are_all_named_and_the_sum_is_said() -> None:
    said = read(messages.root(verdicts.SEVERAL, "U123ABC"))
    assert "rank 2 on node-7 and 2 more" in said
    assert "Also *rank 5* on `node-9`: Runs longer, *6.5 ms* of each step" in said
    assert "Also *rank 6* on `node-9`: no known cause" in said
    assert "Together they cost *24.4 ms* of each step." in said
    assert "*Runs longer* on rank 5" in read(messages.details(verdicts.SEVERAL))


@pytest.mark.parametrize("kind", verdicts.ALL)
def test_the_root_fits_one_screen(kind: str) -> None:
    root = messages.root(verdicts.ALL[kind], "U123ABC")
    assert len(read(root).replace("\n\n", "\n").split("\n")) <= 28
    assert sum(map(limits.weight, root.blocks)) < 2000


@pytest.mark.parametrize("kind", verdicts.ALL)
def test_slacks_own_rules_accept_every_verdict(kind: str) -> None:
    for message in (messages.root(verdicts.ALL[kind], "U123ABC"), messages.details(verdicts.ALL[kind])):
        if message is not None:
            assert limits.problems(message.text, message.blocks) == []
            assert check_blocks(list(message.blocks)) == []


def _leaves(message: Message) -> list[dict[str, Any]]:
    """What Slack reads in all mrkdwn of a message, the fallback text included."""
    texts = [message.text]
    for block in message.blocks:
        for node in (block.get("text"), *block.get("elements", ())):
            if node and node.get("type") == "mrkdwn":
                texts.append(node["text"])
    return [leaf for text in texts for part in slack.parse(text) for leaf in _flat(part)]


def _flat(node: dict[str, Any]) -> list[dict[str, Any]]:
    inner = node.get("elements")
    return [leaf for child in inner for leaf in _flat(child)] if inner is not None else [node]


@settings(max_examples=25, deadline=None)
@given(
    evil=st.one_of(
        st.just(verdicts.EVIL), st.text(max_size=80), st.sampled_from(["", " ", "x" * 5000, "é🦊" * 900])
    ),
    many=st.sampled_from([1, 3, 40]),
)
def test_no_name_can_ping_or_break_the_limits(evil: str, many: int) -> None:
    verdict = verdicts.hostile(evil, many)
    for message in (messages.root(verdict, evil), messages.details(verdict)):
        assert message is not None
        assert limits.problems(message.text, message.blocks) == []
        assert check_blocks(list(message.blocks)) == []
        kinds = {leaf["type"] for leaf in _leaves(message)}
        assert kinds <= {"text", "date", "link"}
        links = [leaf["url"] for leaf in _leaves(message) if leaf["type"] == "link"]
        assert all(url.startswith("https://x.example/") for url in links)


def test_what_is_left_out_is_said() -> None:
    said = read(messages.root(verdicts.hostile(many=40), "U123ABC"))
    assert "… and 36 more" in said
    assert "36 other parts" in said
    many = replace(verdicts.SLOW, evidence=verdicts.SLOW.evidence * 100)
    assert "more lines left out" in read(messages.details(many))


def test_what_the_headline_says_is_not_said_again() -> None:
    why = "no agent watches ranks 1–3"
    verdict = replace(
        verdicts.INSUFFICIENT, summary=f"Not enough evidence: {why}.", not_seen=[why, "GPU: no probe"]
    )
    said = read(messages.root(verdict, "U1AB"))
    assert "No agent watches ranks 1–3." in said
    assert "*What is missing*\n• GPU: no probe\n" in said + "\n"
    assert said.count("ot enough evidence") == 1


def test_instants_in_sentences_are_in_the_readers_time_zone_too() -> None:
    verdict = replace(verdicts.NOBODY, summary="Slower since 2026-01-02T14:05:12.345Z.")
    assert "Slower since <!date^1767362712^" in read(messages.root(verdict, "U1AB"))


def test_numbers_that_are_none_are_said_as_such() -> None:
    broken = replace(
        verdicts.SLOW,
        step_ms=float("nan"),
        cost_ms_per_step=float("inf"),
        unexplained_ms=float("nan"),
        confidence=2.0,
    )
    assert "The median step takes *unknown ms*" in read(messages.root(broken, "U1AB"))


def test_progress_says_who_asked_for_what_and_how_long_it_takes() -> None:
    assert "<@U123ABC> asked about `job-123`" in read(messages.progress("job-123", "U123ABC"))
    assert "(7 s)" in read(messages.progress("job-123", "U123ABC", 7.9))


def test_the_list_of_jobs() -> None:
    known = [JobInfo("job-123", 4, 3, 2, NOW_NS - 7200 * SECOND, NOW_NS - 3 * SECOND)]
    assert read(messages.jobs(known, NOW_NS)) == (
        "*Jobs, the newest data first*\n"
        "• `job-123` · 3 of 4 ranks on 2 nodes · data 3 s ago · first seen 2 h ago"
    )
    assert "… and 5 more" in read(messages.jobs(known * 25, NOW_NS))
    assert "No job has been seen yet" in read(messages.jobs([], NOW_NS))


def test_errors_say_what_to_do() -> None:
    assert "Did you mean `job-123`, `job-12`?" in read(
        messages.unknown_job(UnknownJob("job-1", ["job-123", "job-12"]))
    )
    assert "Did you mean" not in read(messages.unknown_job(UnknownJob("job-1", [])))
    assert "disk is full: make room" in read(
        messages.store_failed(StoreError("disk is full: make room"), "job-1")
    )
    assert "`ab12cd34`" in read(messages.unexpected("ab12cd34", "job-1"))
    error = grammar.GrammarError("Which job?", "/sysom diagnose JOB", "/sysom jobs")
    assert read(messages.not_understood(error)) == "Which job?\nType `/sysom diagnose JOB` or `/sysom jobs`."
    assert "/invite @sysom" in read(messages.uninvited("sysom"))
    assert "/invite @sysomx" in read(messages.uninvited("sysom <!here>x".replace(" <!here>", "<>")))


@pytest.mark.parametrize("status", ["healthy", "slow", "hang", "insufficient"])
def test_an_empty_verdict_of_each_kind_can_be_said(status: Any) -> None:
    bare = Verdict(job="j", window=verdicts.WINDOW, status=status)
    root = messages.root(bare, "U123ABC")
    assert limits.problems(root.text, root.blocks) == []
    assert messages.details(bare) is None
