"""The rules that tell why a thread is blocked, on stacks recorded on this kernel and told by users of others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from probes.bpf import SOURCES
from probes.host import reasons
from probes.host.reasons import REASONS, reason_of

LINES = (Path(__file__).parent / "kernel_stacks.txt").read_text().splitlines()
STACKS = [tuple(line.split(": ")) for line in LINES if not line.startswith("#")]


@pytest.mark.parametrize(("reason", "stack"), STACKS)
def test_a_stack_has_its_reason(reason: str, stack: str) -> None:
    assert reason_of(stack.split()) == reason


def test_each_reason_was_recorded() -> None:
    assert {reason for reason, _ in STACKS} == set(REASONS) - {""}


def test_a_stack_of_which_nothing_is_known_is_other() -> None:
    assert reason_of([]) == "other"
    assert reason_of(["__schedule", "schedule", "nvidia_ioctl", ""]) == "other"


def test_every_rule_s_reason_has_a_number_and_the_kernel_has_room_for_all() -> None:
    room = re.search(r"#define REASONS (\d+)", (SOURCES / "thread_time.h").read_text())
    assert room is not None
    assert int(room[1]) == len(REASONS) == len(set(REASONS))
    assert REASONS[reasons.UNKNOWN] == ""
    named = {rule.reason for rule in (*reasons.ANYWHERE, *reasons.INNERMOST_FIRST)} - {reasons._STORAGE}
    named |= {reason for calls in reasons.CALLS.values() for reason in calls}
    assert named < set(REASONS)
