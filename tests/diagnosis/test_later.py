"""What is read when somebody looks."""

import pytest

from diagnosis.later import Later, Once


def test_it_is_read_once_when_somebody_asks():
    read = []

    def answer(number):
        read.append(number)
        return {"a": number}

    once, later = Once(answer, 1), Later(answer, 2)
    assert read == []
    assert once() is once()
    assert (later["a"], dict(later), len(later), repr(later)) == (2, {"a": 2}, 1, "{'a': 2}")
    assert read == [1, 2]


def test_what_could_not_be_read_is_read_again():
    answers = iter([ValueError("damaged"), 7])

    def answer():
        got = next(answers)
        if isinstance(got, Exception):
            raise got
        return got

    once = Once(answer)
    with pytest.raises(ValueError, match="damaged"):
        once()
    assert once() == 7
