"""From a store's address to a verdict."""

import pickle

import pytest

from bench.synthetic import T0, build, contended, plan, scaled, without
from diagnosis import service, wording
from diagnosis.evidence import Evidence
from diagnosis.service import diagnose_job
from diagnosis.store import JobInfo, Store, UnknownJob

MINUTE = 60 * 10**9


class OneJob:
    """A store that holds one job and remembers how it was asked."""

    def __init__(self) -> None:
        self.whole, _ = build(contended(plan(), 2, 18.0))
        self.asked: list[tuple[int, int]] = []
        self.closed = False
        self.began_ns = T0 - 200 * MINUTE
        self.newest: Evidence | None = None
        """Of the last ten minutes, where that is not the whole."""

    def jobs(self) -> list[JobInfo]:
        return [JobInfo("job-123", 4, 4, 1, self.began_ns, self.whole.end_ns)]

    def evidence(self, job: str, start_ns: int, end_ns: int) -> Evidence:
        if job != "job-123":
            raise UnknownJob(job, ["job-123"])
        self.asked.append((start_ns, end_ns))
        return self.newest if self.newest and end_ns - start_ns <= 10 * MINUTE else self.whole

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> OneJob:
    made = OneJob()

    def opened(url: str, *, read_only: bool = False) -> Store:
        assert url == "sqlite:///x.db"
        assert read_only
        return made  # type: ignore[return-value]

    monkeypatch.setattr(service, "open_store", opened)
    return made


def ask(store: OneJob, job: str = "job-123", *, age: int = 0, last: int | None = None):
    return diagnose_job("sqlite:///x.db", job, now_ns=store.whole.end_ns + age, last_ns=last)


def test_the_last_ten_minutes_up_to_the_newest_data(store):
    verdict = ask(store, age=30 * 10**9)
    assert verdict.culprits[0].rank == 2
    newest = store.whole.end_ns
    assert store.asked == [(newest + 1 - 10 * MINUTE, newest + 1)]
    assert not any("old" in gap for gap in verdict.not_seen)
    assert store.closed


def test_where_ten_minutes_hold_too_few_steps_it_looks_further_back(store):
    """Steps of half a minute: twenty of them are nothing to go by, 120 are."""
    of_an_hour = plan(steps=120)
    of_an_hour.running[2] += 30.0
    store.whole, _ = build(scaled(of_an_hour, 500.0))
    store.newest, _ = build(scaled(plan(steps=20), 500.0))
    verdict = ask(store)
    assert [culprit.rank for culprit in verdict.culprits] == [2]
    end = store.whole.end_ns + 1
    assert store.asked == [(end - 10 * MINUTE, end), (end - 180 * MINUTE, end)]
    store.asked.clear()
    assert ask(store, last=10 * MINUTE).status == "insufficient"
    assert len(store.asked) == 1, "who asks for ten minutes gets ten minutes"


def test_where_more_time_says_no_more_the_ten_minutes_are_what_is_told(store):
    store.whole, _ = build(plan(steps=40))
    store.newest, _ = build(plan(steps=20))
    verdict = ask(store)
    assert len(store.asked) == 2
    assert verdict.window.end == wording.instant(store.newest.end_ns)


def test_of_a_young_job_there_is_no_more_to_look_at(store):
    store.whole, _ = build(plan(steps=20))
    store.began_ns = T0
    assert ask(store).status == "insufficient"
    assert len(store.asked) == 1


def test_a_job_that_sends_much_is_not_looked_at_for_longer_than_can_be_held(store, monkeypatch):
    store.whole, _ = build(plan(steps=20))
    monkeypatch.setattr(service, "LONG_WINDOW_ROWS", 4 * 20)
    assert ask(store).status == "insufficient"
    assert len(store.asked) == 1


def test_a_job_that_has_just_gone_on_is_held_to_the_rate_at_which_it_sends(store, monkeypatch):
    """In most of the ten minutes nothing came: three hours at the present rate would be far too much."""
    store.whole, _ = build(plan(steps=20))
    monkeypatch.setattr(service, "LONG_WINDOW_ROWS", 100 * 4 * 20)
    assert ask(store).status == "insufficient"
    assert len(store.asked) == 1


def test_a_window_that_was_asked_for_ends_now(store):
    ask(store, age=MINUTE // 2, last=2 * MINUTE)
    now = store.whole.end_ns + MINUTE // 2
    assert store.asked == [(now + 1 - 2 * MINUTE, now + 1)]


def test_data_that_is_newer_than_now_is_in_the_window(store):
    ask(store, age=-MINUTE, last=2 * MINUTE)
    assert store.asked == [(store.whole.end_ns + 1 - 2 * MINUTE, store.whole.end_ns + 1)]


def test_a_known_job_without_data_in_the_window_says_when_its_newest_is(store):
    store.whole = without(store.whole, 0, 1, 2, 3)
    verdict = ask(store, age=200 * MINUTE, last=10 * MINUTE)
    assert verdict.status == "insufficient"
    newest = wording.to_the_second(wording.instant(store.whole.end_ns))
    assert verdict.summary == (
        "Not enough evidence: nothing of job-123 came in the last 10 minutes; "
        f"its newest data is 3 hours old ({newest})."
    )
    assert "For what was last seen of it: sysom diagnose job-123" in verdict.actions


def test_old_data_is_said_to_be_old(store):
    assert (
        "the newest data of this job is 3 hours old: what happens now is not seen"
        in ask(store, age=200 * MINUTE).not_seen
    )


def test_an_unknown_job_raises_with_the_nearest_names(store):
    with pytest.raises(UnknownJob, match="did you mean job-123"):
        ask(store, "job-12")
    assert store.closed


def test_it_can_be_sent_to_another_process(store):
    assert pickle.loads(pickle.dumps(diagnose_job)) is diagnose_job
    verdict = ask(store)
    assert pickle.loads(pickle.dumps(verdict)) == verdict
