"""Who holds a job that agents watch, how long a wait must last, and who only waits."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from diagnosis.evidence import Evidence
from diagnosis.hang.find import find_hang
from tests.diagnosis.hang.hangs import AR, T0, WORLD, S, calls, held, kinds, made, with_rank, without


class TestAgents:
    def live(
        self, own: dict[int, list], groups: dict[str, list[int]] | None = None, until: float = 60.0
    ) -> Evidence:
        return made(groups or WORLD, own, until=until)

    def stalled(self, until: float = 60.0) -> Evidence:
        return self.live({0: calls(101, 1), 1: calls(100), 2: calls(101, 1), 3: calls(101, 1)}, until=until)

    def test_a_rank_that_never_comes_is_named(self):
        hang = find_hang(self.stalled())
        assert (held(hang), kinds(hang)) == ([1], {"never-came"})
        assert hang is not None
        assert not hang.snapshot

    def test_a_short_wait_is_no_hang(self):
        assert find_hang(self.stalled(until=35.0)) is None

    def test_a_pause_as_long_as_one_before_is_no_hang(self):
        own = {rank: calls(100) for rank in range(4)}
        for rank, rows in own.items():  # a checkpoint of 40 s, then 20 steps
            rows += [("world", seq, AR, 50 + seq * 0.1, 50.01 + seq * 0.1) for seq in range(101, 121)]
            if rank != 1:
                rows.append(("world", 121, AR, 63.0, None))
        assert find_hang(self.live(own, until=63.0 + 60.0)) is None
        assert held(find_hang(self.live(own, until=63.0 + 160.0))) == [1]

    def test_a_slow_job_is_no_hang(self):
        own = {rank: calls(12, int(rank != 1), step=20.0) for rank in range(4)}
        own[1] = calls(11, step=20.0)
        assert find_hang(self.live(own, until=12 * 20.0 + 50.0)) is None

    def test_a_job_that_has_just_begun_may_compile(self):
        own = {0: calls(2, 1), 1: calls(1), 2: calls(2, 1), 3: calls(2, 1)}
        assert find_hang(self.live(own, until=200.0)) is None
        assert held(find_hang(self.live(own, until=400.0))) == [1]

    def test_a_healthy_job_is_no_hang(self):
        assert find_hang(self.live({rank: calls(500) for rank in range(4)})) is None
        assert find_hang(self.live({rank: calls(599, 1) for rank in range(4)})) is None

    def test_a_rank_whose_process_ended_is_named_sooner(self):
        evidence = with_rank(self.stalled(until=22.0), 1, ended=True)
        assert (held(find_hang(evidence)), kinds(find_hang(evidence))) == ([1], {"died"})

    def test_a_collective_that_stays_open_while_others_end_holds_nobody(self):
        own = {rank: calls(500) for rank in range(4)}
        for rank in (0, 2):  # its end was lost, or it belongs to a checkpoint that is written meanwhile
            own[rank][50] = (*own[rank][50][:4], None)
        assert find_hang(self.live(own, until=75.0)) is None

    def test_a_rank_that_works_elsewhere_is_slow_and_holds_nobody(self):
        groups = WORLD | {"own": [1, 4]}
        busy = [("own", seq, AR, 10 + seq, 10.5 + seq) for seq in range(1, 50)]
        own = {rank: calls(101, 1) for rank in (0, 2, 3)} | {1: [*calls(100), *busy], 4: busy}
        assert find_hang(self.live(own, groups)) is None

    def test_nor_does_one_who_waits_for_a_rank_that_works_elsewhere(self):
        groups = WORLD | {"own": [1, 4], "next": [0, 5]}
        busy = [("own", seq, AR, 10 + seq, 10.5 + seq) for seq in range(1, 50)]
        own = {rank: calls(101, 1) for rank in (0, 2, 3)} | {1: [*calls(100), *busy], 4: busy}
        own |= {5: [("next", 1, AR, 0.01, 0.02), ("next", 2, AR, 11.0, None)]}
        own[0].insert(0, ("next", 1, AR, 0.01, 0.02))
        assert find_hang(self.live(own, groups)) is None

    def test_a_job_that_ended_is_no_hang(self):
        evidence = self.stalled()
        for rank in range(4):
            evidence = with_rank(evidence, rank, ended=True)
        assert find_hang(evidence) is None

    def test_a_rank_that_ended_while_nobody_waits_is_no_hang(self):
        evidence = self.live({rank: calls(500) for rank in range(4)})
        assert find_hang(with_rank(evidence, 2, ended=True)) is None

    def test_a_node_that_fell_silent_is_said_so(self):
        evidence = self.stalled()
        assert kinds(find_hang(with_rank(evidence, 1, last_ns=T0 + 10 * S))) == {"silent"}
        assert held(find_hang(with_rank(self.stalled(35.0), 1, last_ns=T0 + 10 * S))) == []

    def test_a_rank_that_never_used_the_world_at_all(self):
        own = {
            rank: [("pair", seq, AR, seq * 0.1, seq * 0.1 + 0.01) for seq in range(1, 50)] for rank in (2, 3)
        }
        own |= {0: calls(1, 1), 1: calls(1, 1), 2: [*own[2], ("world", 1, AR, 6.0, None)]}
        evidence = self.live(own, WORLD | {"pair": [2, 3]}, until=100.0)
        three = [one for one in evidence.ranks[3].communicators if one.uid != "world"]
        table = evidence.ranks[3].collectives
        evidence = with_rank(
            evidence, 3, communicators=three, collectives=replace(table, communicator=table.communicator * 0)
        )
        assert held(find_hang(evidence)) == [3]

    def test_all_inside_and_nothing_moves_names_nobody(self):
        hang = find_hang(self.live({rank: calls(101, 1) for rank in range(4)}))
        assert hang is not None
        assert (hang.kind, hang.holders) == ("together", ())

    def test_ranks_that_nobody_watches_may_hold_it(self):
        hang = find_hang(without(self.live({rank: calls(101, 1) for rank in range(4)}), 2))
        assert hang is not None
        assert (hang.kind, hang.holders, hang.unseen) == ("unseen", (), (2,))

    def test_communicators_that_cannot_be_told_apart_blame_nobody(self):
        evidence = self.live(
            {rank: calls(101, 1, group=f"tp{rank // 2}") for rank in range(3)} | {3: calls(90, group="tp1")},
            {"tp0": [0, 1], "tp1": [2, 3]},
        )
        for rank in range(4):
            nameless = [nameless_one(one) for one in evidence.ranks[rank].communicators]
            evidence = with_rank(evidence, rank, communicators=nameless)
        assert held(find_hang(evidence)) == []


def nameless_one(communicator):
    return msgspec.structs.replace(communicator, uid="")
