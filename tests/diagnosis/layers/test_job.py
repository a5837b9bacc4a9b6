"""Slowdowns that no single rank is to blame for: whose they are."""

import numpy as np

from bench.synthetic import plan, verdict_of


def test_ranks_that_take_turns_at_being_late_are_no_slow_transfer():
    made = plan(ranks=6)
    turns = np.random.default_rng(1).integers(0, 6, 500)
    made.running[turns, np.arange(400, 900)] += 25.0
    verdict = verdict_of(made)
    assert (verdict.status, verdict.culprits, verdict.owner) == ("slow", [], "unknown")
    assert verdict.layer != "nccl"
    assert "they wait for it, not for the transfer" in verdict.summary


def test_a_slower_transfer_is_said_to_be_one():
    made = plan(ranks=6)
    made.transfer[400:] += 15.0
    verdict = verdict_of(made)
    assert (verdict.status, verdict.culprits, verdict.layer) == ("slow", [], "nccl")
