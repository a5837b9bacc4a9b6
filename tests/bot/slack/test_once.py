"""What was here before is known, as long as it can come again."""

from __future__ import annotations

from bot.slack.once import Once


def test_the_second_time_is_known_and_the_newest_are_kept() -> None:
    once = Once(remembered=2)
    assert [once.again(id) for id in ("a", "a", "b", "a")] == [False, True, False, True]
    assert not once.again("c")  # the oldest, a, makes room
    assert once.again("b")
    assert not once.again("a")


def test_what_has_no_id_is_always_new() -> None:
    once = Once()
    assert not once.again("")
    assert not once.again("")
