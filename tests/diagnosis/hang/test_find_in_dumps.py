"""Who holds a job of which dumps of its flight recorder are all that is known, and when dumps show no hang."""

from __future__ import annotations

import msgspec
import pytest

from diagnosis.hang.find import Hang, find_hang
from probes.records import Op
from tests.diagnosis.hang.hangs import AR, T0, WORLD, S, calls, held, kinds, made, running, with_rank, without


class TestDumps:
    def dump(
        self, own: dict[int, list], groups: dict[str, list[int]] | None = None, **more: object
    ) -> Hang | None:
        newest = max((row[4] or row[3] for rows in own.values() for row in rows), default=0.0)
        more = {"until": newest} | more
        return find_hang(made(groups or WORLD, own, source="flight-recorder", **more))  # type: ignore[arg-type]

    def test_the_rank_that_skips_an_all_reduce_is_named(self):
        hang = self.dump({0: calls(5, 1), 1: calls(4), 2: calls(5, 1), 3: calls(5, 1)})
        assert (held(hang), kinds(hang)) == ([1], {"never-came"})
        assert hang is not None
        assert (hang.op, hang.communicator, hang.seq) == ("all-reduce", "WORLD", 5)
        assert hang.since_ns == T0 + S // 2
        assert set(hang.victims) == {0, 2, 3}

    def test_counters_count_where_the_ring_is_empty(self):
        ring = {rank: [("world", 900, AR, 1.0, None)] for rank in (0, 1, 2)} | {3: []}
        told = {rank: {"world": (900, 899)} for rank in (0, 1, 2)} | {3: {"world": (899, 899)}}
        assert held(self.dump(ring, enqueued=told)) == [3]

    def test_a_rank_of_which_the_dump_tells_nothing_is_not_named(self):
        ring = {rank: [("world", 900, AR, 1.0, None)] for rank in (0, 1, 2)} | {3: []}
        assert held(self.dump(ring)) == []

    def test_a_dump_without_anything_pending_is_no_hang(self):
        assert self.dump({rank: calls(50) for rank in range(4)}) is None

    def test_a_collective_in_flight_on_all_ranks_is_no_hang(self):
        assert self.dump({rank: calls(50, 1) for rank in range(4)}) is None
        assert self.dump({rank: calls(50, 3) for rank in range(4)}) is None

    def test_ends_that_the_watchdog_has_noticed_on_some_ranks_only_are_no_hang(self):
        assert self.dump({0: calls(50, 1), 1: calls(50, 2), 2: calls(50), 3: calls(50, 1)}) is None

    def test_dumps_written_one_after_the_other_while_the_job_ran_are_no_hang(self):
        assert self.dump({0: calls(50, 1), 1: calls(52, 1), 2: calls(55, 1), 3: calls(58, 1)}) is None
        assert self.dump({0: calls(50), 1: calls(59, 1), 2: calls(59, 1), 3: calls(59, 1)}) is None

    def test_ends_that_many_ranks_have_not_noticed_yet_are_no_hang(self):
        own = {rank: calls(20) for rank in range(8)} | {rank: calls(20, 4) for rank in (1, 2)}
        assert self.dump(own, {"world": list(range(8))}) is None
        old = made({"world": list(range(8))}, own, source="flight-recorder", until=30.0)
        assert held(find_hang(old)) == [1, 2]

    def test_ends_noticed_late_here_on_one_rank_and_there_on_another_are_no_hang(self):
        groups = {"a": list(range(6)), "b": list(range(6))}
        own = {rank: [*calls(9, group="a"), *calls(9, group="b")] for rank in range(6)}
        own[0], own[1] = (
            [*calls(9, 4, group="a"), *calls(9, group="b")],
            [*calls(9, group="a"), *calls(9, 4, group="b")],
        )
        assert self.dump(own, groups) is None

    def test_one_who_waits_for_a_rank_that_is_stuck_is_cleared_though_that_waits_for_it_too(self):
        groups = {"tp": [0, 1, 2, 3], "b": [2, 4], "c": [2, 4]}
        own = {rank: calls(9, group="tp") for rank in (0, 1, 3)} | {2: calls(9, 4, group="tp")}
        own[2] += [("b", 1, AR, 0.1, 0.2), ("c", 1, AR, 0.1, 0.2), ("c", 2, AR, 2.0, None)]
        own |= {4: [("b", 1, AR, 0.1, 0.2), ("c", 1, AR, 0.1, 0.2), ("b", 2, AR, 2.0, None)]}
        assert held(self.dump(own, groups)) == [2]

    @pytest.mark.parametrize(
        ("skew", "seeds"),
        [
            (0.0, range(15)),
            (0.05, range(15)),
            (0.5, range(45, 60)),
            (1.0, range(160, 170)),
            (2.0, range(140, 170)),
        ],
    )
    def test_dumps_of_a_running_job_are_no_hang_though_it_ends_meanwhile(self, skew: float, seeds: range):
        """Where some are written when the job has just ended, one may be behind: several of these are such."""
        assert [find_hang(running(seed, skew=skew)) for seed in seeds] == [None] * len(seeds)

    @pytest.mark.parametrize("ranks", [2, 4, 8])
    @pytest.mark.parametrize(("skew", "lag"), [(0.0, 0.1), (0.03, 0.4), (0.3, 0.1), (2.0, 0.4)])
    def test_nor_are_those_of_a_small_one(self, ranks: int, skew: float, lag: float):
        dumps = (running(seed, skew=skew, lag=lag, ranks=ranks, steps=80) for seed in range(8))
        assert [find_hang(dump) for dump in dumps] == [None] * 8

    def test_a_healthy_dump_with_a_missing_rank_is_no_hang(self):
        whole = made(WORLD, {rank: calls(50, 1) for rank in range(4)}, source="flight-recorder")
        assert find_hang(without(whole, 2)) is None

    def test_stages_of_a_pipeline_may_have_different_counts_pending(self):
        groups = {"tp0": [0, 1], "tp1": [2, 3]}
        own = {0: calls(9, 6, group="tp0"), 1: calls(9, 6, group="tp0")}
        own |= {2: calls(30, 2, group="tp1"), 3: calls(30, 2, group="tp1")}
        assert self.dump(own, groups) is None

    def test_a_victim_that_waits_elsewhere_is_walked_past(self):
        # Rank 3 never came to its tensor group; 2 waits there and so never came to the data group, where 0 waits.
        groups = {"dp": [0, 2], "tp": [2, 3], "dp1": [1, 3], "tp0": [0, 1]}
        own = {0: [("tp0", 7, AR, 1.0, 1.1), ("dp", 5, AR, 2.0, None)], 1: [("tp0", 7, AR, 1.0, 1.1)]}
        own[1].append(("dp1", 5, AR, 2.0, None))
        own |= {2: [("dp", 4, AR, 0.5, 0.6), ("tp", 9, AR, 2.1, None)]}
        own |= {3: [("dp1", 4, AR, 0.5, 0.6), ("tp", 8, AR, 1.0, 1.1)]}
        hang = self.dump(own, groups)
        assert held(hang) == [3]
        assert hang is not None
        assert hang.victims[0].endswith("for rank 2, which waits itself")
        assert hang.victims[2] == "waits in all-reduce 9 on TP for rank 3"

    def test_two_culprits_of_two_groups_are_both_named(self):
        groups = {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7]}
        own = {rank: calls(5, 1, group="a") for rank in range(4)} | {
            rank: calls(8, 1, group="b") for rank in range(4, 8)
        }
        own[2], own[7] = calls(4, group="a"), calls(7, group="b")
        assert held(self.dump(own, groups)) == [2, 7]

    def test_a_receive_whose_sender_never_came(self):
        groups = {"pp/0:1": [0, 1], "pp/1:2": [1, 2]}
        own = {0: [], 1: [("pp/0:1", 41, Op.RECV, 1.0, None)], 2: [("pp/1:2", 77, Op.RECV, 1.1, None)]}
        hang = self.dump(own, groups)
        assert (held(hang), kinds(hang)) == ([0], {"never-came"})
        assert set(hang.victims) == {1, 2}  # type: ignore[union-attr]

    def test_a_sender_that_sent_less_than_is_waited_for(self):
        groups = {"pp/0:1": [0, 1]}
        wanted = [("pp/0:1", seq, Op.RECV, 1.0 + seq, None) for seq in (6, 7)]
        own = {0: [("pp/0:1", 900, Op.SEND, 1.0, None)], 1: wanted}
        assert held(self.dump(own, groups)) == [0]
        own[0] = [*own[0], ("pp/0:1", 901, Op.SEND, 2.0, None)]
        assert self.dump(own, groups) is None

    def test_numbers_of_a_send_and_its_receive_differ(self):
        groups = {"pp/0:1": [0, 1]}
        own = {0: [("pp/0:1", 900, Op.SEND, 1.0, None)], 1: [("pp/0:1", 7, Op.RECV, 1.1, None)]}
        assert self.dump(own, groups) is None

    def test_a_rank_that_does_not_end_what_its_peers_ended_is_stuck_inside(self):
        own = {rank: [*calls(9), ("world", 10, AR, 2.5, None)] for rank in range(4)} | {2: calls(9, 4)}
        assert (held(self.dump(own)), kinds(self.dump(own))) == ([2], {"stuck-inside"})

    def test_one_of_eight_that_is_behind_is_stuck_where_others_wait_and_one_of_four_may_be_late_to_notice(
        self,
    ):
        for size, expected in ((8, [2]), (4, [])):
            own = {rank: calls(10, 1) for rank in range(size)} | {2: calls(9, 4)}
            assert held(self.dump(own, {"world": list(range(size))})) == expected

    def test_who_is_inside_a_collective_with_all_its_members_is_under_way_and_the_job_with_it(self):
        """Rank 3 has not come to its pair's 6 as its head, 5, is under way on both; so nobody stands still."""
        groups = {"a": [0, 3], "b": [1, 3], "c": [1, 2]}
        own = {rank: calls(4, group=group) for rank, group in ((0, "a"), (2, "c"))}
        own |= {
            3: [*calls(4, group="a"), *calls(4, group="b")],
            1: [*calls(4, group="b"), *calls(4, group="c")],
        }
        own[0].append(("a", 5, AR, 2.0, None))
        assert held(self.dump(own, groups)) == [3]
        own[3].append(("b", 5, AR, 1.9, None))
        own[1].append(("b", 5, AR, 1.9, None))
        assert self.dump(own, groups) is None

    def test_one_rank_that_is_behind_while_nobody_waits_is_stuck_only_when_the_others_ended_long_ago(self):
        own = {rank: calls(9) for rank in range(4)} | {2: calls(9, 4)}
        assert self.dump(own) is None  # its dump may have been written before the others', at the job's end
        assert (held(self.dump(own, until=30.0)), kinds(self.dump(own, until=30.0))) == (
            [2],
            {"stuck-inside"},
        )

    def test_a_broadcast_that_ended_on_its_root_says_nothing_about_the_others(self):
        own = {rank: calls(9, op=Op.BROADCAST) for rank in (0, 1, 3)} | {2: calls(9, 4, op=Op.BROADCAST)}
        assert self.dump(own) is None

    def test_a_gpu_that_has_not_begun_what_runs_on_the_others(self):
        own = {rank: calls(9, 1) for rank in range(4)}
        hang = self.dump(own, started={rank: {("world", 9)} for rank in (0, 1, 3)} | {2: {("world", 8)}})
        assert held(hang) == []  # nothing tells that rank 2's recorder times kernels
        timed = made(
            WORLD, own, source="flight-recorder", started={rank: {("world", 9)} for rank in (0, 1, 3)}
        )
        told = [
            msgspec.structs.replace(one, started=8)
            for one in made(WORLD, own, enqueued={2: {"world": (9, 8)}}).ranks[2].progress
        ]
        assert kinds(find_hang(with_rank(timed, 2, progress=told))) == {"not-begun"}

    def test_the_fewer_that_call_another_collective_are_named(self):
        own = {rank: [*calls(4), ("world", 5, AR, 1.0, None)] for rank in range(4)}
        own[3][-1] = ("world", 5, Op.BROADCAST, 1.0, None)
        hang = self.dump(own)
        assert (held(hang), kinds(hang)) == ([3], {"mismatch"})
        assert "calls broadcast of 4,096 bytes at number 5 on WORLD" in hang.holders[0].reason  # type: ignore[union-attr]

    def test_the_fewer_that_bring_another_size_are_named(self):
        hang = self.dump({rank: calls(5, 1) for rank in range(4)}, size={1: 8192})
        assert (held(hang), kinds(hang)) == ([1], {"mismatch"})

    def test_the_fewer_that_bring_another_element_type_are_named(self):
        hang = self.dump({rank: calls(5, 1) for rank in range(4)}, dtype={1: "bfloat16"})
        assert (held(hang), kinds(hang)) == ([1], {"mismatch"})
        assert hang.holders[0].reason == (  # type: ignore[union-attr]
            "calls all-reduce of 4,096 bytes of bfloat16 at number 5 on WORLD, "
            "where ranks 0, 2 and 3 call all-reduce of 4,096 bytes of float32"
        )

    def test_element_types_of_an_all_to_all_may_not_differ(self):
        own = {rank: calls(5, 1, op=Op.ALLTOALL) for rank in range(4)}
        assert held(self.dump(own, size={1: 8192}, dtype={2: "bfloat16"})) == [2]

    def test_where_size_and_element_type_differ_both_are_said(self):
        hang = self.dump({rank: calls(5, 1) for rank in range(4)}, size={1: 2048}, dtype={1: "bfloat16"})
        assert held(hang) == [1]
        assert "calls all-reduce of 2,048 bytes of bfloat16 at" in hang.holders[0].reason  # type: ignore[union-attr]

    def test_two_element_types_in_two_ranks_are_said_and_neither_is_named(self):
        own = {rank: calls(5, 1) for rank in (0, 1)}
        hang = self.dump(own, {"world": [0, 1]}, dtype={1: "bfloat16"})
        assert hang is not None
        assert (hang.kind, hang.holders) == ("mismatch", ())
        assert "rank 1 calls all-reduce of 4,096 bytes of bfloat16" in hang.reason

    @pytest.mark.parametrize("unknown", [{"dtype": {1: ""}}, {"size": {1: -1}}])
    def test_what_is_not_known_accuses_nobody(self, unknown: dict):
        assert self.dump({rank: calls(5, 1) for rank in range(4)}, **unknown) is None

    def test_what_is_not_known_is_on_no_side(self):
        """Two ranks tell their element type and differ, two do not tell: there is no majority."""
        hang = self.dump({rank: calls(5, 1) for rank in range(4)}, dtype={1: "bfloat16", 2: "", 3: ""})
        assert hang is not None
        assert (hang.kind, held(hang)) == ("mismatch", [])

    def test_barriers_have_no_element_type_that_matters(self):
        own = {rank: calls(5, 1, op=Op.BARRIER) for rank in range(4)}
        assert self.dump(own, dtype={1: "uint8"}) is None

    def test_sizes_of_an_all_to_all_may_differ(self):
        own = {rank: calls(5, 1, op=Op.ALLTOALL) for rank in range(4)}
        assert self.dump(own, size={1: 8192}) is None

    def test_two_ranks_that_disagree_are_said_and_neither_is_named(self):
        own = {0: [("world", 5, AR, 1.0, None)], 1: [("world", 5, Op.BROADCAST, 1.0, None)]}
        hang = self.dump(own, {"world": [0, 1]})
        assert hang is not None
        assert (hang.kind, hang.holders) == ("mismatch", ())
        assert "rank 0 calls all-reduce" in hang.reason
        assert "rank 1 calls broadcast" in hang.reason

    def test_those_who_wait_for_the_fewer_are_cleared_whatever_they_missed_elsewhere(self):
        groups = {"a": [0, 1, 2], "b": [0, 3]}
        own = {rank: [("a", 5, AR, 1.0, None)] for rank in (0, 1)} | {2: [("a", 5, Op.BROADCAST, 1.0, None)]}
        own[0].insert(0, ("b", 1, AR, 0.5, 0.6))
        own[3] = [("b", 1, AR, 0.5, 0.6), ("b", 2, AR, 1.2, None)]
        assert held(self.dump(own, groups)) == [2]

    def test_two_communicators_in_two_orders_are_a_circle(self):
        groups = {"a": [0, 1], "b": [0, 1], "c": [0, 1, 2, 3]}
        own = {0: [("a", 5, AR, 1.0, None)], 1: [("b", 3, AR, 1.0, None)]}
        own = {rank: [("a", 4, AR, 0.1, 0.2), ("b", 2, AR, 0.3, 0.4), *rows] for rank, rows in own.items()}
        own |= {2: [("c", 1, AR, 1.1, None)], 3: [("c", 1, AR, 1.1, None)]}
        own = {rank: [("c", 0, AR, 0.05, 0.06), *rows] for rank, rows in own.items()}
        hang = self.dump(own, groups)
        assert (held(hang), kinds(hang)) == ([0, 1], {"order"})

    def test_most_ranks_waiting_for_ranks_without_dumps_is_a_hang_without_a_name(self):
        groups = {"tp": [0, 1, 2, 3]}
        hang = self.dump({rank: calls(9, 3, group="tp") for rank in (0, 1, 2)}, groups, world=4)
        assert hang is not None
        assert (hang.kind, hang.holders, hang.unseen) == ("unseen", (), (3,))
