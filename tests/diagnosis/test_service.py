"""From a store's address to a verdict."""

import pickle

import pytest

from diagnosis import service
from diagnosis.evidence import Evidence
from diagnosis.service import diagnose_job
from diagnosis.store import JobInfo, Store, UnknownJob
from tests.diagnosis.synthetic import T0, build, contended, plan

MINUTE = 60 * 10**9


class OneJob:
    """A store that holds one job and remembers how it was asked."""

    def __init__(self) -> None:
        self.whole, _ = build(contended(plan(), 2, 18.0))
        self.asked: list[tuple[int, int]] = []
        self.closed = False

    def jobs(self) -> list[JobInfo]:
        return [JobInfo("job-123", 4, 4, 1, T0, self.whole.end_ns)]

    def evidence(self, job: str, start_ns: int, end_ns: int) -> Evidence:
        if job != "job-123":
            raise UnknownJob(job, ["job-123"])
        self.asked.append((start_ns, end_ns))
        return self.whole

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


def ask(
    store: OneJob, job: str = "job-123", *, start: int | None = None, end: int | None = None, age: int = 0
):
    return diagnose_job("sqlite:///x.db", job, start_ns=start, end_ns=end, now_ns=store.whole.end_ns + age)


def test_the_last_ten_minutes_up_to_the_newest_data(store):
    verdict = ask(store, age=30 * 10**9)
    assert verdict.culprits[0].rank == 2
    newest = store.whole.end_ns
    assert store.asked == [(newest + 1 - 10 * MINUTE, newest + 1)]
    assert not any("old" in gap for gap in verdict.not_seen)
    assert store.closed


def test_a_window_that_was_asked_for(store):
    ask(store, start=T0, end=T0 + MINUTE)
    ask(store, end=T0 + 20 * MINUTE)
    assert store.asked == [(T0, T0 + MINUTE), (T0 + 10 * MINUTE, T0 + 20 * MINUTE)]


def test_old_data_is_said_to_be_old(store):
    assert (
        "the newest data of this job is 3 hours old: what happens now is not seen"
        in ask(store, age=200 * MINUTE).not_seen
    )


def test_an_unknown_job_raises_with_the_nearest_names(store):
    with pytest.raises(UnknownJob, match="did you mean job-123"):
        ask(store, "job-12")
    assert store.closed


def test_a_window_that_ends_before_it_starts(store):
    with pytest.raises(ValueError, match="ends before it starts"):
        ask(store, start=T0 + MINUTE, end=T0)


def test_it_can_be_sent_to_another_process(store):
    assert pickle.loads(pickle.dumps(diagnose_job)) is diagnose_job
    verdict = ask(store)
    assert pickle.loads(pickle.dumps(verdict)) == verdict
