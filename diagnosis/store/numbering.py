"""Which run of an agent a list of communicators is from.

An agent numbers a rank's communicators in the order in which it learns them; its list only grows, and a
communicator whose name was unknown may get one. An agent that was started again on the same spool numbers
anew, maybe in another order, and a batch does not say which run made it: its list of communicators does, where
it makes a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from probes.records import Communicator


class Seen(NamedTuple):
    """A list of communicators, and the instant since which it is known to have been that (monotonic)."""

    at_ns: int
    communicators: list[Communicator]


def run_of(runs: Sequence[Seen], seen: Seen) -> int | None:
    """The place in ``runs`` of the one that ``seen`` is from; None when it is from none of them.

    Of several that fit, the newest that is not newer than ``seen``: their numbers mean the same.
    """
    fitting = [place for place, run in enumerate(runs) if _one_run(run, seen)]
    if not fitting:
        return None
    return max(
        fitting,
        key=lambda place: (
            runs[place].at_ns <= seen.at_ns,
            -abs(runs[place].at_ns - seen.at_ns),
            place,
        ),
    )


def joined(run: Seen, seen: Seen) -> Seen:
    """What is known of a run after a list that is from it."""
    if run.communicators == seen.communicators:
        return Seen(min(run.at_ns, seen.at_ns), run.communicators)
    both = zip(run.communicators, seen.communicators, strict=False)
    longer = max(run.communicators, seen.communicators, key=len)
    together = [mine if mine.uid else other for mine, other in both]
    together += longer[len(together) :]
    if together == run.communicators:
        return run
    return Seen(max(run.at_ns, seen.at_ns), together)


def _one_run(run: Seen, seen: Seen) -> bool:
    """Whether one run can have had both lists. Two lists of two runs may look so, too: then each number means
    the same in both, as far as names are known."""
    before, after = sorted((run, seen), key=lambda one: one.at_ns)
    if len(after.communicators) < len(before.communicators) and not all(c.uid for c in after.communicators):
        return False  # a list that shrank is another run's, and a nameless communicator there may be any
    return all(map(_may_become, before.communicators, after.communicators))


def _may_become(before: Communicator, after: Communicator) -> bool:
    if before == after:
        return True
    return not before.uid and (before.rank, before.size) == (after.rank, after.size)
