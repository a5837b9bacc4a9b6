"""Numbers and words that all surfaces share."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.cells import cell_len

from bot import wording
from diagnosis.accounting import PARTS
from diagnosis.causes import CATALOGUE
from diagnosis.verdict import AccountLine, Cleared
from tests.bot import verdicts


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0.00"),
        (0.424, "0.42"),
        (9.99, "9.99"),
        (9.996, "10.0"),
        (52.13, "52.1"),
        (99.96, "100"),
        (1234.4, "1,234"),
        (-3.0, "−3.00"),
        (-0.001, "0.00"),
        (math.nan, "unknown"),
        (-math.inf, "unknown"),
    ],
)
def test_three_digits_are_enough(value: float, said: str) -> None:
    assert wording.number(value).lstrip() == said


@pytest.mark.parametrize(("value", "said"), [(19.1, "+19.1"), (-0.3, "−0.30"), (0.001, "±0"), (-0.001, "±0")])
def test_differences_carry_their_sign(value: float, said: str) -> None:
    assert wording.signed(value) == said


def test_long_steps_are_said_in_seconds() -> None:
    assert wording.ms(0.04) == "0.0 ms"
    assert wording.ms(-0.04) == "0.0 ms"
    assert wording.ms(6.5) == "6.5 ms"
    assert wording.ms(-52.13) == "−52.1 ms"
    assert wording.ms(99.96) == "100 ms"
    assert wording.ms(9_999) == "9,999 ms"
    assert wording.ms(12_345) == "12.3 s"


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.962, "96 %"),
        (1.0, "100 %"),
        (0.997, "over 99 %"),
        (0.001, "under 1 %"),
        (0.0, "0 %"),
        (-0.2, "−20 %"),
    ],
)
def test_a_share_never_rounds_to_certainty(share: float, said: str) -> None:
    assert wording.percent(share) == said


def test_changes_are_relative_to_what_was() -> None:
    assert wording.change(52.1, 33.0) == "+58 %"  # 52.1 / 33.0 = 1.5788
    assert wording.change(33.0, 66.0) == "−50 %"
    assert wording.change(52.1, 0.0) == ""
    assert wording.change(math.nan, 33.0) == ""


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (1.0, "almost certain"),
        (0.95, "almost certain"),
        (0.9, "very likely"),
        (0.7, "likely"),
        (0.5, "possible"),
        (0.1, "a weak guess"),
    ],
)
def test_confidence_has_a_word_and_its_number(value: float, word: str) -> None:
    assert wording.confidence(value) == f"{word} ({wording.percent(value)})"


def test_ranks_are_said_in_runs() -> None:
    assert wording.ranks([3]) == "rank 3"
    assert wording.ranks([5, 0, 1, 2]) == "ranks 0–2 and 5"
    assert wording.ranks([0, 1]) == "ranks 0 and 1"
    assert wording.ranks([0, 1, 3]) == "ranks 0, 1 and 3"
    assert wording.ranks(range(1023)) == "ranks 0–1022"
    assert wording.ranks(range(0, 100, 2)).endswith("28, 30 and 34 more")  # 50 ranks, 16 said


def test_ranks_cleared_for_one_reason_stand_together() -> None:
    cleared = [Cleared(rank=0, why="a"), Cleared(rank=2, why="b"), Cleared(rank=1, why="a")]
    assert wording.cleared(replace(verdicts.SLOW, cleared=cleared)) == [
        ("ranks 0 and 1", "a"),
        ("rank 2", "b"),
    ]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-5, "just now"),
        (0, "just now"),
        (3, "3 s ago"),
        (119, "119 s ago"),
        (120, "2 min ago"),
        (7200, "2 h ago"),
        (172_800, "2 days ago"),
    ],
)
def test_ages(seconds: int, said: str) -> None:
    then = 1_796_000_000
    assert wording.age(then * 1_000_000_000, (then + seconds) * 1_000_000_000) == said


def test_a_trace_that_tells_no_date_has_no_age() -> None:
    assert wording.age(2_000 * 1_000_000_000, 1_796_000_000 * 1_000_000_000) == "no date"


def test_instants_are_utc_whatever_zone_they_came_in() -> None:
    assert wording.utc("2026-01-02T15:05:12+01:00") == "2026-01-02 14:05:12 UTC"
    assert wording.utc("2026-01-02T14:05:12.123456789Z") == "2026-01-02 14:05:12 UTC"
    assert wording.utc("yesterday") == "yesterday"


def test_every_part_of_a_step_has_a_short_name() -> None:
    assert max(len(part.label) for part in PARTS.values()) <= 26
    assert wording.part("blocked") == "asleep outside collectives"
    assert wording.metric("runnable") == "Waiting for a CPU"


def test_causes_have_the_title_of_the_catalogue():
    assert [wording.cause(cause.id) for cause in CATALOGUE] == [cause.title for cause in CATALOGUE]
    assert wording.cause("slow-io") == "Slow IO"  # of a newer server


def test_small_parts_are_summed_and_the_rows_still_add_up() -> None:
    parts = [AccountLine(part=f"p{n}", layer="os", ms=10.0 - n, peers_ms=0.0) for n in range(6)]
    table = wording.account_table(replace(verdicts.SLOW, account=parts, unexplained_ms=-1.5), 3)
    rows = [line.split("  ") for line in table.split("\n")]
    assert [row[0] for row in rows] == [
        "ms per step",
        "p0",
        "p1",
        "4 other parts",
        "unexplained",
        "whole step (mean)",
    ]
    # 10 + 9 + (8 + 7 + 6 + 5) − 1.5 = 43.5
    assert [[cell for cell in row if cell.strip()][1].strip() for row in rows[1:]] == [
        "10.0",
        "9.0",
        "26.0",
        "−1.5",
        "43.5",
    ]


def test_parts_that_take_no_time_are_left_out_and_own_time_comes_first() -> None:
    parts = [
        AccountLine(part="waiting", layer="nccl", ms=2.0, peers_ms=21.0),
        AccountLine(part="stolen", layer="os", ms=0.01, peers_ms=0.0),
        AccountLine(part="running", layer="os", ms=8.0, peers_ms=8.01),
        AccountLine(part="blocked", layer="os", ms=18.0, peers_ms=18.0),
        AccountLine(part="runnable", layer="os", ms=20.0, peers_ms=1.0),
    ]
    table = wording.account_table(replace(verdicts.SLOW, account=parts))
    first = [line.split("  ")[0] for line in table.split("\n")]
    assert first[1:-2] == [PARTS[part].label for part in ("runnable", "waiting", "blocked", "running")]


def test_a_piece_of_text_becomes_a_sentence() -> None:
    assert wording.sentence("stress-7f (pid 4411) had the CPU") == "stress-7f (pid 4411) had the CPU."
    assert wording.sentence("rank 1 sleeps.") == "Rank 1 sleeps."
    assert wording.sentence("it has not come") == "It has not come."


@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), min_size=1, max_size=5))
def test_a_table_is_aligned_in_terminal_columns(rows: list[tuple[str, str]]) -> None:
    clean = [[wording.visible(cell) for cell in row] for row in rows]
    lines = wording.table(clean).split("\n")
    widths = [max(cell_len(row[column]) for row in clean) for column in (0, 1)]
    for row, line in zip(clean, lines, strict=True):
        if row[1]:
            assert cell_len(line) == sum(widths) + 2


@given(st.text(max_size=300), st.integers(min_value=20, max_value=100))
def test_shown_text_is_one_visible_line_of_a_bounded_length(text: str, limit: int) -> None:
    shown = wording.shown(text, limit)
    assert len(shown) <= limit
    assert not shown or shown.replace(" ", "x").isprintable()
    shown.encode()


def test_what_was_cut_is_counted() -> None:
    assert wording.shown("x" * 100, 20) == "x" * 12 + "… (+88)"
    assert wording.shown("x" * 100_000, 20).startswith("xxxx")


def test_piles_of_marks_do_not_grow_out_of_their_line() -> None:
    assert wording.visible("a" + "\u0301" * 50) == "a\u0301\u0301"
